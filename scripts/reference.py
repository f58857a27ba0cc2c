"""Writes the tables of docs/ that are generated from code: keys of a recipe, exit codes, metrics.

    python scripts/reference.py              writes the tables
    python scripts/reference.py --fields     prints every field of privacy.json: name, type, meaning

Comes in: types with their docstrings, and the metrics of an invented run and ledger. Goes out: the same pages, with the text
between ``<!-- table: NAME -->`` and ``<!-- /table -->`` replaced. A test compares the pages with ``written``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dpllm import errors
from dpllm.recipe.config import RunConfig
from dpllm.recipe.section import Section, sections_of
from dpllm.statement import privacy_record
from dpllm.telemetry import metrics

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARKED = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
Json = dict[str, Any]


def one_line(text: str) -> str:
    """A docstring as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


# --- privacy.json ----------------------------------------------------------------------------------------------------


def privacy_fields() -> list[tuple[str, str, str]]:
    """Every field of a statement with a guarantee, and the extra fields of one without: dotted name, type, meaning."""
    parts = privacy_record.schema()["$defs"]
    without = [row for row in _fields(parts, "NotGuaranteed") if row[0] in ("reason", "attempted")]
    first = [row for row in _fields(parts, "Guaranteed") if row[0] in ("schema_version", "guarantee")]
    return [*first, *without, *(row for row in _fields(parts, "Guaranteed") if row not in first)]


