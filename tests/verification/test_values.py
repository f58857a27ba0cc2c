"""Files of strangers: what they may hold, and that nothing else gets in; nothing hides the statement of a card."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from cards import audit, baseline, baseline_record, config, make_run, plan, record
from hypothesis import given, settings
from hypothesis import strategies as st
from published import opened

import dpllm
from dpllm.card.artifact import MODEL
from dpllm.card.card import write_card
from dpllm.errors import ConfigError
from dpllm.privacy.plan import Plan
from dpllm.statement import section
from dpllm.verification import check_folder, check_promise
from dpllm.verification.values import Check, Wrong, close, differences, plain, read_bytes, read_facts, read_object

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


# --- the page --------------------------------------------------------------------------------------------------------


HIDING = ("<details>\n", "<!-- \n", "<div hidden>\n", "ε is 0.1 in truth.\n", "    \n", "> ")
BANNER, PRIVACY = "<!-- dpllm:banner -->", "<!-- dpllm:privacy -->"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    recipe = config(card={"description": "For wards. <details><summary>More</summary> <!-- and", "title": "<i>A</i>"})
    return write_card(make_run(tmp_path, recipe, plan(), record(), audit()))


def statement(page: Path) -> dict[str, Check]:
    """What verify says of the page itself, failures by name."""
    release = opened(page.parent, card=page.read_bytes().decode("utf-8"))
    checks = []
    for name, check in (("front matter", check_folder.front_matter), ("marked parts", check_folder.marked)):
        try:
            checks += check(release)
        except (Wrong, ConfigError) as error:
            checks.append(Check(name, "failed", str(error)))
    return {check.name: check for check in checks if check.status == "failed"}


@pytest.mark.parametrize("text", HIDING)
@pytest.mark.parametrize("part", [BANNER, PRIVACY])
def test_nothing_unmarked_stands_before_a_marked_part(page: Path, part: str, text: str) -> None:
    assert not statement(page)
    card = page.read_text("utf-8")
    page.write_text(card.replace(part, text + part), encoding="utf-8")
    assert "what is seen first" in statement(page)


def test_parts_in_another_order_are_seen(page: Path) -> None:
    card = page.read_text("utf-8")
    parts = section.parts(card)
    first, second = (section.marked(name, parts[name]) for name in section.PARTS)
    page.write_text(card.replace(f"{first}\n\n{second}", f"{second}\n\n{first}"), encoding="utf-8")
    assert "what is seen first" in statement(page)


def test_the_description_and_the_title_of_a_recipe_open_nothing(page: Path) -> None:
    below = page.read_text("utf-8").partition("<!-- /dpllm:privacy -->")[2]
    assert "For wards. &lt;details>&lt;summary>More&lt;/summary> &lt;!-- and" in below
    assert "# &lt;i>A&lt;/i>" in below
    assert "\n## Use\n" in below


def test_author_s_text_below_is_free(page: Path) -> None:
    card = page.read_text("utf-8").replace("\n# ", "\n# My model, ", 1) + "\n<details>\n\n*Thanks* to `all`.\n"
    for ends in ("\n", "\r\n"):
        page.write_text(card, encoding="utf-8", newline=ends)
        assert not statement(page)


def test_a_page_in_the_words_of_another_version_is_left_to_that_version(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its statement verifies as ever; its words do not, for they could say anything."""
    text = page.read_text("utf-8")
    page.write_text(text.replace("**Promise:** what", "**For one person:** what").replace("## Appendix", "## Curves"))
    monkeypatch.setattr(dpllm, "__version__", "9.0.0")
    failed = statement(page)
    assert set(failed) == {"banner in README.md", "privacy in README.md"}
    for check in failed.values():
        assert "The card names dpllm 0.1.0; this is 9.0.0" in check.detail
        assert "dpllm card RUN" not in check.detail


def test_a_front_matter_with_another_statement_is_refused(page: Path) -> None:
    page.write_text(page.read_text("utf-8").replace("ward-7-notes", "ward-8-notes"), encoding="utf-8")
    assert statement(page).keys() == {"front matter", "privacy in README.md"}


