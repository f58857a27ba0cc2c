"""The fields of a privacy block: its JSON Schema, whether a block keeps to it, and what each field means.

Comes in: a block, or nothing. Goes out: sentences about what is wrong, rows for the documentation. Must not know how a block
is made or worded.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError

Json = dict[str, Any]

SCHEMA = Path(__file__).parent / "schema" / "privacy.schema.json"
MOST_PROBLEMS = 20


@cache
def schema() -> Json:
    """The JSON Schema (draft 2020-12) of a privacy block, as it is shipped."""
    return dict(json.loads(SCHEMA.read_text(encoding="utf-8")))


@cache
def validator() -> Any:
    """Of the schema, with 1.0 no integer: the text of a statement follows from its values, and 1.0 is not written as 1."""
    from jsonschema import Draft202012Validator, validators

    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return validators.extend(Draft202012Validator, type_checker=types)(schema())  # type: ignore[no-untyped-call]


def problems(block: object) -> list[str]:
    """What in a block the schema does not allow, one line each; empty for a valid block.

    Args:
        block: Any JSON value. Its depth is not checked here.
    """
    found = []
    for error in validator().iter_errors(block):
        place = ".".join(str(part) for part in error.absolute_path) or "the block"
        message = " ".join(error.message.split())
        found.append(f"{place}: {message if len(message) <= 200 else message[:197] + '...'}")
        if len(found) == MOST_PROBLEMS:
            break
    return sorted(found)


def check(block: object) -> None:
    """Makes sure that a block keeps to the schema.

    Raises:
        ConfigError: It does not; the first few problems are named.
    """
    if found := problems(block):
        shown = "; ".join(found[:3])
        raise ConfigError(
            f"the privacy statement does not keep to its schema ({shown}), so no reader could rely on its fields. The run "
            "directory is damaged, or of another version of dpllm: train again."
        )


def rows() -> list[tuple[str, str, str]]:
    """Every field as (dotted name, type, meaning), in the order of the schema; <name> stands for the names of a map."""
    return _rows(schema(), "")


def _rows(node: Json, prefix: str) -> list[tuple[str, str, str]]:
    found = []
    for name, field in node.get("properties", {}).items():
        whole, place = _resolved(field), f"{prefix}{name}"
        kind = whole.get("type", "")
        found.append((place, " or ".join(kind) if isinstance(kind, list) else kind, whole["description"]))
        if name == "attempted":  # the terms once more
            continue
        found += _rows(whole, f"{place}.")
        for entry in whole.get("patternProperties", {}).values():
            found += _rows(_resolved(entry), f"{place}.<name>.")
    return found


def _resolved(field: Json) -> Json:
    """A field with what it refers to; its own description comes first."""
    if "$ref" not in field:
        return field
    target: Json = schema()["$defs"][field["$ref"].rsplit("/", 1)[1]]
    return {**target, **{key: value for key, value in field.items() if key != "$ref"}}
