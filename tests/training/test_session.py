"""Whole runs of twelve steps in this process: what a run leaves behind, and how it survives."""

import gc
import json
import math
import os
import shutil
import signal
import threading
import time
import tracemalloc

import pytest
import torch
from transformers import AutoModelForCausalLM

from elastic_memory.common.locks import locked
from elastic_memory.data import Samples, prepare, samples
from elastic_memory.training import checkpoints
from elastic_memory.training.order import sample_order
from elastic_memory.training.recipe import load_recipe
from elastic_memory.training.runs import StoppedError
from elastic_memory.training.session import Resume, train

from .conftest import QUICK, RECIPES, same_weights, weights

GO_ON = Resume(allowed=True)


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run, kind):
    return [e for e in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if e["event"] == kind]


def only_run(out):
    (run,) = out.glob("*-*")
    return run


def test_a_run_leaves_metrics_a_model_and_its_whole_story(undisturbed, corpus):
    steps = lines(undisturbed)
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert {"loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "data_share"} <= steps[0].keys()
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[3]["memory_norm/1"] > 0
    result = json.loads((undisturbed / "result.json").read_text())
    assert (result["steps"], result["tokens"], result["skipped"], result["restarts"]) == (12, 6144, 0, [])
    assert result["recipe"]["model"]["config"]["vocab_size"] == 256
    assert checkpoints.steps(undisturbed / "checkpoints") == [8, 12]
    model = AutoModelForCausalLM.from_pretrained(undisturbed / "model")
    assert model.config.memory == "elastic"
    card = (undisturbed / "model" / "README.md").read_text()
    for said in (
        "order of samples", "| memory | `elastic` in layers ", "numbers carried", "final training loss", "| data | ",
        "from_pretrained(", "elastic generate", "learning_rate:",
    ):  # fmt: skip
        assert said in card, said
    assert not list((undisturbed / "model").glob("*.bin")), "a pickle"


def test_no_byte_ends_what_a_model_of_bytes_says(undisturbed):
    model = AutoModelForCausalLM.from_pretrained(undisturbed / "model")

    def always_two(ids, scores):  # the id that means the end in Llama's own vocabulary
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([2]), 0.0)

    said = model.generate(torch.tensor([[65, 66]]), max_new_tokens=8, do_sample=False, logits_processor=[always_two])
    assert said[0].tolist() == [65, 66] + [2] * 8


def test_training_is_the_plain_loop_it_stands_for(undisturbed, quick, corpus):
    """The same weights from thirty lines of torch: schedule, clipping, decay groups and all."""
    from elastic_memory.data import samples
    from elastic_memory.training.build import build_model

    rows, training = samples(corpus), quick.training
    model = build_model(quick.replace(**{"model.config.vocab_size": 256}))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-7)
    order, losses = sample_order(len(rows), 48, 42), []
    for step in range(12):
        progress = max(0, step - 1) / 11
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step) * 0.5 * (1 + math.cos(math.pi * progress))
        batch = torch.stack([rows[int(i)]["input_ids"] for i in order[step * 4 : step * 4 + 4]])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert [line["loss"] for line in lines(undisturbed)] == pytest.approx(losses, abs=2e-5)
    for name, weight in weights(undisturbed).items():
        torch.testing.assert_close(model.state_dict()[name], weight, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("call", [1, 7, 8, 17, 23])
def test_a_crash_anywhere_and_resume_end_in_the_same_bits(quick, corpus, tmp_path, undisturbed, disturb, call):
    def crash(model, out):
        raise KeyError("the process dies here")

    disturb([call], crash)
    with pytest.raises(KeyError):
        train(quick, corpus, tmp_path)
    with pytest.raises(ValueError, match=r"was already started and is at step \d+ of 12: add --resume"):
        train(quick, corpus, tmp_path)
    train(quick, corpus, tmp_path, GO_ON)
    run = only_run(tmp_path)
    assert same_weights(run, undisturbed)
    assert [line["step"] for line in lines(run)] == list(range(1, 13))
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(undisturbed)]


