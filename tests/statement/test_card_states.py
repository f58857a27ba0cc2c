"""Every state that a run can be in has a card, whose first line says what a reader must know first."""

import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from cards import (
    EPSILON,
    Json,
    above,
    audit,
    baseline,
    baseline_record,
    body,
    broken,
    config,
    described,
    first_line,
    plan,
    pointer,
    record,
    render_card,
    words,
)

from dpllm.card import card, registry
from dpllm.card.card import compose
from dpllm.errors import ConfigError
from dpllm.privacy.limits import rounded_down
from dpllm.recipe.config import RunConfig
from dpllm.statement import privacy_record, section
from dpllm.statement.formatting import proven
from dpllm.statement.run_files import RunRecord

CLAIM = "> **Differential privacy guarantee: ε = 2.998, δ = 1e-05 for each `patient_id`.**"
NONE = "> **No differential privacy guarantee: "
ROWS: Json = {"data": {"unit": "example", "max_examples_per_unit": None}}
HASH = "5a" * 32


def parent(**changes: Any) -> Json:
    terms = {"unit": "patient_id", "neighbouring_relation": "zero_out", "epsilon": 2.0, "delta": 1e-5}
    origin = {"name": "ward-6-model", "dataset": "ward-7-notes", "entry": "2", "files_digest": HASH}
    return {"guarantee": True, **terms, **origin, "event": plan()["event"], **changes}


def lineage(**changes: Any) -> Json:
    composed = {"epsilon": 4.01234, "delta": 1e-5, "accountant": "dp-accounting PLD 0.6.0"}
    same = {"same_dataset": True, "dataset": "ward-7-notes", "composed": composed, "reason": None}
    return {"base": parent(), "ancestors": [], **same, **changes}


MODEL_CARD = Path(__file__).parents[2] / "docs" / "concepts" / "card.md"


class State(NamedTuple):
    """What a run may be, how the first line of its card begins, and what else it says."""

    says: tuple[str, ...]
    recipe: RunConfig = config()
    plan: Json | None = plan()
    record: Json = record()
    audit: Json | None = None
    first: str = CLAIM
    statistics: Json | None = None

    def card(self) -> tuple[str, Json]:
        return render_card(self.recipe, self.plan, self.record, self.audit, statistics=self.statistics)


def of_ledger(**changes: Any) -> Json:
    return record(ledger={**record()["ledger"], **changes})


def after(**changes: Any) -> Json:
    """The record of a run on a model with a statement of its own."""
    return record(lineage=lineage(**{"composed": None, **changes}))


