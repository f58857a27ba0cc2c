"""What a card says of an audit, and which audits it does not take."""

import math

import pytest
from cards import EPSILON, HASH, SETTINGS, Json, audit, config, plan, record, render_card

from dpllm.errors import ConfigError
from dpllm.statement.audit_bounds import Claim


def test_audit_stands_beside_its_controls_and_limits() -> None:
    text, block = render_card(config(), plan(), record(), audit(audits_run=3))
    assert "| Verdict | consistent: " in text
    assert "no proof" in text
    assert "| Audits made | 3; " in text
    assert "random secrets of 8 digits" in text
    assert "does not tell the planted ones from the others" in text
    assert "The attack works where it should: AUC 0.97 on the canaries planted 16 times." in text
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
