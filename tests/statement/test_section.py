"""The marked parts of a card: a function of the privacy block alone, and read back as they were written."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from cards import Json, audit, broken, config, described, plan, pointer, record, render_card
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from published import changed, get, leaves
from test_card_states import lineage, parent

from dpllm.card.card import digest, render
from dpllm.errors import ConfigError
from dpllm.statement import privacy_record, section


def rendered(block: Json) -> dict[str, str]:
    return render(privacy_record.read(block))


def card(**changes: Any) -> tuple[str, Json]:
    return render_card(config(), plan(), record(**changes), audit())


@pytest.fixture(scope="module")
def block() -> Json:
    return card()[1]


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value + "x" if isinstance(value, str) else "x" if value is None else [*value, "x"] if value == [] else None


@pytest.mark.parametrize("part", ["banner", "privacy"])
def test_a_marker_that_is_missing_doubled_or_out_of_order_is_refused(part: str) -> None:
    text, _ = card()
    start, end = f"<!-- dpllm:{part} -->", f"<!-- /dpllm:{part} -->"
    wrong = (
        text.replace(start, ""),
        text.replace(end, ""),
        text + start,
        text + f"\n{start}\nanother\n{end}\n",
        text.replace(start, "@").replace(end, start).replace("@", end),
    )
    for edited in wrong:
        with pytest.raises(ConfigError, match=f"dpllm:{part}"):
            section.parts(edited)


@pytest.mark.parametrize(("where", "named"), [("contact", "contact"), ("tuning", "contact"), ("license", "license")])
def test_a_marker_in_a_text_of_the_recipe_is_refused(where: str, named: str) -> None:
    for marker in ("<!-- dpllm:privacy -->", "<!-- /dpllm:banner -->"):
        with pytest.raises(ConfigError, match=f"card.{named}"):
            render_card(config(card={where: f"see {marker} below"}), plan(), record(), None)


@pytest.mark.parametrize("text", ["<!-- ", "<details>", "</div>", "<?x"])
def test_no_text_of_a_statement_hides_what_stands_behind_it(block: Json, text: str) -> None:
    shown = rendered({**block, "contact": f"somebody {text}"})["privacy"]
    assert text not in shown
    assert text.replace("<", "&lt;").strip() in shown


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.text(alphabet="a|\n\t `*<>{}%\u2028'\":-", max_size=30), st.booleans())
def test_no_text_of_the_recipe_breaks_the_card(text: str, holds: bool) -> None:
    recipe = config(card={"contact": text, "tuning": text, "title": text, "description": text})
    the_record = record() if holds else broken(f"because {text}")
    written, block = render_card(recipe, plan(), the_record, None)
    assert section.parts(written) == rendered(block)
    assert section.front_matter(written)["privacy"] == pointer(block)
    assert section.first(written)
    rows = [line for line in rendered(block)["privacy"].splitlines() if line.startswith(("| Who vouches", "| Hyper"))]
    assert len(rows) == 2
    assert all(row.replace("\\|", "").count("|") == 3 for row in rows)


def test_rendering_needs_jinja_and_pydantic_and_nothing_heavy(block: Json) -> None:
    """Whoever checks a card has neither torch nor the libraries that trained the model, nor numpy."""
    code = """
import json, sys
heavy = {"torch", "transformers", "peft", "datasets", "accelerate", "opacus", "numpy", "scipy", "matplotlib"}
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in heavy:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from dpllm.card.card import render
from dpllm.statement import privacy_record
print(render(privacy_record.read(json.load(sys.stdin)))["banner"])
"""
    process = subprocess.run([sys.executable, "-c", code], input=json.dumps(block), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == rendered(block)["banner"]


HOSTILE = "x` ![ε = 0.1](https://evil/x.svg) ` **A** \u202e\u200b <img src=x> [a](https://evil) &#8238; | c\n# b"
MARKDOWN = MarkdownIt("commonmark").enable("table")


def live(shown: str) -> set[str]:
    """What a reader's browser would load or follow of a page, and its HTML."""
    parts = [part for block in MARKDOWN.parse(shown) for part in (block, *(block.children or ()))]
    targets = {str(part.attrs[name]) for part in parts for name in ("src", "href") if name in part.attrs}
    return targets | {part.content for part in parts if part.type.startswith("html")}


