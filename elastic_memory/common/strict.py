"""Strict YAML and JSON for files from outside; every error names the file and the key."""

import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1 << 16  # a recipe is a page; the limit keeps hostile files cheap
MAX_DEPTH = 12
MAX_DIGITS = 100


def read_yaml(text: str, source: str) -> Any:
    """Mappings, lists and scalars; aliases, deep nesting, repeated keys and non-finite numbers are refused."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"{source}: {len(text):,} characters, a recipe has at most {MAX_BYTES:,}")
    try:
        _check_events(text, source)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return {} if node is None else _construct(node, source, "")
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        raise ValueError(f"{source}{line}: not YAML ({getattr(error, 'problem', error)})") from None


def _check_events(text: str, source: str) -> None:
    depth = 0
    for bracket in re.findall(r"[][{}]", text):  # checked first: the parser is quadratic in their number
        depth += 1 if bracket in "[{" else -1
        if depth > 2 * MAX_DEPTH:
            raise ValueError(f"{source}: brackets nested deeper than {MAX_DEPTH}")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"{source} line {_line(event)}: alias *{event.anchor}: aliases are not allowed")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"{source} line {_line(event)}: nested deeper than {MAX_DEPTH}")


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


def _construct(node: yaml.Node, source: str, path: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            here = f"{path}.{key}" if path else str(key)
            if key is None or key in result:
                raise ValueError(f"{source}: {here}: " + ("a key must be a word" if key is None else "given twice"))
            result[key] = _construct(value_node, source, here)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, source, f"{path}[{i}]") for i, item in enumerate(node.value)]
    return _scalar(node, source, path)


def _scalar(node: yaml.Node, source: str, path: str) -> Any:
    number = node.tag.endswith((":int", ":float"))
    if number and len(node.value) > MAX_DIGITS:
        raise ValueError(f"{source}: {path}: a number of {len(node.value):,} digits")
    if not node.tag.endswith((":int", ":float", ":bool", ":null", ":str")):
        raise ValueError(f"{source}: {path}: {node.tag.split(':')[-1]} {node.value!r}, expected a number or a word")
    try:
        value = yaml.SafeLoader("").construct_object(node)
        unquoted = isinstance(value, str) and getattr(node, "style", None) is None
        if unquoted and value[:1] in "+-.0123456789" and "e" in value.lower():
            value = float(value)  # YAML 1.1 reads 2e-3 and 40e9 as words
    except ValueError:
        value = node.value
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{source}: {path}: {node.value} is not a finite number")
    return value


def read_json(path: Path, max_bytes: int = 1 << 26) -> Any:
    """The content of a JSON file; NaN, deep nesting and files larger than `max_bytes` are refused."""
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{path}: {size:,} bytes, at most {max_bytes:,} are allowed")
    return parse_json(path.read_text(encoding="utf-8", errors="replace"), str(path))


def parse_json(text: str, source: str) -> Any:
    """`json.loads` that refuses NaN, infinities and numbers of more than 100 digits, and names its source."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            refuse(number)
        return float(number)

    def short(number: str) -> int:
        if len(number) > MAX_DIGITS:
            raise ValueError(f"a number of {len(number):,} digits")
        return int(number)

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite, parse_int=short)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: not valid JSON ({str(error)[:200]})") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As `object_pairs_hook` of `json.loads`: refuse an object that has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("duplicate keys")
    return found