def _fields(parts: Json, name: str, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """The fields of one part; <name> is a placeholder for the keys of a map."""
    for key, field in parts[name]["properties"].items():
        place, (target, kind) = f"{prefix}{key}", resolved(parts, field)
        yield place, kind, one_line({**target, **field}["description"])
        inner = [target, *(resolved(parts, one)[0] for one in target.get("patternProperties", {}).values())]
        for one in inner if place not in ("attempted", "audit.repeated", "audit.sampling") else ():  # repetitions
            if one.get("properties"):
                yield from _fields(parts, one["title"], f"{place}." if one is target else f"{place}.<name>.")


def resolved(parts: Json, field: Json) -> tuple[Json, str]:
    """The schema that a field refers to, without null, and its types in words."""
    kinds = [parts[one["$ref"].rsplit("/", 1)[1]] if "$ref" in one else one for one in field.get("anyOf", [field])]
    target = next(kind for kind in kinds if kind.get("type") != "null")
    return target, " or ".join(dict.fromkeys(kind["type"] for kind in kinds))


# --- a recipe --------------------------------------------------------------------------------------------------------


def recipe_keys(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Every key of a recipe, or of a section of it: dotted name, allowed values, default, meaning."""
    schema = section.model_json_schema()["properties"]
    for key, field in section.model_fields.items():
        inner = sections_of(field.annotation)
        if not inner or field.default is None:
            default = "required" if field.is_required() else f"`{_value(field.get_default(call_default_factory=True))}`"
            yield f"{prefix}{key}", _allowed(schema[key]), default, one_line(field.description or "")
        for one in inner:
            yield from recipe_keys(one, f"{prefix}{key}.")


def _allowed(field: Json) -> str:
    """The allowed values of a key, in words."""
    if "anyOf" in field:
        return " or ".join(_allowed(one) for one in field["anyOf"])
    if "enum" in field or "const" in field:
        return ", ".join(f"`{one}`" for one in field.get("enum", [field.get("const")]))
    kind = field.get("type", "section")
    if kind in ("array", "object"):
        many = _allowed(field.get("items") or field["additionalProperties"]).replace("number", "numbers", 1)
        return f"list of {many}" if kind == "array" else f"map to {many}"
    limits = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "to"}
    words = {"boolean": "`true`, `false`", "null": "`null`", "integer": "whole number", "string": "text"}
    return " ".join(
        [words.get(kind, kind), *(f"{word} {_value(field[name])}" for name, word in limits.items() if name in field)]
    )


def short(row: tuple[str, str, str, str]) -> tuple[str, str, str]:
    """A key with its default, the names of other values, and the first clause; `dpllm train --keys` has the rest."""
    key, values, default, meaning = row
    others = [name for name in re.findall("`[^`]+`", values) if name not in (default, "`null`", "`true`", "`false`")]
    clause = re.match(r"(?:\([^)]*\)|.)*?(?=\. [A-Z`]|\.$|; (?!or))", meaning)
    return key, "; ".join([default, *others]), f"{clause[0]}." if clause else meaning


def _value(value: Any) -> str:
    """A value as in YAML; a large number as a power of two."""
    if isinstance(value, int) and value > 2**64:
        return f"2^{value.bit_length() - 1}"
    return json.dumps(value) if value is None or value == "" or isinstance(value, bool) else str(value)


# --- exit codes and metrics ------------------------------------------------------------------------------------------


def exit_codes() -> list[tuple[str, str, str]]:
    """Exit codes of the command line: code, error, meaning."""
    error_types = [
        error_type
        for error_type in vars(errors).values()
        if isinstance(error_type, type) and "exit_code" in vars(error_type)
    ]
    rows = [
        (str(error_type.exit_code), f"`{error_type.__name__}`", one_line((error_type.__doc__ or "").split("\n\n")[0]))
        for error_type in error_types
    ]
    return [("0", "", "Done."), *sorted(rows, key=lambda row: row[0])]


def metric_families() -> list[tuple[str, str, str]]:
    """Every metric: name, labels, meaning."""
    names = {"model": "a", "dataset": "c", "run_id": "d"}
    run = metrics.ShownRun(names, "b", "running", dict.fromkeys(metrics.GAUGES, 0.5))
    entry = SimpleNamespace(state="running", reservation=SimpleNamespace(entry="d"), heartbeat=0.0)
    book: Any = SimpleNamespace(
        verify=list,
        head=lambda: {"count": 1},
        refusals=lambda: {("c", "over_budget"): 1},
        datasets=lambda: ["c"],
        budget=lambda name: SimpleNamespace(epsilon=1.0),
        used=lambda name: 0.5,
        runs=lambda name: [entry],
    )
    families = [*metrics.run_families(run), *metrics.ledger_families(book)]
    return [
        (
            f"{family.name}_total" if family.type == "counter" else family.name,
            ", ".join(family.samples[0].labels) or "no label",
            one_line(family.documentation),
        )
        for family in families
    ]


# --- pages -----------------------------------------------------------------------------------------------------------


def coded(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows with their first cell formatted as code."""
    return ((f"`{name}`", *columns) for name, *columns in rows)


TABLES: dict[str, tuple[tuple[str, ...], Callable[[], Iterable[tuple[str, ...]]]]] = {
    "recipe keys": ((), lambda: map(short, recipe_keys())),  # no columns: a list
    "exit codes": (("exit code", "error", "meaning"), exit_codes),
    "metrics": ((), metric_families),
}


def table(name: str) -> str:
    """A table as Markdown, or a list if it has no columns."""
    columns, rows = TABLES[name]
    if not columns:
        return "\n".join(f"- `{name}` ({column}): {meaning}" for name, column, meaning in rows())
    lines = [columns, ("---",) * len(columns), *rows()]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")
    )


def written(text: str) -> str:
    """A page with its tables generated anew."""
    return MARKED.sub(lambda match: f"{match[1]}\n{table(match[2])}\n\n{match[3]}", text)


def pages() -> list[Path]:
    """The pages with a generated table."""
    return [page for page in sorted(DOCS.rglob("*.md")) if MARKED.search(page.read_text(encoding="utf-8"))]


def main() -> None:
    """Prints the fields, or writes the tables."""
    if sys.argv[1:] == ["--fields"]:
        print("\n".join("  ".join(row) for row in privacy_fields()))
        return
    for page in pages():
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
