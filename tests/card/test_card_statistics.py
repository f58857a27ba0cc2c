"""What a card says of an audit and of what was released about the data, with what that costs together with the run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cards import (
    EPSILON,
    HASH,
    SETTINGS,
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
from published import opened

from dpllm.card.card import rendered, write_card
from dpllm.errors import ConfigError
from dpllm.files import write_json
from dpllm.privacy import embedded
from dpllm.privacy.accounting import compose, epsilon
from dpllm.privacy.events import PureDP, read
from dpllm.statement import section
from dpllm.statement.audit_bounds import Claim
from dpllm.verification import check_released
from dpllm.verification.values import Wrong

OTHERWISE: dict[str, list[Any]] = {
    "error_95": [7.2, 72.393],
    "error_of": ["units"],
    "mechanism": ["Gaussian", "permute-and-flip"],
    "statistic": ["the names of all", "quantile 0.5 of label", "number of units"],
    "declared": [{}, {"values": ["yes", "no"], "numbers": [0, 1]}],
}
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


def test_a_run_without_a_guarantee_states_no_total_and_a_card_without_statistics_nothing() -> None:
    block = render_card(config(), plan(), broken(), None, statistics=described())[1]
    assert block["statistics"]["with_run"] is None
    with pytest.raises(ConfigError, match="do not add"):
        render_card(baseline(), None, baseline_record(), None, statistics=described())
    text, block = render_card(config(), plan(), record(), audit())
    assert "statistics" not in block
    assert "Released statistics" not in text


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
    assert {name: text.encode() for name, text in rendered(run).items() if name in first} == first
    with pytest.raises(ConfigError, match="missing"):
        write_card(run, tmp_path / "stats.json")


def shown() -> Json:
    """The statement of a card with statistics."""
    return dict(json.loads(json.dumps(render_card(config(), plan(), record(), audit(), statistics=described())[1])))


def verified(block: Json) -> dict[str, str]:
    return {check.name: check.status for check in check_released.statistics(opened(Path("none"), block))}


def forged(block: Json, **changes: Any) -> Json:
    return {**block, "statistics": {**block["statistics"], **changes}}


def test_verify_computes_both_epsilons_again() -> None:
    block = shown()
    assert verified(block) == {"statistics": "verified"}
    one, other = block["statistics"]["releases"]
    cheaper = [{**one, "event": {**one["event"], "epsilon": 0.2}} for one in block["statistics"]["releases"]]
    for changes in (
        *({"epsilon": 0.4}, {"with_run": EPSILON}, {"with_run": None}, {"unit": "example"}),
        {"max_examples_per_unit": 5},
        {"neighbouring_relation": "add_or_remove_one"},
        {"releases": cheaper},
        {"releases": [{**cheaper[0], "event": PureDP(1e6).to_json()}]},
        {"releases": [{**cheaper[0], "value": None}]},
        *({"releases": [{**one, key: value}, other]} for key, values in OTHERWISE.items() for value in values),
        {"releases": [one, {**other, "error_95": 72.39236660867908}]},
        {"releases": [one, {**other, "declared": {"numbers": [0, 60], "quantile": 0.5}}]},
        {"releases": [{**one, "value": {**one["value"], "John Smith": 3}}, other]},
        {"releases": [{**one, "value": dict.fromkeys(one["value"], 0.5)}, other]},
        {"releases": [one, {**other, "value": dict.fromkeys(other["value"], 1e9)}]},
    ):
        with pytest.raises(Wrong):
            verified(forged(block, **changes))


def test_clusters_have_a_card_of_their_own() -> None:
    sums = {"event": embedded.event_of("clusters", 8.0, 5).to_json()}
    clustered = described(releases=[described()["releases"][0] | sums])
    with pytest.raises(ConfigError, match="their own card"):
        render_card(config(), plan(), record(), audit(), statistics=clustered)
    with pytest.raises(Wrong):
        verified(forged(shown(), releases=clustered["releases"]))


@pytest.mark.parametrize(("delta", "good"), [(0.9, False), (1 / 640, False), (1 / 641, True)])
def test_a_delta_of_one_in_n_or_more_fails(delta: float, good: bool) -> None:
    """N is 888 with 248 slots of canaries, which statistics do not have."""
    alone = epsilon(compose([read(release["event"]) for release in described()["releases"]]), delta, "zero_out")
    block = forged(shown(), delta=delta, epsilon=alone)
    if good:
        assert verified(block)["statistics"] == "verified"
        return
    with pytest.raises(Wrong, match="1/N"):
        verified(block)


def test_audit_stands_beside_its_controls_and_limits() -> None:
    text, block = render_card(config(), plan(), record(), audit(audits_run=3))
    assert "| Verdict | consistent: " in text
    assert "no proof" in text
    assert "| Audits made | 3; " in text
    assert "random secrets of 8 digits" in text
    assert "does not tell the planted ones from the others" in text
    assert "The attack was seen to work: AUC 0.97 on the canaries planted 16 times." in text
    assert "0.12 with 95% confidence" in text
    assert "| What the audit could have shown at most | 2.76" in text
    assert "| ratio | 1 | 0.53 (0.45 to 0.61) | 0.9525 |" in text
    assert "| 1 | 99 | 1.61 | 1.44 | 1.41 | 0.21 | 6.90 | 0 of 99 | 0 of 99 | 0 of 101 |" in text
    assert text.index("| 1 | 99 |") < text.index("| 16 | 9 |")
    assert block["audit"] == audit(audits_run=3)


def test_limit_of_repeated_canaries_is_that_of_the_group() -> None:
    delta = 1e-3 * math.expm1(2.0) / math.expm1(0.5)
    largest = 1 - (1 - delta) ** 2 / (1 + math.exp(2.0))
    assert Claim(0.5, 1e-3, "example").limits(4, None)["auc"] == pytest.approx(largest)
    # All copies belong to one patient, whom one epsilon protects.
    largest = 1 - (1 - 1e-3) ** 2 / (1 + math.exp(0.5))
    assert Claim(0.5, 1e-3, "patient_id").limits(4, None)["auc"] == pytest.approx(largest)
    assert "All copies of a canary belong to one unit" in render_card(config(), plan(), record(), audit())[0]


def test_an_audit_that_refutes_has_no_limits_and_one_without_canaries_planted_once_has_a_card() -> None:
    refuted = audit(verdict="falsified", verdict_reason="The lower bound 4 exceeds the claim.")
    text, block = render_card(config(), plan(), record(), refuted)
    assert not block["guarantee"]
    assert "| ratio | 1 | 0.53 (0.45 to 0.61) | no limit |" in text
    bound = {**audit()["epsilon_lower_bound"], "value": 0.0, "best_guesses": None, "correct": None, "num_canaries": 0}
    text, block = render_card(config(), plan(), record(), audit(epsilon_lower_bound=bound))
    assert block["guarantee"]
    assert "No canary of text was planted" in text


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"weights": hashes}
            for hashes in ({"adapter_model.safetensors": "ee" * 32}, {"model.safetensors": HASH}, {})
        ),
        {"claim": {"epsilon": 8.0, "delta": 1e-05, "unit": "patient_id"}},
        {"claim": {"epsilon": EPSILON, "delta": 1e-05, "unit": "example"}},
        *({"settings": settings} for settings in ({**SETTINGS, "alpha": 1e-9}, None)),
        {"canaries": {**audit()["canaries"], "commitment": "d1" * 32}},
    ],
)
def test_audit_of_other_weights_or_canaries_is_refused(changes: Json) -> None:
    with pytest.raises(ConfigError, match="dpllm audit again"):
        render_card(config(), plan(), record(), audit(**changes))
