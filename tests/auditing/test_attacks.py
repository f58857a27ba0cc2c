"""Attacks on tokens are what their formulas say, extraction is exact to the last sample, and the table reads back."""

import json
import math
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from scipy import stats
from score_tables import row, token_table

from dpllm.auditing import attacks, statistics
from dpllm.auditing.attacks import SCHEMES, TOKEN_ATTACKS, attempts, log_prob, sampled_extraction
from dpllm.auditing.table import TokenTable, read_tokens, sum_up, write_tokens
from dpllm.errors import ConfigError


def test_attacks_have_a_fixed_direction_and_extraction_counts_each_side():
    rows = [row("a", tuned=-5.0, base=-9.0), row("b", tuned=-6.0, base=-6.0)]
    assert attacks.ATTACKS["ratio"](rows) == pytest.approx([4.0, 0.0])
    assert attacks.ATTACKS["loss"](rows) == pytest.approx([-5.0, -6.0])
    assert attacks.base_loss(rows) == pytest.approx([-9.0, -6.0])
    rows = [row("a", tuned_greedy=True, base_greedy=True), row("b", tuned_greedy=True), row("c")]
    rows += [row("d", inserted=False, tuned_greedy=True), row("e", inserted=False)]
    expected = {"inserted": 3, "tuned": 2, "base": 1, "held_out": 2, "held_out_tuned": 1}
    assert attacks.greedy_extraction(rows) == expected


@pytest.mark.parametrize("left", [0.0, 0.4, 1.0])
def test_the_calibrated_score_takes_off_what_the_base_model_explains(left, seed):
    rng = np.random.default_rng([seed, 20])
    rows = []
    for index in range(3000):
        coin, base = bool(rng.random() < 0.5), rng.normal(-18, 3)
        rows.append(row(f"c{index}", 1, coin, left * base + rng.normal(coin, 1), base))
    slope = attacks.slope(rows)
    assert slope == pytest.approx(left, abs=0.05)
    inside, outside = attacks.members(rows), attacks.held_out(rows)
    areas = {
        "calibrated": statistics.auc(attacks.calibrated(inside, slope), attacks.calibrated(outside, slope)).value,
        **{name: statistics.auc(attack(inside), attack(outside)).value for name, attack in attacks.ATTACKS.items()},
    }
    assert areas["calibrated"] == pytest.approx(stats.norm.cdf(1 / math.sqrt(2)), abs=0.03)
    assert areas["calibrated"] > max(areas.values()) - 0.01


def test_the_slope_does_not_know_the_coins_and_is_that_of_the_ratio_without_anything_to_fit(seed):
    rng = np.random.default_rng([seed, 21])
    rows = [row(f"c{i}", 1, bool(rng.random() < 0.5), rng.normal(), rng.normal()) for i in range(50)]
    turned = [replace(one, inserted=not one.inserted) for one in rows]
    assert attacks.slope(rows) == attacks.slope(turned)
    assert attacks.slope([]) == 1.0
    assert attacks.slope([row("a", base=-3.0), row("b", base=-3.0, tuned=-1.0)]) == 1.0


def make_table(lengths: list[int], seed: int = 0, certain: bool = False) -> TokenTable:
    rng, count, size = np.random.default_rng(seed), sum(lengths), len(lengths)
    columns = {"secret_N": np.ones(count, dtype=bool), "word_N": np.arange(count)}
    for which in ("tuned", "base"):
        columns[f"{which}_log_prob_N"] = -rng.gamma(1.0, 2.0, count)
        columns[f"{which}_mean_N"] = -rng.gamma(2.0, 1.0, count)
        columns[f"{which}_variance_N"] = np.zeros(count) if certain else rng.gamma(2.0, 1.0, count)
        columns[f"{which}_argmax_N"] = rng.random(count) < 0.5
        kept = rng.random(count) < 0.8
        columns[f"{which}_top_k_log_prob_N"] = np.where(kept, columns[f"{which}_log_prob_N"] / 2, -np.inf)
    groups = tuple(index % 3 for index in range(size))
    coins = tuple(index % 2 == 0 if index % 3 else None for index in range(size))
    names, owner_N = tuple(f"c{index}" for index in range(size)), np.repeat(np.arange(size), lengths)
    return TokenTable(names, rng.integers(20, 90, size), owner_N, **columns, groups=groups, coins=coins)


