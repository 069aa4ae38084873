"""Several processes side by side: order, limits, failures, and nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from elastic_memory.reproduction.lab import Lab, Trained
from elastic_memory.reproduction.planning import tasks, to_do
from elastic_memory.reproduction.scheduler import IN_USE, Scheduler, Task, running_now
from elastic_memory.reproduction.tables import experiments
from elastic_memory.reproduction.worker import Job

ROOT = Path(__file__).parents[2]

# Writes when it began and ended; ends at SIGTERM with a file that says so, as a training process saves a checkpoint.
JOB = """
import pathlib, signal, sys, time
out, name, seconds, code = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
def save(*_):
    (out / f"{name}.saved").write_text("")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(out / f"{name}.begun").write_text(str(time.time()))
time.sleep(seconds)
print(f"{name} says why")
(out / f"{name}.ended").write_text(str(time.time()))
sys.exit(code)
"""


def task(out, name: str, seconds: float = 0.0, code: int = 0, expected: float | None = None) -> Task:
    return Task(name, [sys.executable, "-c", JOB, str(out), name, str(seconds), str(code)], expected)


def seen(out, kind: str) -> set[str]:
    return {path.stem for path in out.glob(f"*.{kind}")}


def moments(out, kind: str) -> dict[str, float]:
    return {path.stem: float(path.read_text()) for path in out.glob(f"*.{kind}")}


def test_all_are_done_in_order_and_no_more_at_a_time_than_allowed(tmp_path):
    names = [f"job{i}" for i in range(5)]
    scheduler = Scheduler([task(tmp_path, name, 0.3) for name in names], 2, tmp_path / "logs")
    scheduler.run()
    assert sorted(scheduler.done) == names and not scheduler.failed and not scheduler.left
    begun, ended = moments(tmp_path, "begun"), moments(tmp_path, "ended")
    assert begun["job4"] > min(ended.values())
    for moment in begun.values():
        assert sum(begun[name] <= moment < ended[name] for name in names) <= 2


def test_when_time_is_over_running_jobs_save_and_the_rest_is_left(tmp_path):
    jobs = [task(tmp_path, "long", 60), task(tmp_path, "short"), task(tmp_path, "next", 60), task(tmp_path, "last")]
    scheduler = Scheduler(jobs, 2, tmp_path / "logs", seconds=6)
    began = time.monotonic()
    scheduler.run()
    assert time.monotonic() - began < 20
    assert scheduler.done == ["short"] and sorted(scheduler.left) == ["last", "long", "next"]
    assert seen(tmp_path, "saved") == {"long", "next"} and seen(tmp_path, "ended") == {"short"}


def test_what_is_not_expected_to_end_in_time_is_not_begun(tmp_path):
    jobs = [task(tmp_path, "large", expected=100.0), task(tmp_path, "small", expected=1.0), task(tmp_path, "unknown")]
    scheduler = Scheduler(jobs, 1, tmp_path / "logs", seconds=50)
    scheduler.run()
    assert (
        scheduler.done == ["small", "unknown"]
        and scheduler.left == ["large"]
        and "large" not in seen(tmp_path, "begun")
    )


def test_a_job_is_begun_only_if_those_that_run_can_still_end_in_time(tmp_path):
    # Two of 30 seconds share a device: beside a third all of them would end after 90.
    jobs = [task(tmp_path, name, 2, expected=30.0) for name in ("one", "two", "three")]
    scheduler = Scheduler(jobs, 3, tmp_path / "logs", seconds=70)
    scheduler.run()
    begun, ended = moments(tmp_path, "begun"), moments(tmp_path, "ended")
    assert begun["two"] < min(ended.values()) <= begun["three"]


def test_where_nothing_fits_the_most_important_is_begun_all_the_same(tmp_path):
    scheduler = Scheduler(
        [task(tmp_path, "large", expected=100.0), task(tmp_path, "other", expected=100.0)], 2, tmp_path / "logs", 50
    )
    scheduler.run()
    assert scheduler.done == ["large"] and scheduler.left == ["other"]


def test_a_job_that_fails_is_named_with_its_last_words_and_the_others_go_on(tmp_path, capsys):
    scheduler = Scheduler([task(tmp_path, "bad", code=3), task(tmp_path, "good")], 1, tmp_path / "logs")
    scheduler.run()
    assert (scheduler.failed, scheduler.done) == (["bad"], ["good"])
    assert "failed bad (exit 3): bad says why" in capsys.readouterr().err


def test_a_job_that_another_call_works_on_is_left_and_did_not_fail(tmp_path, capsys):
    scheduler = Scheduler([task(tmp_path, "theirs", code=IN_USE), task(tmp_path, "ours")], 1, tmp_path / "logs")
    scheduler.run()
    assert (scheduler.left, scheduler.failed, scheduler.done) == (["theirs"], [], ["ours"])
    assert "theirs is left to another call" in capsys.readouterr().err


def test_a_job_without_enough_device_memory_is_tried_again_with_fewer_neighbours(tmp_path, capsys):
    # Fails while three jobs run, as the third to fill a GPU would.
    code = (
        "import sys, time; from pathlib import Path; time.sleep(0.3); [file] = Path(sys.argv[1]).glob('running-*')\n"
        "sys.exit('CUDA out of memory' if file.read_text() == '3' else 0)"
    )
    logs = tmp_path / "logs"
    large = Task("large", [sys.executable, "-c", code, str(logs)])
    jobs = [task(tmp_path, "one", 1.5), task(tmp_path, "two", 3), large, task(tmp_path, "last")]
    scheduler = Scheduler(jobs, 3, logs)
    scheduler.run()
    assert sorted(scheduler.done) == ["large", "last", "one", "two"] and not scheduler.failed
    assert scheduler.parallel == 2 and "large needs more memory" in capsys.readouterr().err

    alone = Task("alone", [sys.executable, "-c", "raise SystemExit('out of memory')"])
    scheduler = Scheduler([alone], 3, logs)
    scheduler.run()
    assert scheduler.failed == ["alone"]


def test_jobs_of_all_calls_in_a_folder_share_the_device(tmp_path):
    """Two calls at once: each counts the other's jobs; a call that was killed counts no more."""
    logs, gone = tmp_path / "logs", subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    logs.mkdir()
    (logs / f"running-{gone.pid}").write_text("3")
    assert running_now(logs) == 1
    (logs / f"running-{os.getppid()}").write_text("2")
    read = "from elastic_memory.reproduction.scheduler import running_now; from pathlib import Path; import sys\n"
    read += "Path(sys.argv[2]).write_text(str(running_now(Path(sys.argv[1]))))"
    Scheduler([Task("one", [sys.executable, "-c", read, str(logs), str(tmp_path / "seen")])], 1, logs).run()
    assert (tmp_path / "seen").read_text() == "3"
    assert running_now(logs) == 2 and [path.name for path in logs.glob("running-*")] == [f"running-{os.getppid()}"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_jobs_too(tmp_path, number):
    program = (
        "import sys; from pathlib import Path; from tests.reproduction.test_scheduler import *\n"
        "out = Path(sys.argv[1]); Scheduler([task(out, 'long', 60)], 1, out / 'logs').run()"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    while not seen(tmp_path, "begun"):
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "interrupted: running jobs" in said and "0 done, 0 failed, 1 left: repeat the command to resume" in said
    assert seen(tmp_path, "saved") == {"long"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_from_the_start_stays_ignored(tmp_path, number):
    """nohup ignores SIGHUP; a shell ignores Ctrl-C for what it starts in the background."""
    program = (
        "import sys; from pathlib import Path; from tests.reproduction.test_scheduler import *\n"
        f"signal.signal({int(number)}, signal.SIG_IGN)\n"
        "out = Path(sys.argv[1]); Scheduler([task(out, 'short', 2)], 1, out / 'logs').run()\n"
        f"assert signal.getsignal({int(number)}) is signal.SIG_IGN"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.DEVNULL)
    while not seen(tmp_path, "begun"):
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(30) == 0
    assert seen(tmp_path, "ended") == {"short"} and not seen(tmp_path, "saved")


def test_jobs_are_a_corpus_keys_first_and_then_its_models(tmp_path):
    lab = Lab("small", tmp_path, tmp_path, reference="some/model")
    todo = to_do(lab, [experiments()["main"]], seeds=1)
    made = tasks(lab, todo, parallel=3, keep_weights=True)
    assert [one.name for one in made[:2]] == ["small-proofs-keys", todo[0].name]
    assert [one.name for one in made].index("small-books-keys") == 7 and len(made) == 18 + 3
    job = Job(**json.loads(made[1].command[-1]))
    assert Trained(**job.model) == todo[0].model and job.keep_weights and job.sharing == 3
    assert [one.model.corpus for one in todo] == ["proofs"] * 6 + ["books"] * 6 + ["edu"] * 6


def test_further_seeds_of_further_corpora_come_last(tmp_path):
    todo = [
        one.model for one in to_do(Lab("small", tmp_path), [experiments()[name] for name in ("main", "memory-scaling")])
    ]
    steps = [(model.corpus, model.seed, model.multiple > 1 or model.points > 1) for model in todo]
    assert list(dict.fromkeys(steps)) == [
        ("proofs", 1, False), ("books", 1, False), ("edu", 1, False), ("proofs", 2, False), ("proofs", 3, False),
        ("proofs", 1, True), ("proofs", 2, True), ("books", 2, False), ("edu", 2, False),
    ]  # fmt: skip


def test_time_is_estimated_from_records_of_any_tier(tmp_path):
    other = shutil.ignore_patterns("[!s]*")  # all but tier small's
    shutil.copytree(ROOT / "results" / "runs", tmp_path / "runs", ignore=other)
    main = [experiments()["main"]]
    medium, paper = (
        {one.name: one.seconds for one in to_do(Lab(tier, tmp_path), main)} for tier in ("medium", "paper")
    )
    assert len(medium) == len(paper) == 18
    assert all(300 < seconds < 3600 for seconds in medium.values())
    assert sum(paper.values()) == pytest.approx(100 * sum(medium.values()))
    assert {one.seconds for one in to_do(Lab("small", tmp_path / "empty"), main)} == {None}


@pytest.mark.slow
def test_a_worker_stopped_in_the_middle_leaves_nothing_half_counted_and_the_next_call_continues(tmp_path):
    model = Trained(memory="none", seed=42)
    lab = Lab("smoke", tmp_path)
    lab.folder("proofs")
    command = Job(tier="smoke", out=str(tmp_path), model=asdict(model)).command()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment)
    while not list(tmp_path.glob("work/*/metrics.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert not list(tmp_path.glob("runs/*.json")) and len(to_do(lab, [experiments()["main"]], 1)) == 18
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert lab.record(model).trained["starts"] == 2 and len(to_do(lab, [experiments()["main"]], 1)) == 17
