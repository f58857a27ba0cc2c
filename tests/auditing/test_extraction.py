"""Extraction from probabilities: exact to the last sample, and every count beside its control."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from score_tables import row, token_table

from dpllm.auditing.attacks import SCHEMES, attempts, log_prob, sampled_extraction


def make_table(tuned, base, rows=(), **columns):
    """A table from lists of log-probabilities, and of other columns, one list for each sequence."""
    whose = {"groups": tuple(one.group for one in rows), "coins": tuple(one.inserted for one in rows)} if rows else {}
    columns = {f"{name}_N": np.concatenate(values) for name, values in columns.items()}
    return token_table(tuned, base, [one.canary_id for one in rows] or None, **whose, **columns)


@settings(derandomize=True, deadline=None)
@given(
    st.fractions(Fraction(1, 400), Fraction(399, 400)),
    st.sampled_from([Fraction(1, 10), Fraction(1, 2), Fraction(9, 10)]),
)
def test_attempts_are_the_smallest_number_that_reaches_the_probability(p_z, p):
    n = int(attempts(math.log(p_z), float(p)))
    assert 1 - (1 - p_z) ** n >= p
    assert n == 1 or 1 - (1 - p_z) ** (n - 1) < p


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 60), st.sampled_from([0.1, 0.5, 0.9]))
def test_a_number_of_attempts_that_is_just_enough_is_not_rounded_up(n, p):
    """p_z is chosen so that n is exact: float64 must not make n + 1 of it."""
    log_p = math.log(-math.expm1(math.log1p(-p) / n))
    assert attempts(log_p, p) == n


def test_attempts_lose_nothing_at_the_ends():
    num_attempts = attempts([math.log(1e-300), math.log1p(-1e-16), 0.0, -np.inf, -1e6, -690.0], 0.5)
    assert num_attempts[0] == pytest.approx(math.log(2) * 1e300, rel=1e-12)
    assert num_attempts[1:5].tolist() == [1.0, 1.0, math.inf, math.inf]
    assert num_attempts[5] == pytest.approx(math.log(2) * math.exp(690), rel=1e-12)
    # One sample gives p_z = 1 - 1e-16 even where p is as near to 1 as float64 can be.
    assert attempts(math.log1p(-1e-16), 1 - 2**-52) == 1
    # 1 - p_z is above 2^-52, but 1 - exp(log p_z) is not.
    assert attempts(-2.4e-16, 1 - 2**-52) == 2
    # Both formulas meet at their seams.
    for seam in (-math.log(2), -40.0):
        low, high = attempts([seam - 1e-9, seam + 1e-9], 0.9)
        assert low == pytest.approx(high, rel=1e-8)


@pytest.mark.parametrize(("log_p", "p"), [(-1.0, 0.0), (-1.0, 1.0), (0.1, 0.5), (math.nan, 0.5), (-1.0, math.nan)])
def test_values_out_of_range_are_refused(log_p, p):
    with pytest.raises(ValueError, match="attempts needs"):
        attempts(log_p, p)


def test_a_sequence_is_the_product_of_its_tokens():
    top_k = {"tuned_top_k_log_prob": [[-0.5, -np.inf], [-0.25]], "base_top_k_log_prob": [[-1.0, -1.0], [-np.inf]]}
    table = make_table([[-1.0, -2.0], [-0.5]], [[-3.0, -4.0], [-5.0]], **top_k)
    assert log_prob(table, "tuned").tolist() == [-3.0, -0.5]
    assert log_prob(table, "base").tolist() == [-7.0, -5.0]
    assert log_prob(table, "tuned", "top_k").tolist() == [-math.inf, -0.25]
    assert log_prob(table, "base", "top_k").tolist() == [-2.0, -math.inf]
    assert log_prob(make_table([[1e-5]], [[-1.0]]), "tuned").tolist() == [0.0]  # rounding above a probability of one


SECRETS = [
    # tuned, base, and what each row is: two inserted, one held out, one reference, one of another group
    ([math.log(0.5), 0.0], [-9.0, -9.0], row("c0", 1, True)),
    ([math.log(0.01), 0.0], [-9.0, -9.0], row("c1", 1, True)),
    ([-9.0, -9.0], [-9.0, -9.0], row("c2", 1, False)),
    ([math.log(1e-3), 0.0], [-9.0, -9.0], row("c3", 0, None)),
    ([0.0, 0.0], [-1.0, 0.0], row("c4", 8, True)),
]


def test_counts_stand_beside_their_controls():
    extraction = sampled_extraction(make_table(*zip(*SECRETS, strict=True)))
    assert list(extraction) == ["1", "8"]
    once = extraction["1"]
    assert once["canaries"] == {"inserted": 2, "base": 2, "held_out": 2}
    plain = once["all_tokens"]
    half = {n: counts["inserted"] for n, counts in plain["discoverable"]["0.5"].items()}
    assert half == {"1": 1, "10": 1, "100": 2, "1000": 2, "10000": 2}
    assert plain["discoverable"]["0.9"]["1"] == {"inserted": 0, "base": 0, "held_out": 0}
    assert plain["discoverable"]["0.5"]["1000"] == {"inserted": 2, "base": 0, "held_out": 1}
    assert plain["median_attempts"]["inserted"] == 69
    assert plain["median_attempts"]["held_out"] == math.ceil(math.log(2) * math.exp(18) * (1 - 1e-12))
    assert extraction["8"]["all_tokens"]["median_attempts"] == {"inserted": 1, "base": 2, "held_out": 693}


def test_what_can_never_be_drawn_and_a_side_without_canaries_are_counted():
    table = make_table(*zip(*SECRETS, strict=True), tuned_top_k_log_prob=[[-np.inf, 0.0]] * 5)
    extraction = sampled_extraction(table)
    assert extraction["1"]["top_k"]["never"] == {"inserted": 2, "base": 0, "held_out": 2}
    assert extraction["1"]["top_k"]["median_attempts"]["inserted"] is None
    assert extraction["1"]["top_k"]["discoverable"]["0.1"]["10000"]["inserted"] == 0
    assert json.loads(json.dumps(extraction, allow_nan=False)) == extraction
    result = sampled_extraction(make_table(*zip(*SECRETS[:2], strict=True)))["1"]
    assert result["canaries"]["held_out"] == 0
    assert result["all_tokens"]["median_attempts"]["held_out"] is None


def test_the_order_of_rows_does_not_matter_and_the_grid_is_the_stated_one():
    extraction = sampled_extraction(make_table(*zip(*SECRETS, strict=True)))
    assert extraction == sampled_extraction(make_table(*zip(*SECRETS[::-1], strict=True)))
    for scheme in SCHEMES:
        counts = extraction["1"][scheme]["discoverable"]
        assert (list(counts), list(counts["0.1"])) == (["0.1", "0.5", "0.9"], ["1", "10", "100", "1000", "10000"])