NO_ONE = {"guarantee": False, "epsilon": None, "delta": None, "unit": None, "event": None}
OTHER = {"base": parent(dataset="ward-6-notes"), "same_dataset": False, "dataset": None, "reason": "the data differ"}
TOLD = config(telemetry={"private_metrics": True})
ONE_ROW = "> **Differential privacy guarantee: ε = 2.998, δ = 1e-05 for each training example.**"
TOGETHER = "> **Differential privacy guarantee: ε = 4.013, δ = 1e-05 for each `patient_id`.** This run alone: 2.998."
BY_ITSELF = (
    "> **Differential privacy guarantee of this run alone: ε = 2.998, δ = 1e-05 for each `patient_id`. What it started"
)
GRADIENT = {
    "canaries": 500, "inserted": 246, "steps": 100, "epsilon_lower_bound": 1.32, "alpha": 0.02, "delta": 1e-05, "ceiling": 2.36,
    "auc": 0.71, "auc_interval": [0.66, 0.75], "noise": 0.92, "noise_interval": [0.91, 0.93], "noise_planned": 0.9184,
    "noise_refuted": False, "drawn": 7.3, "drawn_standard_error": 0.6, "drawn_planned": 7.2, "drawn_refuted": False,
}  # fmt: skip
FILTER = {"epsilon": 10.0, "delta": 1e-5, "order": 3.2}
GROUP = {"name": "sweep-1", "runs": 3, "epsilon": 4.2001, "delta": 1e-5}
STATES = {
    "guarantee": State((
        "none; the guarantee does not rest on an audit", "ε = 4.25 at δ = 1e-05 for all runs on this dataset",
        f"| ε in full | {EPSILON!r} |", "N = 888 units, public",
        "if all were fixed in advance. No budget is set: the dataset is charged without limit.",
    )),
    "audited": State(("| Verdict | consistent: ",), audit=audit()),
    "rows": State(
        ("A person with several rows has a weaker promise.", "a person with k rows, or a fact that k of them repeat"),
        config(**ROWS), plan(unit="example", max_examples_per_unit=None), first=ONE_ROW,
    ),
    "example sampling": State(
        ("Rows are drawn and clipped one by one", "N = 888 rows, public", "the gradient of each row is clipped",
         "64 rows expected", "mixture of Gaussians"),
        config(data={"sampling": "example"}), plan(sampling="example"),
    ),
    "budget": State(
        ("within a budget of ε = 10 at δ = 1e-05, whatever runs come; 10.3% of it is used by all runs",
         "A run that would exceed the budget is refused.", "| Composition | by a Renyi filter at order 3.2"),
        record=of_ledger(used=0.1023, budget=FILTER),
    ),
    "budget that an import exceeds": State(
        ("120% of it would be used by all runs", "That exceeds the budget, through what was made elsewhere.",
         "1 of them was made elsewhere"),
        record=of_ledger(used=1.2, budget=FILTER, imported=1),
    ),
    "budget that cannot be counted": State(
        ("no ε covers all runs on this dataset", "A run that would exceed the budget is refused."),
        record=of_ledger(used=None, budget=FILTER, imported=1),
    ),
    "final run": State(
        ("ε = 4.25 at δ = 1e-05 for all runs on this dataset that the ledger holds up to this one: the exact total",
         "No run can follow, and the budget was ε = 10 at δ = 1e-05.",
         "| Composition | exact, by PLD: the first reservation was the final one"),
        record=of_ledger(final=True, budget=FILTER),
    ),
    "final run and an import": State(
        ("ε = 11 at δ = 1e-05 for all runs", "up to this one, if all were fixed in advance.",
         "That exceeds the budget of ε = 10, through what was made elsewhere.",
         "| Composition | as if all runs had been fixed in advance"),
        record=of_ledger(final=True, budget=FILTER, imported=1, spent_epsilon=11.0),
    ),
    "tuning group": State(
        ("| Tuning group | `sweep-1`: 3 runs", "together ε = 4.201 at δ = 1e-05"), record=of_ledger(group=GROUP)
    ),
    "interrupted": State(
        ("40 taken of 100 planned; interrupted", "- the run was interrupted.", "| Stopping | after 40 of 100 steps"),
        record=record(status="interrupted", steps_taken=40, deviations=["the run was interrupted"]),
    ),
    "no ledger": State(("| not known: the run was not recorded in a ledger |",), record=record(ledger=None)),
    "private metrics": State(
        ("(telemetry.private_metrics)", "here they also went to metrics and trackers"), TOLD,
        record=record(deviations=TOLD.deviations),
    ),
    "tuning stated": State(
        ("| Hyper-parameters | as stated by whoever trained the model: three runs, on public data |",),
        config(card={"tuning": "three runs, on public data"}),
    ),
    "same data": State(
        (
            "| ε = 2, δ = 1e-05 for each `patient_id` of `ward-7-notes` |",
            "before it | ε = 4.013: they", "How strong is ε = 4.013",
        ),
        record=record(lineage=lineage()), first=TOGETHER,
    ),
    "other data": State(("each guarantee is for the data of its own run",), record=after(**OTHER)),
    "not composed": State(
        ("no figure for all of it is stated: ward-6-model was protected by another unit",),
        record=after(reason="ward-6-model was protected by another unit (example, here patient_id)"), first=BY_ITSELF,
    ),
    "grandparents": State(
        ("| Before it: `older` | ε = 2", "| Before it: `oldest` | no guarantee"),
        record=record(lineage=lineage(ancestors=[parent(name="older"), parent(name="oldest", guarantee=False)])), first=TOGETHER,
    ),
    "base without guarantee": State(
        ("The base model was trained on the same dataset and gives no guarantee for it.",), record=after(base=parent(**NO_ONE)),
        first=BY_ITSELF,
    ),
    "broken assumption": State(
        ("## What was attempted", "They are no guarantee."), record=broken(), first=f"{NONE}the noise was seeded"
    ),
    "falsified audit": State(
        ("> **Audit verdict: falsified.** The lower bound 4 exceeds the claim.",),
        audit=audit(verdict="falsified", verdict_reason="The lower bound 4 exceeds the claim."),
        first=f"{NONE}the audit of these weights contradicts it",
    ),
    "no privacy": State(
        ("an audit of a run without differential privacy is itself private",), baseline(), None, baseline_record(),
        first=f"{NONE}this model was trained without differential privacy (privacy.enabled: false), on data that",
    ),
    "continued without privacy": State(
        ("no figure for all of it is stated",), baseline(), None,
        baseline_record(lineage=after(reason="this run gives no guarantee")["lineage"]), first=NONE,
    ),
}  # fmt: skip


