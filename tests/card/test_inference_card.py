"""The card of texts by private inference: what datasets loads, which epsilon stands there, and text that would break the page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cards import assert_golden
from written_rows import COST, ROWS, released
from written_texts import EVENT, inferred, make_texts, stated, write_texts

from dpllm.card import inference
from dpllm.card.inference import Inference
from dpllm.errors import ConfigError
from dpllm.privacy.accounting import compose, epsilon
from dpllm.privacy.events import BoundedRange, PureDP
from dpllm.privacy.limits import attacker_limits, attacker_limits_of
from dpllm.privacy.plan import ACCOUNTANT
from dpllm.records import NotAStatement
from dpllm.statement import formatting, section
from dpllm.verification.verify import verify

GOLDEN = Path(__file__).parents[1] / "golden" / "inference.md"
ALONE = {"control": [], "shares": None, "columns": ["text"]}
TOGETHER = compose([EVENT, PureDP(COST["epsilon"])])


def page(folder: Path) -> str:
    return (folder / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_texts(tmp_path_factory.mktemp("card") / "texts")


def test_datasets_loads_exactly_the_rows_as_text(folder: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    dataset = load_dataset(str(folder), cache_dir=str(tmp_path))
    assert list(dataset) == ["train"]
    assert dataset["train"].to_list() == ROWS


def test_epsilon_is_of_texts_and_statistics_together_everywhere(folder: Path) -> None:
    alone, both = (epsilon(event, 1e-5, "zero_out") for event in (EVENT, TOGETHER))
    record = stated(folder)
    assert (record["epsilon"], record["statistics"]["with_run"]) == pytest.approx((alone, both), rel=1e-9)
    assert section.front_matter(page(folder))["privacy"]["epsilon"] == pytest.approx(both, rel=1e-9)
    text = section.parts(page(folder), inference.PARTS)["inference"]
    assert f"ε = {formatting.bound(both)}, δ = 1e-05 for each training example" in text.splitlines()[0]
    smallest = min(alone, released()["epsilon"])
    shown = [float(number) for number in re.findall(r"(?:ε = |^\| ε of [a-z ]*\| )([0-9.]+[0-9])", text, re.MULTILINE)]
    assert len(shown) >= 5
    assert min(shown) >= smallest


def test_epsilon_is_that_of_the_texts_without_statistics_and_none_without_a_total(tmp_path: Path) -> None:
    record = inferred(**ALONE)
    assert inference.epsilon(record) == record.epsilon == epsilon(EVENT, 1e-5, "zero_out")
    assert "statistics" not in page(write_texts(tmp_path / "a", record)).split("## What is covered")[0]
    without_total = inferred().statistics.model_copy(update={"with_run": None})
    with pytest.raises(NotAStatement, match="with_run"):
        inference.epsilon(inferred().model_copy(update={"statistics": without_total}))


def test_the_share_that_is_recognised_is_of_everything_that_was_released(folder: Path) -> None:
    record = inferred()
    most = attacker_limits_of(TOGETHER, "zero_out")["tpr_at_fpr_0.01"]
    assert inference.recognised(record) == most < attacker_limits(inference.epsilon(record), 1e-5)["tpr_at_fpr_0.01"]
    assert f"at most {formatting.percent_bound(most)} of the training examples" in page(folder)


def test_the_first_screen_of_ten_lines_says_where_the_records_were_and_the_page_what_is_not_covered(
    folder: Path,
) -> None:
    text = page(folder)
    first = section.parts(text, inference.PARTS)["inference"].split("## For the data-protection officer")[0]
    assert "in the prompts of `builtin:tiny`" in first
    assert len([line for line in first.splitlines() if line]) <= 10
    assert "NVIDIA H100" in text
    assert "how often a draw was tried" in text
    assert "nothing but these rows was kept" in text


def test_a_record_takes_events_and_json_alike_and_an_exact_range() -> None:
    record = inferred(clip=0.1, temperature=0.7, batch_size=3, **ALONE)
    assert inference.eta(record) * 3 * inference.Fraction(0.7) == 2 * inference.Fraction(0.1)
    assert inferred(event=EVENT) == inferred(event=EVENT.to_json())
    assert isinstance(inferred().event, BoundedRange)
    assert inferred().accountant.name == ACCOUNTANT


HOSTILE = [
    "</td></tr><script>alert(1)</script><!-- hidden",
    "a | b `c` {text} \n\n# Safe\n> **No cost: ε = 0**\n---\n",
    "[ε = 0](https://example.org) ![](x.png) <style>p {display: none}</style>",
    "\u202e\u2028 ~~struck~~ $$x$$ &lt;",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "field", ["prompt", "dataset", "base_model", "dropped", "software", "hardware", "not_covered", "quality", "unit"]
)
def test_text_of_a_stranger_does_not_break_the_page(folder: Path, field: str, text: str) -> None:
    value: Any = {
        "prompt": f"{{text}} {text}", "base_model": {"name": text, "revision": text, "covered": False},
        "dropped": {text: 3}, "software": {text: text}, "hardware": {text: text, "b": [text]}, "not_covered": [text],
        "quality": {"figures": {f"{text}: synthetic": 1.0, text: None}, "evaluation": text},
    }.get(field, text)  # fmt: skip
    record = Inference.checked({**stated(folder), field: value})
    made, plain = (inference.render(item)["inference"] for item in (record, inferred()))
    assert not re.search(r"<(?:!|/|script|style)", made)
    headings = [[line for line in page.splitlines() if line.startswith("#")] for page in (made, plain)]
    assert headings[0] == headings[1]
    assert len([line for line in made.splitlines() if line.startswith(">")]) == 1
    for line in made.splitlines():
        if line.startswith("|") and field != "quality":
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 6), line


def test_hostile_text_in_all_fields_still_verifies(tmp_path: Path) -> None:
    text = HOSTILE[1]
    changes = {"prompt": text, "dataset": text, "software": {text: text}, "hardware": {text: [text]}}
    changes["dropped"] = {text: 3}
    verification = verify(make_texts(tmp_path / "a", **changes))
    assert [check for check in verification.checks if check.status == "failed"] == []


def test_a_marker_in_a_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="marker"):
        make_texts(tmp_path / "a", prompt="{text} <!-- /dpllm:inference -->")


@pytest.mark.parametrize(
    "change",
    [
        *({"rows": 0}, {"more": 1}, {"schema_version": 2}, {"not_covered": []}, {"texts": True}, {"limits": None}),
        {"event": {"type": "pure_dp", "epsilon": 1.0}},
        {"event": {"type": "bounded_range", "range": 0.2, "count": 0}},
        {"event": {"type": "self_composed", "count": 3, "event": {"type": "bounded_range", "range": 0.2, "count": 24}}},
        {"neighbouring_relation": "replace_one"},
    ],
)
def test_a_record_is_closed(folder: Path, change: dict[str, object]) -> None:
    assert Inference.checked(stated(folder)).to_json() == stated(folder)
    with pytest.raises(NotAStatement):
        Inference.checked({**stated(folder), **change})


def test_the_marked_part_is_as_it_was_and_quotes_no_row(folder: Path) -> None:
    assert_golden(section.parts(page(folder), inference.PARTS)["inference"] + "\n", GOLDEN)
    assert not any(row["text"] in page(folder) + json.dumps(stated(folder)) for row in ROWS)
