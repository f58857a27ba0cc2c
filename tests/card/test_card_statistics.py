"""What was released about the data stands on the card, with what it costs together with the run, if it is these data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cards import (
    EPSILON,
    Json,
    audit,
    baseline,
    baseline_record,
    broken,
    config,
    described,
    make_run,
    plan,
    record,
    render_card,
)

from dpllm.card.card import rerender, write_card
from dpllm.errors import ConfigError
from dpllm.files import write_json
from dpllm.privacy import embedded
from dpllm.privacy.accounting import compose, epsilon
from dpllm.privacy.events import Gaussian, PureDP, SelfComposed, read
from dpllm.statement import privacy_record, section, state, synthetic, tradeoff_figure
from dpllm.statement.formatting import bound
from dpllm.verification import check_promise
from dpllm.verification.values import Published, Wrong

OTHERWISE: tuple[Json, ...] = (
    {"error_95": 7.2},
    {"error_95": 72.393},
    {"error_of": "units"},
    {"mechanism": "Gaussian"},
    {"mechanism": "permute-and-flip"},
    {"statistic": "the names of all"},
    {"statistic": "quantile 0.5 of label"},
    {"statistic": "number of units"},
    {"declared": {}},
    {"declared": {"values": ["yes", "no"], "numbers": [0, 1]}},
)
RUN_AND_TWO = compose([read(plan()["event"]), PureDP(0.25), PureDP(0.25)])


def test_the_card_shows_each_release_and_the_epsilon_of_all_with_the_run() -> None:
    text, block = render_card(config(), plan(), record(), audit(), statistics=described())
    together = epsilon(RUN_AND_TWO, 1e-5, "zero_out")
    assert block["statistics"] == {**described(), "with_run": pytest.approx(together)}
    assert epsilon(read(plan()["event"]), 1e-5, "zero_out") < together
    part = section.parts(text)["privacy"].split("### Released statistics")[1].split("\n### ")[0]
    assert "yes 60 = 58.3%, no 43 = 41.7%, other -3 = 0.0%" in part
    assert "60 (± 98.3 rows of rank)" in part
    assert "ε = 0.5 at δ = 1e-09; with the run ε = 6.19" in " ".join(part.split())
    assert "At most 6 rows of a unit" in part


def test_without_statistics_nothing_is_said_of_them() -> None:
    text, block = render_card(config(), plan(), record(), audit())
    assert "statistics" not in block
    assert "Released statistics" not in text


def test_a_run_without_a_guarantee_states_no_total() -> None:
    block = render_card(config(), plan(), broken(), None, statistics=described())[1]
    assert block["statistics"]["with_run"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"dataset": "ward-8-notes"},
        {"unit": "example"},
        {"neighbouring_relation": "add_or_remove_one"},
        {"releases": [{**described()["releases"][0], "value": None, "entry": None}]},
        {"releases": []},
        {"epsilon": "small"},
    ],
)
def test_other_data_another_unit_or_a_dry_run_are_refused(change: Json) -> None:
    with pytest.raises(ConfigError):
        render_card(config(), plan(), record(), audit(), statistics=described(**change))


def test_a_run_without_privacy_shows_none() -> None:
    with pytest.raises(ConfigError, match="do not add"):
        render_card(baseline(), None, baseline_record(), None, statistics=described())


def test_the_file_is_kept_beside_the_run_for_the_next_card(tmp_path: Path) -> None:
    write_json(tmp_path / "stats.json", described())
    run = make_run(tmp_path / "run", config(), plan(), record(), audit())
    page = write_card(run, tmp_path / "stats.json")
    (tmp_path / "stats.json").unlink()
    first = {name: (run.export / name).read_bytes() for name in ("README.md", "privacy.json")}
    assert "shares of label" in page.read_text("utf-8")
    assert not (run.export / "describe.json").exists(), "privacy.json holds all of it"
    write_card(run)
    assert {name: (run.export / name).read_bytes() for name in first} == first
    assert {name: text.encode() for name, text in rerender(run.root).items() if name in first} == first
    with pytest.raises(ConfigError, match="missing"):
        write_card(run, tmp_path / "stats.json")


def verified(block: Json) -> dict[str, str]:
    found = Published(Path("none"), block, "")
    return {check.name: check.status for check in check_promise.check_statistics(found)}


def forged(block: Json, **changes: Any) -> Json:
    return {**block, "statistics": {**block["statistics"], **changes}}


def test_verify_computes_both_epsilons_again() -> None:
    block = json.loads(json.dumps(render_card(config(), plan(), record(), audit(), statistics=described())[1]))
    assert verified(block) == {"statistics": "verified", "values of statistics": "asserted"}
    one, other = block["statistics"]["releases"]
    cheaper = [{**one, "event": {**one["event"], "epsilon": 0.2}} for one in block["statistics"]["releases"]]
    for changes in (
        {"epsilon": 0.4},
        {"with_run": EPSILON},
        {"with_run": None},
        {"unit": "example"},
        {"neighbouring_relation": "add_or_remove_one"},
        {"releases": cheaper},
        {"releases": [{**cheaper[0], "event": PureDP(1e6).to_json()}]},
        {"releases": [{**cheaper[0], "value": None}]},
        *({"releases": [{**one, **change}, other]} for change in OTHERWISE),
        {"releases": [one, {**other, "error_95": 72.39236660867908}]},
        {"releases": [one, {**other, "declared": {"numbers": [0, 60], "quantile": 0.5}}]},
        {"max_examples_per_unit": 5},
        {"releases": [{**one, "value": {**one["value"], "John Smith": 3}}, other]},
        {"releases": [{**one, "value": dict.fromkeys(one["value"], 0.5)}, other]},
        {"releases": [one, {**other, "value": dict.fromkeys(other["value"], 1e9)}]},
    ):
        with pytest.raises(Wrong):
            verified(forged(block, **changes))


SUMS = embedded.event_of("clusters", 8.0, 5)


def clustered() -> Json:
    """Statistics of which one is clusters."""
    one, other = described()["releases"]
    declared = {"clusters": 2, "encoder": "builtin:tiny", "max_length": 64, "dimensions": 16, "units": 640}
    clusters = {
        "statistic": "clusters of texts",
        "declared": declared,
        "mechanism": embedded.NAMES["clusters"],
        "event": SUMS.to_json(),
        "error_95": embedded.error_of(8.0),
        "error_of": embedded.COUNTED,
        "value": {"01 cough, chest": 410, "02 letter": 233},
        "entry": other["entry"],
        "vectors": "0" * 64,
        "encoder": "0" * 64,
    }
    alone = epsilon(compose([read(one["event"]), SUMS]), described()["delta"], "zero_out")
    return described(releases=[one, clusters], epsilon=alone)


def test_clusters_stand_beside_statistics_and_add_to_the_run_as_gaussian_sums() -> None:
    text, block = render_card(config(), plan(), record(), audit(), statistics=clustered())
    together = epsilon(compose([read(plan()["event"]), PureDP(0.25), SUMS]), 1e-5, "zero_out")
    assert block["statistics"]["with_run"] == pytest.approx(together)
    assert "01 cough, chest: 410, 02 letter: 233 (± 22.7 units in each count) | 5 sums, noise multiplier 8 |" in text
    block = json.loads(json.dumps(block))
    assert verified(block)["statistics"] == "verified"
    pure, sums = block["statistics"]["releases"]
    for change in (
        {"event": embedded.event_of("clusters", 9.0, 5).to_json()},
        {"event": embedded.event_of("clusters", 1e-6, 5).to_json(), "error_95": embedded.error_of(1e-6)},
        {"mechanism": embedded.NAMES["classifier"]},
        {"error_95": 1.0},
        {"error_of": "units"},
        {"value": {"01 cough": 4}},
        {"value": {"01 cough": 4, "03 letter": 3}},
        {"value": {"01 cough": 4, "02 letter": 3.5}},
        {"declared": {**sums["declared"], "values": ["a", "b"]}},
    ):
        with pytest.raises(Wrong):
            verified(forged(block, releases=[pure, {**sums, **change}]))


def test_gaussian_sums_have_no_epsilon_at_a_delta_of_0() -> None:
    """So a share that is recognised follows from epsilon and delta of all together, and models before allow no sum."""
    statement = privacy_record.read(render_card(config(), plan(), record(), audit(), statistics=clustered())[1])
    assert statement.statistics is not None
    assert statement.statistics.pure == float("inf")
    assert synthetic.epsilon(statement) == statement.statistics.with_run
    terms = statement.terms.model_copy(
        update={"epsilon": synthetic.epsilon(statement), "limits": None, "trade_off": None}
    )
    assert synthetic.recognised(statement) == tradeoff_figure.recognised(terms)


def test_gaussian_sums_and_the_models_before_the_run_are_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their events, since their epsilons do not add; mutants forget the models, the sums, or to compute it again."""
    before = SelfComposed(50, Gaussian(12.0))
    account = {"dataset": record()["ledger"]["dataset"], "entry": "0" * 16, "head": "0" * 64, "files_digest": "0" * 64}
    terms = {"delta": 1e-5, "unit": plan()["unit"], "neighbouring_relation": "zero_out"}
    cost = epsilon(before, 1e-5, "zero_out")
    base = {"name": "first", "guarantee": True, "epsilon": cost, "event": before.to_json(), **terms, **account}
    both = epsilon(compose([read(plan()["event"]), before]), 1e-5, "zero_out")
    total = {"epsilon": both, "delta": 1e-5, "accountant": "dp-accounting PLD"}
    line = {"base": base, "ancestors": [], "same_dataset": True, "dataset": account["dataset"], "composed": total}
    after = record(lineage={**line, "reason": None})
    text, block = render_card(config(), plan(), after, audit(), statistics=clustered())
    all_of_it = epsilon(compose([read(plan()["event"]), PureDP(0.25), SUMS, before]), 1e-5, "zero_out")
    assert block["statistics"]["with_all"] == pytest.approx(all_of_it)
    assert all_of_it > max(block["statistics"]["with_run"], both)
    statement = privacy_record.read(block)
    assert synthetic.epsilon(statement) == block["statistics"]["with_all"]
    assert f"with the models before this one on the same dataset too, ε = {bound(all_of_it)}" in text
    block = json.loads(json.dumps(block))
    assert verified(block)["statistics"] == "verified"
    for wrong in (None, all_of_it * 0.99, both):
        with pytest.raises(Wrong):
            verified(forged(block, with_all=wrong))
    pure = render_card(config(), plan(), after, audit(), statistics=described())[1]
    assert "with_all" not in pure["statistics"]
    hidden = json.loads(json.dumps(block))
    hidden["lineage"] |= {"composed": None, "reason": "the author says so"}
    shown = privacy_record.read(hidden)
    with pytest.raises(Wrong, match="no total is stated"):
        list(check_promise.lineage_of(shown.lineage, shown.terms, shown.composed))
    block["lineage"]["base"]["event"] = SelfComposed(10**9, Gaussian(12.0)).to_json()
    monkeypatch.setattr(state, "beside_run", lambda *_: pytest.fail("an event that takes hours was composed"))
    with pytest.raises(Wrong, match="steps"):
        verified(block)


@pytest.mark.parametrize(("delta", "good"), [(0.9, False), (1 / 640, False), (1 / 641, True)])
def test_a_delta_of_one_in_n_or_more_fails(delta: float, good: bool) -> None:
    """N is 888 with 248 slots of canaries, which statistics do not have."""
    alone = epsilon(compose([read(one["event"]) for one in described()["releases"]]), delta, "zero_out")
    block = json.loads(json.dumps(render_card(config(), plan(), record(), audit(), statistics=described())[1]))
    block = forged(block, delta=delta, epsilon=alone)
    if good:
        assert verified(block)["statistics"] == "verified"
        return
    with pytest.raises(Wrong, match="1/N"):
        verified(block)