def naive(name: str, table: TokenTable, sequence: int) -> float:
    """One sequence, with loops."""
    mine = [index for index, owner in enumerate(table.sequence_N) if owner == sequence]
    if name == "zlib":
        return float(sum(table.tuned_log_prob_N[i] for i in mine)) / int(table.zlib_bytes_S[sequence])
    assert name == "min_k_plus", f"{name} has no formula here to compare with"
    p, mu, var = table.tuned_log_prob_N, table.tuned_mean_N, table.tuned_variance_N
    values = [(p[i] - mu[i]) / math.sqrt(max(var[i], 1e-12)) for i in mine]
    few = math.ceil(0.2 * len(values))
    return float(sum(sorted(values)[:few]) / few)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6), seed=st.integers(0, 99), certain=st.booleans())
def test_every_attack_is_its_formula(lengths: list[int], seed: int, certain: bool) -> None:
    table = make_table(lengths, seed, certain)
    for name, attack in TOKEN_ATTACKS.items():
        result = attack(table)
        assert result.shape == (len(lengths),)
        wanted = [naive(name, table, sequence) for sequence in range(len(lengths))]
        np.testing.assert_allclose(result, wanted, rtol=1e-7, atol=1e-9, err_msg=name)


def test_the_table_reads_back_exactly_and_holds_no_text(tmp_path: Path) -> None:
    table = make_table([3, 1, 7], seed=3)
    path = tmp_path / "audit" / "tokens.parquet"
    write_tokens(table, path)
    again = read_tokens(path)
    for field in fields(TokenTable):
        assert np.array_equal(getattr(again, field.name), getattr(table, field.name)), field.name
    assert [entry.name for entry in path.parent.iterdir()] == ["tokens.parquet"]
    columns = parquet.read_table(path).schema
    assert {column.name for column in columns if str(column.type) not in ("double", "int64", "bool")} == {"canary_id"}


def make_rows(flags: str = "0101110", words: str = "0120121") -> TokenTable:
    """A row of three tokens and one of four, with the marks of secrets and the numbers of tokens."""
    marks = {"secret_N": np.array([flag == "1" for flag in flags]), "word_N": np.array([int(word) for word in words])}
    return replace(make_table([3, 4], seed=3), groups=(1, 0), coins=(True, None), **marks)


def test_the_secrets_of_a_table_are_its_marked_tokens_and_read_back(tmp_path: Path) -> None:
    table, path = make_rows(), tmp_path / "tokens.parquet"
    write_tokens(table, path)
    again = read_tokens(path)
    assert np.array_equal(again.secret_N, table.secret_N)
    assert np.array_equal(again.word_N, table.word_N)
    first, second = sum_up(again)
    assert first.tuned_log_prob == table.tuned_log_prob_N[1]
    assert second.base_log_prob == table.base_log_prob_N[3:6].sum()
    assert first.tuned_greedy == table.tuned_argmax_N[1]
    whole = attacks.whole_rows(table)[1]
    assert whole.base_log_prob == pytest.approx(table.base_log_prob_N[3:].sum())
    assert whole.tuned_greedy == second.tuned_greedy  # still of the secret
    assert sum_up(table.secrets()) == (first, second)


def test_what_a_row_has_above_the_same_words_elsewhere() -> None:
    table = make_rows(words="0120120")
    left = table.tuned_log_prob_N - table.tuned_log_prob_N.mean()
    own = [(0,), (1,), (2,), (0,), (1,), (2,), (0,)]
    behind = [(0, None), (1, 0), (2, 1), (0, None), (1, 0), (2, 1), (0, 2)]
    for kinds in (own, behind):
        left = [
            value - sum(x for x, other in zip(left, kinds, strict=True) if other == kind) / (kinds.count(kind) + 1)
            for value, kind in zip(left, kinds, strict=True)
        ]
    unexplained_S = attacks.unexplained(table, table.tuned_log_prob_N)
    assert unexplained_S == pytest.approx([sum(left[:3]), sum(left[3:])])
    rows = attacks.whole_rows(table)
    base = attacks.unexplained(table, table.base_log_prob_N)
    assert attacks.calibrated(rows, 0.5) == pytest.approx(unexplained_S - 0.5 * base)
    assert attacks.slope(rows) == pytest.approx(statistics.fit_slope(base, unexplained_S))


