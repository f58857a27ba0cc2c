"""Files of strangers: what they may hold, and that nothing else gets in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from cards import plan
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.errors import ConfigError
from dpllm.privacy.plan import Plan
from dpllm.statement import section
from dpllm.verification import check_promise
from dpllm.verification.values import Wrong, close, differences, plain, read_bytes, read_object

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
def test_what_json_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, value: dict[str, object]) -> None:
    path = tmp_path_factory.getbasetemp() / "value.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    assert read_object(path) == value
    assert not list(differences(value, json.loads(json.dumps(value)), tolerance=0.0))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "1", "{", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": 1, "a": 1}', '{"a": {"b": 1, "b": 2}}',
     '{"a": ' * 5000 + "1" + "}" * 5000, '{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 70 + "]" * 70 + "}"],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_json_with_tricks_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "privacy.json").write_text(text, encoding="utf-8")
    with pytest.raises(Wrong) as error:
        read_object(tmp_path / "privacy.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "matter",
    ["a: &x [1, 2]\nb: *x", "a: 1\na: 2", "a: {b: 1, b: 2}", "<<: {a: 1}", "- 1", "a: [", "a: !!python/name:os.system ''",
     "a: " + "[" * 500 + "]" * 500, "a: 2020-99-99", "", "a: 1" + ":1" * 10_000,
     "a: !!map [1]", "a: !!bool x", "a: !!timestamp x", 'a: "\\ud800"'],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_yaml_with_tricks_is_refused(matter: str) -> None:
    with pytest.raises(ConfigError, match="front matter"):
        section.front_matter(f"---\n{matter}\n---\ntext\n")


def test_a_front_matter_is_read_as_yaml_writes_it() -> None:
    value = {"a": 1e-5, "b": {"c": [1, 2.5, None, True, "1", "2026-11-21"]}, "d": "x: y"}
    assert section.front_matter(f"---\n{yaml.safe_dump(value)}---\n\n# Title\n\n---\n") == value
    for text in ("", "# Title\n", "---\na: 1\n", "---\n---\n", "---\na: 1\n---\nx\r```\n"):
        with pytest.raises(ConfigError, match="front matter"):
            section.front_matter(text)


def test_no_link_no_pipe_and_no_giant_is_read(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing", "."):
        with pytest.raises(Wrong):
            read_bytes(tmp_path / name)
    with pytest.raises(Wrong, match="more than"):
        read_bytes(tmp_path / "real", 0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(1, 1.0, False), (1, True, False), (1.0, 1.0 + 1e-10, True), (1.0, 1.0 + 1e-8, False), ("1", 1, False), (None, 0, False),
     ([1], [1, 2], False), ({"a": 1}, {"a": 1, "b": None}, False), ({}, [], False), (False, 0, False)],
)  # fmt: skip
def test_equal_means_equal_up_to_rounding(one: object, other: object, same: bool) -> None:
    assert (not list(differences(one, other))) is same


def test_counts_have_no_rounding() -> None:
    assert list(differences({"runs": 1000}, {"runs": 1001}, tolerance=0.01))
    assert not list(differences({"epsilon": 1000.0}, {"epsilon": 1001.0}, tolerance=0.01))


def test_rounding_has_a_limit() -> None:
    assert close(8.0, 8.0 * (1 + 1e-10))
    assert not close(8.0, 8.0 * (1 + 1e-8))
    assert not close(1e-13, 2e-13, 0.0)
    assert not close(float("nan"), float("nan"))


def test_what_is_shown_holds_no_escape_sequence() -> None:
    assert plain("a\x1b[2J\nb\u202ec" + "d" * 1000).isprintable()
    assert len(plain("d" * 1000)) == 400


# Figures in which processors differ are compared as coarsely as they differ, and no coarser.

TERMS = Plan.pick(plan())
FRESH = {"auc": 0.56, "gdp_mu": 0.29433, "tpr_at_fpr_0.01": 0.019}


@pytest.mark.parametrize(
    ("key", "times", "wrong"),
    [
        *(("gdp_mu", factor, False) for factor in (1.0, 1 + 5e-4, 1 - 5e-4)),
        *(("gdp_mu", factor, True) for factor in (1.002, 0.998, 2.0)),
        *(("auc", factor, True) for factor in (1 + 5e-4, 1 - 1e-4)),
        ("tpr_at_fpr_0.01", 1 + 1e-6, False),
    ],
)
def test_gdp_mu_alone_is_compared_to_three_digits(key: str, times: float, wrong: bool) -> None:
    differing = check_promise.differing({**FRESH, key: FRESH[key] * times}, FRESH, TERMS, "limits")
    assert [item.field for item in differing] == [f"limits.{key}"] * wrong


@pytest.mark.parametrize(
    "stated", [{"auc": 0.56, "tpr_at_fpr_0.01": 0.019}, {**FRESH, "gdp_mu": None}, {**FRESH, "more": 1.0}]
)
def test_limits_that_are_missing_or_too_many_are_wrong(stated: dict[str, float]) -> None:
    assert check_promise.differing(stated, FRESH, TERMS, "limits")