EVERYTHING = State(
    ("of which at most 6 are used", "| Statistics of the data | 2 were released as well"),
    config(card={"tuning": "three runs, on public data", "contact": "dpo@hospital.example"}),
    plan(limits={"tpr_at_fpr_0.001": 0.02, "tpr_at_fpr_0.01": 0.1, "auc": 0.7, "gdp_mu": 1.5}, curve=[[1e-4, 2.3]]),
    record(
        lineage=lineage(ancestors=[parent(name="older"), parent(name="oldest")]),
        ledger={**record()["ledger"], "group": GROUP, "imported": 2, "used": 0.55, "budget": FILTER},
        lattice={"coordinates": 10, "noise_over_max_grad_norm": 0.9184},
        deviations=["the run was interrupted and resumed", "telemetry of un-noised figures was on"],
        steps_lost=3,
    ),
    audit(gradient=GRADIENT), TOGETHER,
    statistics=described(),
)  # fmt: skip
NO_TEXT = {"attacks": {}, "exposure": {}, "extraction": {}, "gradient": GRADIENT}
NO_TEXT["epsilon_lower_bound"] = {**audit()["epsilon_lower_bound"], "value": 0.0, "num_canaries": 0}
STATES |= {
    "gradient canaries alone": State(
        ("attacks on the training steps, without planted text,",
         "| Audit of the training steps | consistent: attacks prove ε ≥ 1.32"),
        audit=audit(**NO_TEXT),
    ),
    "everything": EVERYTHING,
    "everything, banded": EVERYTHING._replace(plan=plan(coefficients=[0.8, 0.5])),
}  # fmt: skip


def first_screen(text: str) -> int:
    """Lines of the banner on a page of 120 columns, as a reader sees them: without marks and targets of links."""
    shown = re.sub(r"[*`>]|\]\([^)]*\)|\[", "", section.parts(text)["banner"])
    return sum(len(textwrap.wrap(line, 120)) for line in shown.splitlines())


@pytest.mark.parametrize("name", STATES)
def test_every_state_has_its_card(name: str) -> None:
    says, first = STATES[name].says, STATES[name].first
    text, block = STATES[name].card()
    assert first_line(text).startswith(first)
    for sentence in says:
        assert sentence in text
    assert body(text).startswith("<!-- dpllm:banner -->\n> **")
    assert section.parts(text) == card.render(privacy_record.read(block))
    assert section.front_matter(text)["privacy"] == pointer(block)
    assert first_screen(text) <= 10
    assert not re.search(r"\bNone\b(?! of this)", body(text))
    assert "Undefined" not in text
    holds = first.startswith("> **Differential privacy guarantee")
    assert block["guarantee"] is holds
    assert ("Pr[M(D) in S]" in text) == ("![Curve" in text) == holds
    covered = holds and first != BY_ITSELF
    for heading, stands in {"For whom": holds, "How strong": covered, "Not covered": True, "To check": True}.items():
        assert section.parts(text)["banner"].count(f"**{heading}:**") == stands
    for heading in ("Promise", "Audit"):
        assert section.parts(text)["banner"].count(f"**{heading}:**") == 1
    assert section.front_matter(text)["privacy"].get("epsilon") == privacy_record.read(block).weights_epsilon
    for heading in ("For the data-protection officer", "For engineers"):
        assert text.count(f"\n## {heading}\n") == 1
    assert ("\n## Appendix\n" in text) == bool(holds or block["audit"] or block["lineage"])
    assert words(text) <= 900
    assert ("No ε is a legal verdict." in text) == bool(holds)
    assert name != "budget" or "4.25" not in text  # one number
    of_engineers = r"lattice|Gaussian|GDP|μ|R[eé]nyi|\bC\b|C_t|ROC|AUC|positive|accountant|Philox"
    assert not re.search(of_engineers, above(text, "For engineers"))
    assert not re.search("loss|evaluation", section.parts(text)["banner"].split("\n", 1)[1])
    assert STATES[name].card() == (text, block)


