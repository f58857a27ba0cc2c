"""What a card says beside one epsilon: other deltas, an attacker's limits, and accountants that do not know the event."""

from __future__ import annotations

import re

from cards import config, plan, record, render_card

LIMITS = {"tpr_at_fpr_0.001": 0.00618481, "tpr_at_fpr_0.01": 0.0367772, "auc": 0.6265405, "gdp_mu": 0.933221}
CURVE = [[1e-4, 2.31541], [1e-5, 2.96331], [1e-30, None]]


def text(**changes: object) -> str:
    return " ".join(render_card(config(), plan(**changes), record(), None)[0].split())


def test_the_limits_of_the_whole_profile_and_other_deltas_are_stated_rounded_up() -> None:
    card = text(limits=LIMITS, curve=CURVE)
    assert "that of μ = 0.9333" in card
    assert "| ε at other δ | 2.316 at 0.0001, 2.964 at 1e-05, not certified at 1e-30 |" in card
    assert "μ" not in text(limits={**LIMITS, "gdp_mu": None})
    assert "at other δ" not in text(curve=[])


def test_the_one_membership_limit_is_the_tightest_that_is_known() -> None:
    """That of one (epsilon, delta) is 18%: the whole mechanism says more, and both would be read as a contradiction."""
    card = text(limits=LIMITS)
    said = re.findall(r"at most ([\d.]+%)", card)
    assert said == ["3.7%", "3.7%", "0.7%"]  # the first screen; the figure in words, at 1% and 0.1%
    assert "3.7%" not in text()


def test_a_card_without_a_second_accountant_says_so() -> None:
    card = text(cross_check=None)
    assert "| Second accountant | none supports this event |" in card
    assert "none supports" not in text()


def test_a_card_of_rows_drawn_one_by_one_says_what_was_drawn() -> None:
    card = text(sampling="example")
    assert "N = 888 rows, public" in card
    assert "the gradient of each row is clipped" in card
    assert "64 rows expected" in card
    assert "for all rows of a unit together, by a mixture of Gaussians" in card
    units = text()
    assert "N = 888 units, public" in units
    assert "mixture of Gaussians" not in units