@pytest.mark.parametrize(
    ("flags", "words"),
    [("0000111", "0120121"), ("0110101", "0120121"), ("1110000", "0120121"), ("0101110", "0120129")],
    ids=["none", "two", "none of the second", "a number of no token"],
)
def test_a_sequence_has_one_secret_and_a_number_for_every_token(tmp_path: Path, flags: str, words: str) -> None:
    path = tmp_path / "tokens.parquet"
    write_tokens(make_rows(flags, words), path)
    with pytest.raises(ConfigError, match="damaged"):
        read_tokens(path)


@pytest.mark.parametrize("damage", ["missing", "cut", "text", "columns"])
def test_a_damaged_table_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "tokens.parquet"
    if damage != "missing":
        write_tokens(make_table([3, 2]), path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "text":
        path.write_text("tokens")
    elif damage == "columns":
        parquet.write_table(pyarrow.table({"canary_id": ["a"]}), path)
    with pytest.raises(ConfigError, match="token table"):
        read_tokens(path)


def table_from(tuned, base, rows=(), **columns):
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
    table = table_from([[-1.0, -2.0], [-0.5]], [[-3.0, -4.0], [-5.0]], **top_k)
    assert log_prob(table, "tuned").tolist() == [-3.0, -0.5]
    assert log_prob(table, "base").tolist() == [-7.0, -5.0]
    assert log_prob(table, "tuned", "top_k").tolist() == [-math.inf, -0.25]
    assert log_prob(table, "base", "top_k").tolist() == [-2.0, -math.inf]
    assert log_prob(table_from([[1e-5]], [[-1.0]]), "tuned").tolist() == [0.0]  # rounding above a probability of one


SECRETS = [
    # tuned, base, and what each row is: two inserted, one held out, one reference, one of another group
    ([math.log(0.5), 0.0], [-9.0, -9.0], row("c0", 1, True)),
    ([math.log(0.01), 0.0], [-9.0, -9.0], row("c1", 1, True)),
    ([-9.0, -9.0], [-9.0, -9.0], row("c2", 1, False)),
    ([math.log(1e-3), 0.0], [-9.0, -9.0], row("c3", 0, None)),
    ([0.0, 0.0], [-1.0, 0.0], row("c4", 8, True)),
]


def test_counts_stand_beside_their_controls():
    extraction = sampled_extraction(table_from(*zip(*SECRETS, strict=True)))
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
    table = table_from(*zip(*SECRETS, strict=True), tuned_top_k_log_prob=[[-np.inf, 0.0]] * 5)
    extraction = sampled_extraction(table)
    assert extraction["1"]["top_k"]["never"] == {"inserted": 2, "base": 0, "held_out": 2}
    assert extraction["1"]["top_k"]["median_attempts"]["inserted"] is None
    assert extraction["1"]["top_k"]["discoverable"]["0.1"]["10000"]["inserted"] == 0
    assert json.loads(json.dumps(extraction, allow_nan=False)) == extraction
    result = sampled_extraction(table_from(*zip(*SECRETS[:2], strict=True)))["1"]
    assert result["canaries"]["held_out"] == 0
    assert result["all_tokens"]["median_attempts"]["held_out"] is None


def test_the_order_of_rows_does_not_matter_and_the_grid_is_the_stated_one():
    extraction = sampled_extraction(table_from(*zip(*SECRETS, strict=True)))
    assert extraction == sampled_extraction(table_from(*zip(*SECRETS[::-1], strict=True)))
    for scheme in SCHEMES:
        counts = extraction["1"][scheme]["discoverable"]
        assert (list(counts), list(counts["0.1"])) == (["0.1", "0.5", "0.9"], ["1", "10", "100", "1000", "10000"])
