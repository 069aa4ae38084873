"""Run transformers' tests and those of other clients, and write docs/clients.md: `make test-transformers`."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from elastic_memory.report.catalogue import insert
from tests.mixins.inherent import INHERENT

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
MODEL = "tests/model"
# Client: its package, what was tried, and the tests that try it.
CLIENTS: dict[str, tuple[str, str, list[str]]] = {
    "Trainer": ("transformers", "loss, label smoothing, prediction over long samples", [
        f"{MODEL}/test_clients.py::test_predictions_of_long_samples",
        f"{MODEL}/test_as_in_transformers.py::test_label_smoothing_of_the_trainer_predicts_the_next_token",
    ]),
    "accelerate": ("accelerate", "two processes, DDP and FSDP2: the step that one makes", [
        f"{MODEL}/test_processes.py::test_two_processes_make_the_step_of_one",
    ]),
    "device_map": ("accelerate", "offload to CPU and disk: forward, loss, generate; several devices are refused", [
        f"{MODEL}/test_devices.py::test_offloaded_models_are_the_models",
        f"{MODEL}/test_devices.py::test_memory_for_an_offloaded_model",
        f"{MODEL}/test_devices.py::test_models_spread_over_devices_are_refused",
    ]),
    "peft": ("peft", "adapters without targets, inside an attached model, on all linear layers of Melodi", [
        f"{MODEL}/test_adapters.py::test_without_targets_adapters_go_where_they_go_in_llama",
        f"{MODEL}/test_attach.py::test_adapters_and_memory",
        "tests/memory/test_melodi.py::test_adapters_of_all_linear_layers_leave_the_mixer_alone",
    ]),
    "peft, QLoRA": ("peft", "LoRA on weights in 4 bits: training, adapter saved and loaded", [
        f"{MODEL}/test_adapters.py::test_lora_on_4_bits",
    ]),
    "TRL, SFT": ("trl", "losses of documents alone, packed or not; training", [f"{MODEL}/test_trl.py::test_sft"]),
    "TRL, DPO": ("trl", "training against the model itself as reference", [f"{MODEL}/test_trl.py::test_dpo"]),
    "TRL, GRPO": ("trl", "generation, reward, training", [f"{MODEL}/test_trl.py::test_grpo"]),
    "lm-eval": ("lm_eval", "perplexity, choices, generation: from a program and by its command line", [
        f"{MODEL}/test_lm_eval.py::test_in_a_program",
        f"{MODEL}/test_lm_eval.py::test_by_its_command_line",
    ]),
    "bitsandbytes": ("bitsandbytes", "8 and 4 bit: saved and loaded; memory attached to a quantised model", [
        f"{MODEL}/test_attach.py::test_bitsandbytes",
        f"{MODEL}/test_configuration.py::test_quantised_models_are_saved_and_loaded",
    ]),
    "torchao": ("torchao", "8 bit weights: forward, loss, streams, generate, saved and loaded", [
        f"{MODEL}/test_clients.py::test_torchao",
    ]),
    "torch.compile": ("torch", "whole model, training and forward, without graph breaks; dynamic shapes; streams", [
        f"{MODEL}/test_training.py::test_compiled_is_eager_without_graph_breaks",
        f"{MODEL}/test_training.py::test_compiled_for_dynamic_shapes",
        f"{MODEL}/test_training.py::test_a_compiled_model_streams",
    ]),
    "torch.export": ("torch", "forward", [
        f"{MODEL}/test_as_in_transformers.py::test_exported_models_return_tensors_only",
    ]),
    "torch.func": ("torch", "gradients of each row by vmap", [
        f"{MODEL}/test_clients.py::test_gradients_of_each_row_at_once",
    ]),
}  # fmt: skip
WORST = ["passed", "skipped", "inherent", "failed"]


class Record:
    """A plugin that remembers how each test ended."""

    def __init__(self) -> None:
        self.ends: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of set-up, call, parts and end; parts that do not concern a class are no skipped test."""
        end = report.outcome
        if end == "skipped" and type(report) is not pytest.TestReport:
            return
        if end == "skipped" and "inherent: " in str(report.longrepr):
            end = "inherent"
        self.ends[report.nodeid] = max(end, self.ends.get(report.nodeid, "passed"), key=WORST.index)

    def of_models(self) -> dict[str, dict[str, str]]:
        """How the tests of each model ended. What Llama passes and a memory skips, unnamed, has failed."""
        models: dict[str, dict[str, str]] = {}
        for node, end in self.ends.items():
            if node.startswith("tests/mixins") and node.count("::") == 2:
                _, case, test = node.split("::")
                models.setdefault(case.removeprefix("Test").lower(), {})[test] = end
        for ends in models.values():
            unnamed = {test for test, end in ends.items() if end == "skipped" and models["llama"][test] == "passed"}
            ends |= dict.fromkeys(unnamed, "failed")
        return models


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def mixins(models: dict[str, dict[str, str]]) -> str:
    """What passed, per model; what is inherent, and why; what failed, by name."""
    rows = []
    for model, ends in models.items():
        name = "Llama itself" if model == "llama" else f"`{model}`"
        rows.append([name, *(str([*ends.values()].count(end)) for end in ("passed", "inherent", "failed", "skipped"))])
    text = table(["model", "passed", "inherent", "failed", "not for such models or this machine"], rows)
    text += "\n" + table(["inherent", "why"], [[f"`{test}`", why] for test, why in INHERENT.items()])
    tests = sorted({test for ends in models.values() for test, end in ends.items() if end == "failed"})
    failed = [[f"`{test}`", ", ".join(name for name in models if models[name][test] == "failed")] for test in tests]
    return text + ("\n" + table(["failed", "models"], failed) if failed else "")


def clients(ends: dict[str, str]) -> str:
    """What was tried with each client, and how it ended."""
    rows = []
    for client, (name, what, tests) in CLIENTS.items():
        found = [end for node, end in ends.items() if node.split("[")[0] in tests]
        try:
            release = version(name)
        except PackageNotFoundError:
            release = "not installed"
        end = ", ".join(f"{found.count(kind)} {kind}" for kind in WORST if kind in found)
        rows.append([client, f"{name} {release}", what, end])
    return table(["client", "version", "tried", "tests"], rows)


def main() -> int:
    """Exit with 1 if anything failed, with pytest's own code if it could not run."""
    record = Record()
    tests = ["tests/mixins", *(test for *_, tests in CLIENTS.values() for test in tests)]
    done = pytest.main([*tests, "--tb=short", "--disable-warnings", *sys.argv[1:]], plugins=[record])
    if done not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(done)
    models = record.of_models()
    page = insert(PAGE.read_text(encoding="utf-8"), mixins(models), "mixins")
    PAGE.write_text(insert(page, clients(record.ends), "clients"), encoding="utf-8")
    return int("failed" in {end for ends in [record.ends, *models.values()] for end in ends.values()})


if __name__ == "__main__":
    sys.exit(main())