def test_no_text_of_a_statement_shows_an_image_a_link_or_hidden_letters(block: Json) -> None:
    attempted = render_card(config(), plan(), broken(), None)[1]
    changes = {"lineage": lineage(ancestors=[parent(name="older")]), "deviations": ["a thing"]}
    tuned = render_card(config(), plan(), record(**changes), audit(), statistics=described())[1]
    started = render_card(config(), plan(), record(lineage=lineage(base=parent(adapter=True))), None)[1]
    own = set.union(*(live("\n".join(rendered(whole).values())) for whole in (tuned, attempted)))
    assert all(target.startswith(("#", "privacy.")) for target in own)
    tried = 0
    for whole in (tuned, attempted, started):
        for path in leaves(whole):
            if not isinstance(get(whole, path), str | None):
                continue
            hostile = changed(whole, path, lambda _: HOSTILE)
            try:
                shown = "\n".join(rendered(hostile).values())
            except ConfigError:
                continue
            prose = re.sub(r"(?<!\\)`[^`\n]*`", "", shown)
            tried += HOSTILE[-3:] in shown
            assert live(shown) <= own, path
            assert not re.search(r"[\u202e\u200b]|(?<!\\)`|(?<!\\)&#|\*\*A\*\*|^# b", prose, re.MULTILINE), path
    assert tried > 15


def test_a_text_of_a_statement_begins_no_heading_and_no_quotation(block: Json) -> None:
    for text in ("# ε = 0.1", "> ε = 0.1"):
        assert f"- \\{text}." in rendered({**block, "deviations": [text]})["privacy"]


def test_names_stay_in_their_cells() -> None:
    name = "a|b\n# c"
    text, block = render_card(config(), plan(unit=name), record(ledger=None), None)
    assert section.parts(text) == rendered(block)
    assert "\n# c" not in text.split("---\n", 2)[2]
    assert "**For whom:** one `a\\|b # c` (all rows" in text


MACHINE_ONLY = (
    "schema_version", "plan.schema_version", "plan.definition", "plan.trust_model", "plan.mechanism", "plan.sampling",
    "plan.accountants", "plan.trade_off", "plan.event", "plan.target_epsilon", "plan.canary_commitment", "plan.audit",
    "plan.num_steps", "status", "randomness.generator", "base_model.covered",
    "composed.budget.order", "composed.final", "lineage.dataset", "lineage.reason", "audit.canaries",
    "audit.weights", "audit.schema_version", "audit.claim", "audit.settings", "audit.published", "software", "hardware",
    "recipe_digest", "files",
)  # fmt: skip
"""Constants, what is worded together with another field, and what no sentence could hold; the digest covers them."""
DETAILS = (
    "confidence", "tpr_at_fpr_0.001", "tpr_at_0.1_percent_fpr", "tpr_at_0.1_percent_fpr_interval", "base_control_auc",
    "base_control_auc_interval", "held_out_mean", "largest_possible", "falling", "falling_in", "best_side", "weight", "slope",
    "twin", "level", "interval", "sampling", "repeated",
)  # fmt: skip
"""Likewise, of an audit."""
LATER = ("neighbouring_relation", "entry", "event", "files_digest")
"""Likewise, of each earlier model."""


def test_every_field_that_people_read_is_worded() -> None:
    """The others are covered by the digest on the last line, of which each field is a part."""
    group = {"name": "sweep-1", "runs": 3, "epsilon": 4.2001, "delta": 1e-5}
    ledger = {**record()["ledger"], "group": group}
    changes = {"lineage": lineage(ancestors=[parent(name="older")]), "ledger": ledger, "deviations": ["a thing"]}
    block = render_card(config(), plan(), record(**changes), audit())[1]

    def told(block: Json) -> str:
        parts = rendered(block)
        return parts["banner"] + parts["privacy"].replace(digest(block), "")

    shown, worded = told(block), 0
    for path in leaves(block):
        name = ".".join(map(str, path))
        later = path[0] == "lineage" and any(part in LATER for part in path)
        detail = path[0] == "audit" and any(part in DETAILS for part in path)
        if name.startswith(MACHINE_ONLY) or later or detail:
            continue
        try:
            assert told(changed(block, path, other)) != shown, name
            worded += 1
        except ConfigError:
            continue
    assert worded > 110
