"""The schema of the privacy block: closed, documented, shipped, and kept to by every block that is written."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from cards import Json, audit, config, plan, record
from jsonschema import Draft202012Validator
from test_card_states import STATES

from dpllm.errors import ConfigError
from dpllm.report import fields
from dpllm.report.card import render_card

DOCS = Path(__file__).parents[2] / "docs" / "model-card.md"
FOUND = {"verdict": "consistent", "reason": "No test failed.", "steps": 300}


@pytest.fixture(scope="module")
def block() -> Json:
    limits = {"tpr_at_fpr_0.001": 0.02, "tpr_at_fpr_0.01": 0.1, "auc": 0.7, "gdp_mu": None}
    beside = {"accountants": {"pld": 2.99, "rdp": 3.3}, "limits": limits, "curve": [[1e-4, 2.3], [1e-9, None]]}
    return render_card(config(), plan(**beside), record(), audit(), FOUND)[1]


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Json]]:
    """Every mapping of a block but the event, which is free."""
    if isinstance(value, dict) and path[-1:] != ("event",):
        yield path, value
        for key, inner in value.items():
            yield from objects(inner, (*path, key))


def at(block: Json, path: tuple[Any, ...]) -> Json:
    here = copied = copy.deepcopy(block)
    for key in path:
        here = here[key]
    here["__copied"] = copied
    return here


def test_the_schema_is_a_schema_and_ships_with_the_package() -> None:
    Draft202012Validator.check_schema(fields.schema())
    shipped = resources.files("dpllm.report").joinpath("schema/privacy.schema.json")
    assert shipped.read_text(encoding="utf-8") == fields.SCHEMA.read_text(encoding="utf-8")
    templates = resources.files("dpllm.report").joinpath("templates")
    assert {path.name for path in templates.iterdir()} >= {
        "banner.md.j2",
        "card.md.j2",
        "macros.md.j2",
        "privacy.md.j2",
    }


def test_every_field_is_described_and_every_object_closed() -> None:
    def walk(node: Any, name: str) -> None:
        for key, field in (node.get("properties") or {}).items():
            if isinstance(field, dict):
                whole = fields._resolved(field)
                assert whole.get("description", "").endswith("."), f"{name}.{key}"
                walk(whole, f"{name}.{key}")
        for inner in (node.get("patternProperties") or {}).values():
            walk(fields._resolved(inner), f"{name}.<name>")
        if "object" in node.get("type", ()) and not name.endswith("event"):
            assert node["additionalProperties"] is False, name

    walk(fields.schema(), "block")


@pytest.mark.parametrize("name", STATES)
def test_every_card_keeps_to_it(name: str) -> None:
    assert fields.problems(render_card(*STATES[name][:5])[1]) == []


MAPS = {"files", "software", "hardware", "attacks", "exposure", "extraction", "groups", "weights", "accountants"}


def test_a_field_too_many_or_too_few_is_a_problem(block: Json) -> None:
    optional = {"adaptive", "accountants", "limits", "curve", "trade_off", "merged_from"}
    for path, value in objects(block):
        extra = at(block, path)
        copied = extra.pop("__copied")
        extra["../odd key" if path[-1:] == ("attacks",) else "Unknown"] = {}
        assert fields.problems(copied), path
        for key in value:
            if (path[-1:] and path[-1] in MAPS) or (path == () and key in optional):
                continue
            fewer = at(block, path)
            copied = fewer.pop("__copied")
            del fewer[key]
            assert fields.problems(copied), (*path, key)


def test_a_value_of_another_type_is_a_problem(block: Json) -> None:
    for path, value in objects(block):
        for key in value:
            if key == "event":
                continue
            wrong = at(block, path)
            copied = wrong.pop("__copied")
            wrong[key] = {"": [{}]}
            assert fields.problems(copied), (*path, key)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"guarantee": False}, "the block"),
        ({"guarantee": "true"}, "guarantee"),
        ({"reason": "none"}, "the block"),
        ({"schema_version": 1}, "schema_version"),
        ({"epsilon": -1}, "epsilon"),
        ({"epsilon": True}, "epsilon"),
        ({"delta": 0}, "delta"),
        ({"base_model": {"name": "a", "revision": None, "covered": True}}, "base_model.covered"),
        ({"files": {"a": "not a hash"}}, "files.a"),
        ({"not_covered": []}, "not_covered"),
    ],
)
def test_what_no_card_may_say_is_a_problem(block: Json, change: Json, place: str) -> None:
    found = fields.problems({**block, **change})
    assert any(line.startswith(place) for line in found), found
    with pytest.raises(ConfigError, match="schema"):
        fields.check({**block, **change})


def test_terms_without_a_guarantee_stand_under_attempted_alone(block: Json) -> None:
    recipe, the_plan, the_record, *_ = STATES["broken assumption"]
    attempted = render_card(recipe, the_plan, the_record, None)[1]
    assert fields.problems(attempted) == []
    assert fields.problems({**attempted, "epsilon": 3.0})
    assert fields.problems({**block, "attempted": attempted["attempted"]})
    assert fields.problems({key: value for key, value in attempted.items() if key != "reason"})


def test_a_stranger_s_value_is_a_problem_and_no_traceback() -> None:
    for value in (None, 3, "text", [], {}, {"guarantee": None}, {"files": "x" * 10_000}):
        found = fields.problems(value)
        assert found
        assert all(len(line) < 300 for line in found)


def test_the_documentation_has_every_field_as_the_schema_describes_it() -> None:
    text = DOCS.read_text(encoding="utf-8")
    table = text[text.index("| field | type | meaning |") :].split("\n\n")[0].splitlines()[2:]
    assert table == [
        f"| `{name}` | {kind} | {meaning.replace('|', chr(92) + '|')} |" for name, kind, meaning in fields.rows()
    ]


def test_the_documentation_maps_items_to_fields_that_exist() -> None:
    text = DOCS.read_text(encoding="utf-8")
    known = {name for name, _, _ in fields.rows()}
    before = text[: text.index("| field | type | meaning |")]
    named = set(
        re.findall(
            r"`([a-z_]+(?:\.[a-z_<>]+)*)`", "\n".join(line for line in before.splitlines() if line.startswith("|"))
        )
    )
    fields_named = {name for name in named if name.split(".")[0] in {field.split(".")[0] for field in known}}
    assert len(fields_named) > 25
    assert fields_named <= known
