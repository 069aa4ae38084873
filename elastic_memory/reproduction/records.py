"""One small JSON file per run: the result of training and every measurement. Tables are made from these files alone.

A run is trained or measured if its record says so, whether or not its weights still exist.
"""

from pathlib import Path
from typing import Any

from elastic_memory.common.files import write_json
from elastic_memory.common.strict import read_json

CURVE = 100  # points of the loss curve in a record


class Record:
    """The record of one run, written after every change."""

    def __init__(self, path: Path, facts: dict[str, Any]):
        self.path = path
        self.content: dict[str, Any] = {**facts, "trained": None, "measured": []}
        if path.exists():
            self.content = self._read(facts)

    def _read(self, facts: dict[str, Any]) -> dict[str, Any]:
        try:
            found = read_json(self.path)
        except ValueError as error:
            raise ValueError(f"{error}: remove it, and repeat the command") from None
        held = {key: found.get(key) for key in facts} if isinstance(found, dict) else {}
        if held != facts or not {"trained", "measured"} <= found.keys():
            raise ValueError(f"{self.path} is the record of another run: move it, or choose another --out")
        trained, measured = found["trained"], found["measured"]
        entries = measured if isinstance(measured, list) else [None]
        whole = all(isinstance(entry, dict) and {"conditions", "metrics"} <= entry.keys() for entry in entries)
        if not whole or not (trained is None or (isinstance(trained, dict) and "recipe" in trained)):
            raise ValueError(f"{self.path} is damaged: remove it, and repeat the command")
        return found

    @property
    def trained(self) -> dict[str, Any] | None:
        """The result of training, once it is finished."""
        return self.content["trained"]

    def add_training(self, result: dict[str, Any], lines: list[dict[str, Any]], sharing: float) -> None:
        """Add the result of training; drops measurements of earlier weights."""
        stride = max(1, len(lines) // CURVE)
        curve = [[line["step"], round(float(line["loss"]), 4)] for line in lines[stride - 1 :: stride]]
        batch = result["recipe"]["training"]["batch_tokens"]
        seconds = round(sum(batch / line["tokens_per_second"] for line in lines), 1)
        cost = {"seconds": seconds, "processes_on_device": sharing}
        self.content["trained"] = {**result, "cost": cost, "curve": curve}
        self.content["measured"] = []
        self._write()

    def find(self, metric: str, conditions: dict[str, Any]) -> dict[str, Any] | None:
        """A measurement under these conditions, with its provenance."""
        for entry in self.content["measured"]:
            if entry["conditions"] == conditions and metric in entry["metrics"]:
                return entry
        return None

    def add(self, entry: dict[str, Any]) -> None:
        """Add a measurement."""
        self.content["measured"].append(entry)
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.content)