def test_a_second_start_says_who_trains_the_run(quick, corpus, tmp_path, disturb):
    """It used to advise to resume, or to remove the folder: of a run that is being trained."""

    def crash(model, out):
        raise KeyError("the process dies here")

    disturb([7], crash)
    with pytest.raises(KeyError):
        train(quick, corpus, tmp_path)
    with (
        locked(only_run(tmp_path) / "checkpoints" / "lock"),
        pytest.raises(ValueError, match=f"in use by process {os.getpid()}"),
    ):
        train(quick, corpus, tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_exit_and_the_rest_follows_exactly(
    quick, corpus, tmp_path, undisturbed, disturb, number, code
):
    def interrupt(model, out):
        os.kill(os.getpid(), number)
        return out

    disturb([11], interrupt)
    with pytest.raises(SystemExit) as caught:
        train(quick, corpus, tmp_path)
    run = only_run(tmp_path)
    assert caught.value.code == code
    assert checkpoints.steps(run / "checkpoints") == [4, 6]
    train(quick, corpus, tmp_path, GO_ON)
    assert same_weights(run, undisturbed)
    assert [line["step"] for line in lines(run)] == list(range(1, 13))


@pytest.mark.parametrize("damage", ["truncate", "flip"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "manifest.json"]
)
def test_damage_is_told_and_the_checkpoint_before_is_used(
    quick, corpus, stopped_at_8, undisturbed, name, damage, capsys
):
    path = checkpoints.folder_of(stopped_at_8 / "checkpoints", 8) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-1])
    train(quick, corpus, stopped_at_8.parent, GO_ON)
    assert f"skipped a damaged checkpoint: step-00000008/{name}" in capsys.readouterr().err
    assert events(stopped_at_8, "start")[-1]["step"] == 4
    assert same_weights(stopped_at_8, undisturbed)
    assert [line["step"] for line in lines(stopped_at_8)] == list(range(1, 13))


def test_when_no_checkpoint_is_whole_nothing_is_thrown_away(quick, corpus, stopped_at_8):
    for step in (4, 8):
        (checkpoints.folder_of(stopped_at_8 / "checkpoints", step) / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"all 2 checkpoints .* are damaged"):
        train(quick, corpus, stopped_at_8.parent, GO_ON)
    assert len(lines(stopped_at_8)) == 8


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "trainer_state.json", "scheduler.pt"])
def test_without_its_state_a_run_goes_on_only_when_told_to(quick, corpus, stopped_at_8, name):
    (checkpoints.folder_of(stopped_at_8 / "checkpoints", 8) / name).unlink()
    with pytest.raises(ValueError, match=f"{name} missing.*--weights-only"):
        train(quick, corpus, stopped_at_8.parent, GO_ON)
    result = train(quick, corpus, stopped_at_8.parent, Resume(allowed=True, weights_only=True))
    assert result["steps"] == 12
    assert events(stopped_at_8, "weights only")[0]["step"] == 8
    rates = [line["learning_rate"] for line in lines(stopped_at_8)]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True), "the schedule went on where it was"


def spoil(value, gradient=False):
    def action(model, out):
        if gradient:
            out.loss.register_hook(lambda g: g * value)
        else:
            out.loss = out.loss * value
        return out

    return action


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("gradient", [False, True])
def test_a_step_that_is_not_finite_is_never_applied(quick, corpus, tmp_path, disturb, value, gradient):
    disturb([13], spoil(value, gradient))
    result = train(quick, corpus, tmp_path)
    run = only_run(tmp_path)
    (bad,) = [line for line in lines(run) if "skipped" in line]
    assert bad["step"] == 7
    assert bad["skipped"] == ("non-finite gradient" if gradient else "non-finite loss")
    order = sample_order(json.loads((corpus / "manifest.json").read_text())["splits"]["train"]["rows"], 48, 42)
    assert bad["rows"] == order[24:28].tolist()
    assert result["skipped"] == 1
    assert math.isfinite(result["final_loss"])
    assert all(torch.isfinite(weight).all() for weight in weights(run).values())


def test_three_bad_steps_go_back_to_the_last_good_ones_with_twice_the_warm_up(quick, corpus, tmp_path, disturb):
    disturb([11, 13, 15], spoil(math.nan))
    result = train(quick, corpus, tmp_path)
    run = only_run(tmp_path)
    (restart,) = result["restarts"]
    assert (restart["step"], restart["back_to"], restart["warmup"]) == (8, 4, 2)
    assert [bad["step"] for bad in restart["steps"]] == [6, 7]
    assert [line["step"] for line in lines(run)] == list(range(1, 13))
    rates = [line["learning_rate"] for line in lines(run)]
    assert (rates[4], rates[5] > 0, rates[5] < rates[6]) == (0, True, True)
    assert result["skipped"] == 0
    assert all(torch.isfinite(weight).all() for weight in weights(run).values())