def test_six_questions_are_answered_above_what_is_for_engineers() -> None:
    """To somebody who knows nothing of differential privacy; docs/concepts/card.md lists the questions."""
    text, block = EVERYTHING.card()
    first, officer = section.parts(text)["banner"], above(text, "For engineers")
    listed = re.findall(r"^\| \d \| (.*?) \|", MODEL_CARD.read_text("utf-8"), re.MULTILINE)
    answers = {
        "Whose data does the promise protect?": (first, "**For whom:** one `patient_id` (all rows"),
        "How many of them could somebody with the model recognise, at most?": (first, "recognises at most 55.3% of the"),
        "What does the promise not cover?": (first, "what many texts share, what is known from elsewhere"),
        "Did anybody attack the model, and does that prove the promise?": (first, "found nothing against the promise"),
        "What have all uses of these data cost together, and is there a budget?": (officer, "within a budget of ε = 10 at δ"),
        "How can I check this, and whom can I ask?": (first + officer, "`dpllm verify DIRECTORY`"),
    }  # fmt: skip
    assert listed == [*answers]
    for part, answer in answers.values():
        assert answer in part
    assert f"Contact: {block['contact']} |" in officer
    assert all(line in officer for line in block["not_covered"])


@pytest.mark.parametrize(
    ("above_epsilon", "words"), [(1e-3, "would contradict ε ="), (0.0, "would not contradict ε =")]
)
def test_the_card_says_whether_any_attack_could_contradict_epsilon(above_epsilon: float, words: str) -> None:
    ceiling = plan()["epsilon"] + above_epsilon
    bound = {**audit()["epsilon_lower_bound"], "ceiling": ceiling}
    text = render_card(config(), plan(), record(), audit(epsilon_lower_bound=bound))[0]
    (row,) = (line for line in text.splitlines() if line.startswith("| Audit of the weights"))
    assert words in row


def test_the_registry_gets_the_epsilon_of_the_weights_or_nothing() -> None:
    """A mutant gave it that of the last run, also where the weights contain an earlier one on the same dataset."""
    statement = privacy_record.read(STATES["same data"].card()[1])
    loss = yaml.safe_load(registry.entry(statement, config()))["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"]["epsilon"] == statement.weights_epsilon == 4.01234
    assert "Of this model and those before it" in loss["privacy_parameters_details"]
    assert "Its last run alone, given the models before it: ε = 2.998" in loss["privacy_parameters_details"]
    with pytest.raises(ConfigError, match="no epsilon is stated for both"):
        registry.entry(privacy_record.read(STATES["not composed"].card()[1]), config())


