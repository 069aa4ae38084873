"""Break each line that guards something, one at a time, and expect a red test: `make mutants`, or with words to choose.

A mutant that survives is a guard that no test guards. `tests/test_mutants.py` keeps the list in step with the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    file: str
    tests: str
    old: str
    new: str
    only: str  # pytest's -k


# File and its tests: what stands there once, what instead, and which of the tests must fail.
GUARDS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("elastic_memory/common/checksums.py", "tests/training/test_checkpoints.py"): [
        ("watched_sha256(folder / name) != digest", "False", ""),
        ("if not sealed:", "if False:", ""),
        ("manifest.get(key) != wanted", "False", "another_run"),
    ],
    ("elastic_memory/training/checkpoints.py", "tests/training/test_checkpoints.py"): [
        ("if step <= saved]", "]", "just_saved"),
        ("folder_of(checkpoints, step).rename(doomed)", "doomed = folder_of(checkpoints, step)", "killed"),
    ],
    ("elastic_memory/common/files.py", "tests/training/test_checkpoints.py"): [
        ("os.replace(staged, final)", "__import__('shutil').copytree(staged, final)", "killed"),
        ('f"{path.name}.tmp"', "path.name", "killed"),
    ],
    ("elastic_memory/common/files.py", "tests/streaming/test_files.py"): [
        ("        temporary.unlink(missing_ok=True)", "        pass", "failed_save"),
    ],
    ("elastic_memory/common/files.py", "tests/streaming/test_faults.py"): [
        ("os.fsync(file.fileno())", "pass", "on_disk"),
        ("{path.name}.{secrets.token_hex(8)}.partial", "{path.name}.partial", "two_writers"),
    ],
    ("elastic_memory/common/files.py", "tests/test_bad_inputs.py"): [
        ("not path.is_file():", "False:", "pipe or rows"),
    ],
    ("elastic_memory/training/logs.py", "tests/training/test_resume.py"): [
        ("if not _is_whole(text):", "if False:", "flipped_bit"),
        ("(rest, rest[:-1])", "(rest,)", "damaged_end"),
        ("if rest:", "if False:", "cut_off"),
    ],
    ("elastic_memory/training/runs.py", "tests/training/test_resume.py"): [
        ('line["step"] != number', "False", "missing_from"),
        ("None if cuda else torch.backends.cpu.get_cpu_capability()", "None", "instruction"),
    ],
    ("elastic_memory/training/session.py", "tests/training/test_resume.py"): [
        ("self.rows.verify_rows()", "pass", "equal_size"),
        ("run.check(found.step)", "pass", "damaged_line"),
        (
            "found = checkpoints.newest(run.checkpoints, run.digest,",
            "found = checkpoints.newest(run.checkpoints, None,",
            "another_seed",
        ),
        ("if changed and not", "if False and not", "instruction"),
        ("self._refuse_to_start()", "pass", "nothing_was_begun"),
    ],
    ("elastic_memory/training/trainer.py", "tests/training/test_resume.py"): [
        ("if not self._finite():", "if False:", "never_saved"),
    ],
    ("elastic_memory/training/corpus.py", "tests/training/test_resume.py"): [
        ("rows.fingerprint + tokenizer_sha256(rows)", "rows.fingerprint", "name_the_data"),
        ("rows.fingerprint + tokenizer_sha256(rows)", "tokenizer_sha256(rows)", "name_the_data"),
    ],
    ("elastic_memory/training/interrupts.py", "tests/training/test_interrupts.py"): [
        ("> PAUSE", "> 1e9", ""),
        ("> PAUSE", "> -1", ""),
    ],
    ("elastic_memory/training/spikes.py", "tests/training/test_spikes.py"): [
        ("if not math.isfinite(loss):", "if False:", ""),
        ("if not math.isfinite(gradient_norm):", "if False:", ""),
        ("if loss > bound:", "if False:", ""),
    ],
    ("elastic_memory/training/trainer.py", "tests/training/test_session.py"): [
        (
            "if self.skipped:\n            model.zero_grad(set_to_none=True)",
            "if False:\n            pass",
            "never_applied",
        ),
    ],
    ("elastic_memory/training/session.py", "tests/training/test_limits.py"): [
        ("self.fresh and", "False and", "micro_batch"),
    ],
    ("elastic_memory/evaluation/model_files.py", "tests/training/test_model_files.py"): [
        ("if not (folder / MANIFEST).exists():", "if True:", "flipped"),
        ("if added:", "if False:", "adapter"),
        ("if name in found:", "if False:", "two_files and bare"),
        ("not kind.startswith", "False and not kind.startswith", "bare-integers"),
        ("        if names:", "        if False:", "bare and drop"),
        ("max(ends, default=0) != size", "0 == size", "truncated and bare"),
    ],
    ("elastic_memory/training/recipe.py", "tests/test_outside_code.py"): [
        ("if not re.fullmatch(", "if False and (", "outside_its_folder"),
    ],
    ("elastic_memory/training/recipe.py", "tests/training/test_recipe.py"): [
        ("in (*above, path.name)", "== path.name", "bases_of_each_other"),
    ],
    ("elastic_memory/training/build.py", "tests/test_outside_code.py"): [
        ('key.startswith("_") or', "", "machinery"),
        ('or key.endswith("_implementation")', "", "machinery"),
    ],
    ("elastic_memory/evaluation/loading.py", "tests/test_outside_code.py"): [
        ("if wanted not in BUILT_IN:", "if False:", "kernel"),
    ],
    ("elastic_memory/data/tokenizers.py", "tests/test_outside_code.py"): [
        (", trust_remote_code=False, **gguf)", ", **gguf)", "of_a_tokenizer"),
    ],
    ("tests/test_sources.py", "tests/test_sources.py"): [
        ('"__import__",', "", "looks_for"),
        ("_is_shell(one)", "False", "looks_for"),
        ("known |= full", "pass", "looks_for"),
        ("known |= {alias.asname: alias.name for alias in node.names if alias.asname}", "pass", "looks_for"),
        ("found += [name for name in full.values() if _in(name, MODULES | NAMES)]", "pass", "looks_for"),
        ("elif isinstance(node, ast.Dict):", "elif False:", "looks_for"),
        ('("getattr", "operator.attrgetter", "attrgetter")', "()", "looks_for"),
        ('options.get("weights_only") == "True"', 'options.get("weights_only")', "where_it_is_said"),
    ],
    # Dangers where nobody looks: a name that is imported, an option in a table.
    ("elastic_memory/common/names.py", "tests/test_sources.py"): [
        ("from difflib import", "from torch import load  # noqa\nfrom difflib import", "becomes_code"),
    ],
    ("elastic_memory/fast/kernels/sweeps.py", "tests/test_sources.py"): [
        ("import torch\n", "import torch\n\nREAD = {'trust_remote_code': True}\n", "becomes_code"),
    ],
    ("tests/oracles/parts.py", "tests/test_sources.py"): [
        ("import torch\n", "import torch\n\nREAD = torch.load\n", "nor_in_tests"),
    ],
    ("elastic_memory/common/strict.py", "tests/training/test_model_files.py"): [
        ("if len(found) < len(pairs):", "if False:", "twice and bare"),
    ],
    ("elastic_memory/common/strict.py", "tests/streaming/test_headers.py"): [
        ("if len(found) < len(pairs):", "if False:", "twice"),
    ],
    ("elastic_memory/streaming/memory_file.py", "tests/streaming/test_headers.py"): [
        ("length > min(LARGEST_HEADER, size - 8)", "length > size - 8", "largest"),
        ("if end != size - 8 - length:", "if False:", "as_long"),
    ],
    ("elastic_memory/streaming/memory_file.py", "tests/streaming/test_files.py"): [
        ("if described != expected:", "if False:", "impossible or foreign"),
        ('if content_hash(header, tensors) != header.get("content"):', "if False:", "impossible"),
        ("bool(torch.isfinite(tensor).all())", "True", "not_finite"),
    ],
    ("elastic_memory/streaming/reader.py", "tests/streaming/test_streaming.py"): [
        (
            "copy.streams = [stream.fork() for stream in self.streams]",
            "copy.streams, self.streams = self.streams, [stream.fork() for stream in self.streams[:0]]",
            "forks",
        ),
        ("copy.streams = [stream.fork() for stream in self.streams]", "copy.streams = self.streams", "forks"),
        ("copy.streams = [stream.fork() for stream in self.streams]", "pass", "forks"),
    ],
    ("elastic_memory/streaming/reader.py", "tests/streaming/test_forks.py"): [
        ("copy.tokens = None if self.tokens is None else self.tokens.clone()", "pass", "open_block"),
        ("copy.before = None if self.before is None else self.before.fork()", "copy.before = None", "takes_back"),
    ],
    ("elastic_memory/streaming/reader.py", "tests/streaming/test_faults.py"): [
        ("self.__dict__.update(self.undo, decoding=False)", "pass", "fails_changes_nothing"),
        ('if self.undo is not None and (anew or "streams" not in self.undo):', "if False:", "fails_changes_nothing"),
    ],
    ("elastic_memory/operators.py", "tests/test_growth.py"): [
        (
            "held.pop((first - count, count, *others), None)\n            if len(held) > 1:",
            "if False:",
            "streaming",
        ),
    ],
    ("elastic_memory/model/saved_defaults.py", "tests/model/test_saved_defaults.py"): [
        ('if record.get("memory") != now["memory"]:', "if False:", ""),
        ("if name not in settings.options() and", "if", "given_when_loading"),
        ("if not isinstance(record, dict) or not", "if record is None or not", "damaged"),
        ('or "layers" not in record:', "or False:", "damaged"),
    ],
    ("elastic_memory/data/sources.py", "tests/data/test_damaged_sources.py"): [
        (
            'except UnicodeDecodeError:\n            return Document(place, _refuse("invalid UTF-8"))\n        return',
            "except ZeroDivisionError:\n            raise\n        return",
            "utf8",
        ),
        ("except (pyarrow.ArrowException, OSError) as error:", "except ZeroDivisionError as error:", "pages"),
    ],
    ("elastic_memory/data/parts.py", "tests/data/test_damaged_sources.py"): [
        ("MOST_EXPANSION = 1000", "MOST_EXPANSION = 10**9", "unpacks"),
    ],
    ("elastic_memory/data/prepare.py", "tests/data/test_damaged_sources.py"): [
        ("< touched:", "< 0:", "between_two_runs"),
        ("if recorded.get(name) != known:", "if False:", "taken_for"),
    ],
    ("elastic_memory/data/gather.py", "tests/data/test_prepare.py"): [
        ('if sha256(path) != record["sha256"]:', "if False:", "damaged_part"),
    ],
    ("elastic_memory/cli.py", "tests/test_bad_inputs.py"): [
        ("EXPECTED = (ValueError, OSError,", "EXPECTED = (ValueError,", "errors_of_files"),
        ("and not kinds & EXPECTED_BY_NAME", "", "errors_of_files"),
    ],
    ("elastic_command.py", "tests/test_cli.py"): [
        ("signal.signal(signal.SIGINT, _end)", "pass", "ctrl_c"),
    ],
    ("elastic_memory/data/samples.py", "tests/evaluation/test_evaluate_command.py"): [
        ("own.sha256 != made", "None == made", "another_vocabulary"),
        ("+ SPARE_TOKENS:", "+ 10**9:", "another_vocabulary"),
    ],
    ("elastic_memory/report/tables.py", "tests/evaluation/test_evaluate_command.py"): [
        ("column.min_width = least", "column.min_width = 0", "80_columns"),
        ("2 * len(longest) < width", "2 * len(longest) < width + 99", "80_columns"),
    ],
    ("elastic_memory/model/layer.py", "tests/model/test_sliding.py"): [
        ("rope(x, positions - self.locality.lag)", "rope(x, positions)", "equations"),
    ],
    ("elastic_memory/model/decoder_layer.py", "tests/model/test_sliding.py"): [
        ("locality.window + memory.widens", "locality.window", "wider_window"),
    ],
    ("elastic_memory/model/all_blocks.py", "tests/model/test_sliding.py"): [
        ("max(key.shape[2] - lag, 1)", "key.shape[2]", "equations"),
    ],
    ("elastic_memory/streaming/layer_cache.py", "tests/model/test_sliding.py"): [
        ("max(tokens - self.lag, 0)", "tokens", "as_if_alone"),
    ],
    ("elastic_memory/attention.py", "tests/model/test_sliding.py"): [
        ("(local >= -seen[:, :, None])", "(local >= -(2**31))", "as_if_alone"),
    ],
    ("elastic_memory/fast/windows.py", "tests/fast/test_windows.py"): [
        ("torch.logaddexp(sums[:, :, early:], other_sums)", "sums[:, :, early:]", "whole"),
    ],
    ("elastic_memory/attention.py", "tests/memory/test_silent.py"): [
        ("mixed.to(wide), blend.to(wide)", "mixed.to(wide), blend.to(wide).abs()", "written_out"),
        ("query.new_full((1,), 1 / scale)", "query.new_ones(1)", "written_out"),
    ],
    ("elastic_memory/model/decoder_layer.py", "tests/memory/test_silent.py"): [
        ("own = None if mask is None else mask[..., columns:]", "own = None", "streams_hear"),
        ("return mixed if self.memory.blend is None else", "return mixed if True else", "heard"),
    ],
    ("elastic_memory/model/all_blocks.py", "tests/fast/test_windows.py"): [
        (
            "own_query, memory_key = attention.memory_query_key(own_query, unrotated, memory_key, reading)",
            "pass",
            "with_masks and elastic",
        ),
    ],
    ("elastic_memory/fast/summary_tokens.py", "tests/memory/test_silent.py"): [
        ("if before and memory.blend is not None:", "if False:", "melodi and heard"),
    ],
    ("elastic_memory/model/attach.py", "tests/memory/test_silent.py"): [
        ("if again and silent not in (None, had):", "if False:", "saved or restored"),
    ],
    ("elastic_memory/memory/means.py", "tests/memory/test_means.py"): [
        ("if not 0 <= sinks < order:", "if False:", "refused"),
        ("_similarity(key, slots.key[:, :, self.sinks :])", "_similarity(key, slots.key)", "oracle"),
        ("gate = gate.scatter(2, index, 0)", "pass", "oracle"),
    ],
    ("elastic_memory/memory/merged.py", "tests/memory/test_merged.py"): [
        ("if order < 1 or rounds < 1 or distance < 0:", "if False:", "refused"),
        ("-self.distance", "0", "distance"),
        ("count.log()", "0 * count", "without_loss"),
        ("distance / (1 / count + 1 / count.mT)", "distance", "oracle"),
        ("torch.where(distance < ROUNDING * lengths, 0, distance)", "distance", "rounding"),
    ],
    ("elastic_memory/memory/clock.py", "tests/memory/test_clock.py"): [
        ("if not 1 <= shortest <= longest:", "if False:", "refused"),
        ("max(start - max(self.windows) - 1, 0)", "max(start - min(self.windows) - 1, 0)", "stop_changing"),
        ("time.minimum(window).log()", "window.log()", "elastic_memory"),
        ("before.clamp(min=1).minimum(windows)", "before.clamp(min=1)", "starts_as_the_constant_one"),
        (".clamp(-FASTEST, FASTEST)", "", "stay_finite"),
        (".clamp(min=OLDEST)", "", "stay_finite"),
    ],
    ("elastic_memory/memory/linear.py", "tests/report/test_explorer.py"): [
        ("self.retrieval = (self.rule,)", "pass", "no_places"),
    ],
    ("elastic_memory/operators.py", "tests/model/test_configuration.py"): [
        ("self.sample_points(self.points)", "pass", "contradictions"),
    ],
    ("elastic_memory/memory/dyadic.py", "tests/memory/test_dyadic.py"): [
        ("if segments < 1 or unit < 1:", "if False:", "refused"),
        ("if order not in (None, self.bank.order):", "if False:", "settled"),
        ("min(digit, room)", "digit", "tile"),
    ],
    ("elastic_memory/memory/tools.py", "tests/memory/test_recent.py"): [
        ("if not 0 < raw < order:", "if False:", "idle"),
    ],
    ("elastic_memory/memory/outliers.py", "tests/memory/test_outliers.py"): [
        ("return error / error.mean(2, keepdim=True).clamp(min=1e-30)", "return error", "oracle"),
    ],
}
MUTANTS = [Mutant(*place, *change) for place, changes in GUARDS.items() for change in changes]


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not words or any(word in f"{mutant.file} {mutant.old}" for word in words)]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
        for number, mutant in enumerate(chosen, 1):
            path = copy / mutant.file
            whole = path.read_text()
            path.write_text(whole.replace(mutant.old, mutant.new))
            code = _run(copy, mutant)
            path.write_text(whole)
            caught = code == 1  # some test failed; other codes mean that pytest did not get that far
            survivors += not caught
            verdict = "caught" if caught else f"SURVIVED (exit code {code})"
            print(f"{number}/{len(chosen)} {verdict}: {mutant.file}: {' '.join(mutant.old.split())[:70]}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return 1 if survivors else 0


def _run(copy: Path, mutant: Mutant) -> int:
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not faults and not gpu",
    ]
    words += [mutant.tests, *(["-k", mutant.only] if mutant.only else [])]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(words, cwd=copy, env=environment, capture_output=True, timeout=900).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
