"""Nothing hides the privacy statement of a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cards import audit, baseline, baseline_record, config, make_run, plan, record
from published import opened

import dpllm
from dpllm.card.artifact import MODEL
from dpllm.card.card import write_card
from dpllm.errors import ConfigError
from dpllm.statement import section
from dpllm.verification import check_folder
from dpllm.verification.values import Check, Wrong, read_facts, read_object

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