def test_restarts_end(quick, corpus, tmp_path, disturb):
    disturb(range(11, 1000), spoil(math.nan))
    with pytest.raises(StoppedError, match="after 3 restarts"):
        train(quick, corpus, tmp_path)
    run = only_run(tmp_path)
    assert [event["warmup"] for event in events(run, "restart")] == [2, 4, 8]
    assert checkpoints.newest(run / "checkpoints").step == 4


def test_one_spike_is_skipped_and_a_sustained_one_restarts(quick, corpus, tmp_path, disturb):
    recipe = quick.replace(**{"stability.window": 8})
    disturb([15, 16], spoil(10.0))
    assert train(recipe, corpus, tmp_path / "once")["skipped"] == 1
    disturb([13, 14, 15, 16, 17, 18], spoil(10.0))
    result = train(recipe, corpus, tmp_path / "sustained")
    assert [restart["back_to"] for restart in result["restarts"]] == [4]
    assert "loss spike" in result["restarts"][0]["reason"]


def out_of_memory(model, out):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def test_out_of_memory_stops_with_the_batch_and_the_bytes(quick, corpus, tmp_path, undisturbed, disturb):
    disturb([11], out_of_memory)
    with pytest.raises(StoppedError) as caught:
        train(quick, corpus, tmp_path)
    for part in ("step 6", "2 x 128 tokens", "bytes in use", "20.00 GiB", "--set execution.micro_batch=1"):
        assert part in str(caught.value)
    train(quick, corpus, tmp_path, GO_ON)
    assert same_weights(only_run(tmp_path), undisturbed)


