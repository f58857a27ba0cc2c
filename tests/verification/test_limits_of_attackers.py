"""Figures in which processors differ are compared as coarsely as they differ, and no coarser."""

from __future__ import annotations

import pytest
from cards import plan

from dpllm.privacy.plan import Plan
from dpllm.verification import costs

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
    differing = costs.differing({**FRESH, key: FRESH[key] * times}, FRESH, TERMS, "limits")
    assert [one.field for one in differing] == [f"limits.{key}"] * wrong


@pytest.mark.parametrize(
    "stated", [{"auc": 0.56, "tpr_at_fpr_0.01": 0.019}, {**FRESH, "gdp_mu": None}, {**FRESH, "more": 1.0}]
)
def test_limits_that_are_missing_or_too_many_are_wrong(stated: dict[str, float]) -> None:
    assert costs.differing(stated, FRESH, TERMS, "limits")