def test_lower_bounds_are_rounded_down() -> None:
    bound = {**audit()["epsilon_lower_bound"], "value": 0.2286}
    gradient = {**GRADIENT, "epsilon_lower_bound": 0.0099}
    text = render_card(config(), plan(), record(), audit(epsilon_lower_bound=bound, gradient=gradient))[0]
    assert "attacks prove ε ≥ 0.22" in text
    assert "0.22 with 9" in text
    assert "could prove ε ≥ 0.00 with" in text
    assert "0.23" not in text
    values = [*np.random.default_rng(0).uniform(0, 9, 1000).tolist(), 0.0, 0.29, 1.1, 2.01, 8.2, 4.35]
    assert all(0 <= value - float(proven(value)) < 0.01 for value in values)
    assert all(0 <= value - rounded_down(value, 3) <= 0.01 * value for value in values)
    assert [proven(value) for value in (0.29, 1.1, 8.2, 4.35)] == ["0.29", "1.10", "8.20", "4.35"]


def test_the_card_says_who_vouches_and_without_a_guarantee_nothing_recomputes_epsilon() -> None:
    for its_record, recomputed in ((record(), True), (broken("no"), False)):
        text = render_card(config(), plan(), its_record, None)[0]
        (row,) = (line for line in text.splitlines() if line.startswith("| Who vouches"))
        assert "its author, for the training" in row
        assert ("`dpllm verify` recomputes ε" in row) == recomputed


def test_a_merged_copy_says_so_and_is_used_as_a_whole_model() -> None:
    block = render_card(config(), plan(), record(), audit())[1]
    merged = {**block, "merged_from": {"files": {"adapter_model.safetensors": HASH}}}
    text = compose(config(), RunRecord.pick(record()), privacy_record.read(merged))
    assert "These files are a merged copy, which has the same guarantee" in text
    assert "| Attacked | the adapter, before it was merged" in text
    assert "PeftModel" not in text
    assert section.front_matter(text)["library_name"] == "transformers"


def test_delta_stands_beside_one_over_n_and_the_shuffling_fallback_is_larger() -> None:
    text, block = render_card(config(), plan(), record(), None)
    assert block["plan"]["without_amplification"] > block["plan"]["epsilon"]
    assert f"ε would be {block['plan']['without_amplification']:g} at the same δ" in text
    assert " | 1e-05, which is 0.0089 / N" in render_card(config(), plan(), record(), None)[0]


@pytest.mark.parametrize(
    ("epsilon", "word"), [(1.0, "strong"), (1.1, "reasonable"), (10.0, "reasonable"), (10.1, "weak")]
)
def test_the_tiers_are_called_a_convention(epsilon: float, word: str) -> None:
    text, _ = render_card(config(), plan(epsilon=epsilon), record(), None)
    assert re.search(rf"\| {word}.*, by a convention .*Ponomareva et al. 2023\), not by a theorem \|", text)


def test_evaluation_is_named_as_it_was() -> None:
    for data, says in (
        ({"eval_public": True}, "evaluation data (declared public)"),
        ({}, "evaluation data (not declared public; no figure from them is published)"),
        ({"eval": None}, "evaluation data: this run had none"),
    ):
        _, block = render_card(config(data=data), plan(), record(), None)
        assert any(line.startswith(says) for line in block["not_covered"])


def test_a_statement_that_its_schema_does_not_allow_is_not_written() -> None:
    with pytest.raises(ConfigError, match=r"schema.*sampling_rate"):
        render_card(config(), plan(sampling_rate=1.5), record(), None)


def test_every_access_to_data_outside_the_guarantee_is_named() -> None:
    text, block = render_card(config(), plan(), record(), None)
    accesses = ("base model", "tokenizer", "chat template", "clean-up", "evaluation", "hyper-parameters", "telemetry")
    limits = (
        "when it is used", "finitely many states", "side channels", "checkpoints", "many units share",
        "other sources",
    )  # fmt: skip
    columns = ("each value of the column patient_id stands for one person", "another column of the same file")
    for named in (*accesses, *limits, *columns):
        assert any(named in line for line in block["not_covered"]), named
    assert all(f"\n- {line}\n" in text for line in block["not_covered"])
    rows = render_card(config(data={"unit": "example", "max_examples_per_unit": None}), plan(), record(), None)[1]
    assert not any("publisher's word" in line for line in rows["not_covered"])
    baseline_block = render_card(baseline(), None, baseline_record(), None)[1]
    assert baseline_block["not_covered"] == ["everything: this run gives no guarantee"]