def test_half_the_micro_batch_keeps_the_global_batch(quick, corpus, tmp_path, undisturbed, disturb):
    disturb([11], out_of_memory)
    result = train(quick.replace(**{"execution.on_oom": "halve"}), corpus, tmp_path)
    run = only_run(tmp_path)
    assert events(run, "out of memory")[0]["micro_batch"] == 1
    assert result["machine"]["micro_batch"] == 1
    losses = [[line["loss"] for line in lines(each)] for each in (run, undisturbed)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_two_processes_do_not_share_a_folder(quick, corpus, stopped_at_8):
    with locked(stopped_at_8 / "checkpoints" / "lock"), pytest.raises(ValueError, match=f"process {os.getpid()} on"):
        train(quick, corpus, stopped_at_8.parent, GO_ON)
    train(quick, corpus, stopped_at_8.parent, GO_ON)


def test_resuming_something_else_shows_the_difference(quick, corpus, stopped_at_8, undisturbed):
    other = quick.replace(**{"training.seed": 7, "training.learning_rate": 1e-3})
    with pytest.raises(ValueError, match=r"training.learning_rate: 0.002 -> 0.001; training.seed: 42 -> 7"):
        train(other, corpus, stopped_at_8.parent, GO_ON)
    assert len(list(stopped_at_8.parent.iterdir())) == 1, "nothing was written"
    assert train(other, corpus, stopped_at_8.parent, Resume(allowed=True, or_start=True))["starts"] == 1


def test_another_machine_must_be_accepted(quick, corpus, stopped_at_8, undisturbed):
    other = quick.replace(**{"execution.micro_batch": 4})
    with pytest.raises(ValueError, match=r"micro_batch: 2 -> 4.*--new-machine"):
        train(other, corpus, stopped_at_8.parent, GO_ON)
    result = train(other, corpus, stopped_at_8.parent, Resume(allowed=True, new_machine=True))
    assert result["sample_order"] == json.loads((undisturbed / "result.json").read_text())["sample_order"]
    losses = [[line["loss"] for line in lines(each)] for each in (stopped_at_8, undisturbed)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_data_that_does_not_fit_is_refused(quick, corpus, tmp_path):
    with pytest.raises(ValueError, match=r"rows have 128 tokens, training.length is 256"):
        train(quick.replace(**{"training.length": 256}), corpus, tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer \(bytes\) has 256 tokens, the model 32,000"):
        train(quick.replace(**{"model.config.vocab_size": 32000}), corpus, tmp_path)
    with pytest.raises(FileNotFoundError, match="has no prepared rows"):
        train(quick, tmp_path, tmp_path)
    with pytest.raises(ValueError, match="4 samples cannot be split into 1 processes x micro-batches of 3"):
        train(quick.replace(**{"execution.micro_batch": 3}), corpus, tmp_path / "runs")


@pytest.fixture(scope="module")
def alphabets(corpus, tmp_path_factory):
    """The same text, prepared with two tokenizers of 256 tokens: bytes numbered upwards, and downwards."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder, prepared = tmp_path_factory.mktemp("alphabets"), []
    for name, backwards in (("up", False), ("down", True)):
        letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=backwards)
        made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder / name)
        rows, texts = folder / f"{name}-rows", sorted(map(str, corpus.parent.glob("*.txt")))
        prepare(texts, rows, tokenizer=folder / name, length=128, shares=(0.8, 0.1, 0.1))
        prepared.append(rows)
    return prepared


def test_another_tokenizer_of_the_same_size_is_told_apart(quick, alphabets, tmp_path, disturb):
    up, down = alphabets

    def crash(model, out):
        raise KeyError

    disturb([9], crash)
    with pytest.raises(KeyError):
        train(quick, up, tmp_path / "runs")
    with pytest.raises(ValueError, match=r"tokenizer: [0-9a-f]{64} -> [0-9a-f]{64}"):
        train(quick, down, tmp_path / "runs", GO_ON)

    meant = quick.replace(tokenizer=samples(up).manifest["tokenizer"]["sha256"][:16])
    with pytest.raises(ValueError, match=rf"tokenizer \(down\) is [0-9a-f]+, the recipe is for {meant.tokenizer}"):
        train(meant, down, tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()
    assert train(meant, up, tmp_path / "runs", GO_ON)["steps"] == 12, "to name it does not make another run of it"

    shutil.copytree(up, tmp_path / "mixed")
    shutil.copytree(down / "tokenizer", tmp_path / "mixed" / "tokenizer", dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"mixed/tokenizer is tokenizer .* the rows were made with"):
        train(quick, tmp_path / "mixed", tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()


def test_every_memory_sees_the_same_samples(corpus, tmp_path):
    hashes = set()
    for name in ("none", "elastic"):
        recipe = load_recipe(RECIPES / "smoke" / f"{name}.yaml", QUICK)
        result = train(recipe, corpus, tmp_path)
        hashes.add(result["sample_order"])
    assert len(hashes) == 1


def test_the_data_share_is_the_time_that_steps_wait_for_rows(quick, corpus, tmp_path, monkeypatch):
    result = train(quick, corpus, tmp_path / "quick")
    assert result["data_share"] < 0.3

    read = Samples.__getitem__

    def slowly(rows, index):
        time.sleep(0.2)
        return read(rows, index)

    monkeypatch.setattr(Samples, "__getitem__", slowly)
    result = train(quick.replace(**{"training.tokens": 2048}), corpus, tmp_path / "slow")
    assert result["data_share"] > 0.5, "four rows a step take longer than all the rest of it"


def test_a_finished_run_is_left_alone(quick, corpus, undisturbed, capsys):
    before = (undisturbed / "result.json").stat().st_mtime_ns
    assert train(quick, corpus, undisturbed.parent)["steps"] == 12
    assert "is finished" in capsys.readouterr().err
    assert (undisturbed / "result.json").stat().st_mtime_ns == before


@pytest.mark.faults
def test_a_long_run_does_not_grow(quick, corpus, tmp_path, monkeypatch):
    """Files, threads and memory after eighty steps are those after forty: what holds for hours."""
    seen, save = {}, checkpoints.prune

    def count(folder, keep, saved):
        save(folder, keep, saved)
        gc.collect()
        seen[saved] = (len(os.listdir("/proc/self/fd")), threading.active_count(), tracemalloc.get_traced_memory()[0])

    monkeypatch.setattr(checkpoints, "prune", count)
    tracemalloc.start()
    train(quick.replace(**{"training.tokens": 512 * 80}), corpus, tmp_path)
    tracemalloc.stop()
    assert seen[80][:2] == seen[40][:2]
    assert seen[80][2] - seen[40][2] < 40 * 1024, "a batch of four rows has 4 KiB"
    assert len(list((only_run(tmp_path) / "checkpoints").glob("step-*"))) == 2