def test_the_front_matter_names_the_very_bytes_of_the_statement(page: Path) -> None:
    path = page.parent / "privacy.json"
    path.write_text(json.dumps(json.loads(path.read_text())), encoding="utf-8")
    assert "its hash differs" in statement(page)["front matter"].detail


@pytest.mark.parametrize(
    "text", ["a: b\u2028c: d", "a: b\x85", "a: b\u2029", "# note", "  # note", "--- # x", "...", "a: \u200b"]
)
def test_a_front_matter_that_two_readers_read_differently_is_refused(page: Path, text: str) -> None:
    card = page.read_text("utf-8").replace("license: ", f"{text}\nlicense: ", 1)
    page.write_text(card, encoding="utf-8")
    assert "two readers" in statement(page)["front matter"].detail


def test_a_front_matter_holds_what_dpllm_writes_and_the_name_of_a_licence(page: Path) -> None:
    card = page.read_text("utf-8")
    page.write_text(card.replace("---\n", "---\nlicense_name: ours\nlicense_link: LICENSE\n", 1), encoding="utf-8")
    assert not statement(page)
    page.write_text(card.replace("---\n", "---\nmodel-index: []\n", 1), encoding="utf-8")
    assert "(model-index)" in statement(page)["front matter"].detail


@pytest.mark.parametrize(
    "name", ["a\u2028b: 1", "ward\u200b\u202e7", "long words " * 9 + "# and a comment " * 9, "\n# a\n--- b", "é"]
)
def test_the_front_matter_that_dpllm_writes_is_read_in_one_way(tmp_path: Path, name: str) -> None:
    recipe = config(card={"license": name, "tags": [name]})
    page = write_card(make_run(tmp_path, recipe, plan(), record(), audit()))
    assert not statement(page)
    assert section.front_matter(page.read_text("utf-8"))["license"] == name


def test_the_front_matter_names_the_base_model_of_the_statement(page: Path) -> None:
    """Or none, as for a local one; the Hub shows it as what these weights were tuned from."""
    card, name = page.read_text("utf-8"), "openai-community/gpt2"
    assert f"base_model: {name}\n" in card
    for other, good in ((f"base_model: {name}-xl\n", False), (f"base_model: [{name}]\n", False), ("", True)):
        page.write_text(card.replace(f"base_model: {name}\n", other, 1), encoding="utf-8")
        assert (not statement(page)) is good


def test_a_tag_that_stands_alone_counts(tmp_path: Path) -> None:
    page = write_card(make_run(tmp_path, baseline(), None, baseline_record(), None))
    assert not statement(page)
    matter = section.front_matter(page.read_text("utf-8")) | {"tags": "differential-privacy"}
    _, _, rest = page.read_text("utf-8").split("---\n", 2)
    page.write_text(f"---\n{yaml.safe_dump(matter)}---\n{rest}", encoding="utf-8")
    assert "tags" in statement(page)


@pytest.mark.parametrize(
    "text",
    ["<style>p {display: none}</style>", "<SCRIPT src=x>", "<link rel=stylesheet>", "<iframe>", "<object>", "<embed src=x>",
     "<div title='>' style = 'position: fixed'>", "<p/style=x>", "<div class='fixed inset-0'>", "<meta http-equiv=refresh>",
     "<dialog open>", "<base href=x>"],
)  # fmt: skip
def test_nothing_outside_the_marked_parts_can_cover_them(page: Path, text: str) -> None:
    page.write_text(page.read_text("utf-8") + f"\n{text}\n", encoding="utf-8")
    assert set(statement(page)) == {"what could hide it"}


def test_a_statement_of_an_earlier_version_is_told_so(page: Path) -> None:
    block = {**read_object(page.parent / "privacy.json"), "schema_version": 3}
    (page.parent / "privacy.json").write_text(json.dumps(block), encoding="utf-8")
    with pytest.raises(Wrong, match="has schema version 3"):
        read_facts(MODEL, page.parent)
