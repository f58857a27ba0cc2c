"""Canary pairs in an audit: a score is the margin of implicit rewards, of the very tokens that trained."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from score_tables import row, tokens_of

from dpllm.auditing import attacks
from dpllm.auditing.summary import AuditContext, summarise
from dpllm.auditing.table import TokenTable, read_tokens, sum_up, write_tokens
from dpllm.canaries.canaries import plan_canaries
from dpllm.canaries.texts import encode_secret
from dpllm.errors import ConfigError
from dpllm.recipe.sections import AuditConfig, CanaryConfig
from dpllm.statement.audit_bounds import Claim
from dpllm.text.layouts import Row
from dpllm.text.tokens import encode_units


def of_pairs(seed: int, pairs: int = 40) -> TokenTable:
    """Tokens of pairs, the rejected answers behind the chosen ones, each with a token before its secret."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 6, 2 * pairs)
    owner_N = np.repeat(np.arange(2 * pairs), lengths)
    scored = {
        field.name: -rng.gamma(1.0, 2.0, len(owner_N)) for field in fields(TokenTable) if "_log_prob_N" in field.name
    }
    scored |= {f"{which}_mean_N": -np.ones(len(owner_N)) for which in ("tuned", "base")}
    scored |= {f"{which}_variance_N": np.ones(len(owner_N)) for which in ("tuned", "base")}
    scored |= {f"{which}_argmax_N": rng.random(len(owner_N)) < 0.5 for which in ("tuned", "base")}
    names = [f"{'c' if number < pairs // 2 else 'r'}{number:05d}" for number in range(pairs)]
    scored |= {"secret_N": np.append(False, owner_N[1:] == owner_N[:-1]), "word_N": np.arange(len(owner_N))}
    groups = (*[1] * (pairs // 2), *[0] * (pairs - pairs // 2)) * 2
    coins = tuple(number % 3 == 0 if number < pairs // 2 else None for number in range(pairs)) * 2
    both = tuple(names + [f"{name}-" for name in names])
    return TokenTable(both, np.full(2 * pairs, 20), owner_N, **scored, groups=groups, coins=coins)


def test_a_score_is_the_difference_of_both_answers_gains(seed: int) -> None:
    table = of_pairs(seed)
    gain_N = table.tuned_log_prob_N - table.base_log_prob_N
    for rows, counted_N in ((attacks.whole_rows(table), np.ones_like(table.secret_N)), (sum_up(table), table.secret_N)):
        gain_S = np.array([gain_N[(table.sequence_N == s) & counted_N].sum() for s in range(80)])
        assert np.allclose(attacks.ratio(rows), gain_S[:40] - gain_S[40:], rtol=1e-12)
    assert [row.canary_id for row in sum_up(table)] == list(table.canary_ids[:40])


def test_a_table_of_pairs_reads_back_and_half_a_pair_is_none(tmp_path: Path, seed: int) -> None:
    table = of_pairs(seed)
    write_tokens(table, tmp_path / "tokens.parquet")
    assert sum_up(read_tokens(tmp_path / "tokens.parquet")) == sum_up(table)
    torn = (
        replace(table, canary_ids=(*table.canary_ids[:-1], "x")),
        replace(table, canary_ids=("x", *table.canary_ids[1:])),
        replace(table, coins=(not table.coins[0], *table.coins[1:])),
        replace(table, groups=(4, *table.groups[1:])),
    )
    for item in torn:
        with pytest.raises(ConfigError, match="half a preference pair"):
            sum_up(item)


@pytest.mark.parametrize("template", [None, "Q: {prompt}\nA: {completion}"])
def test_what_is_scored_is_what_trains(template: str | None) -> None:
    tokenizer, settings = tiny.tokenizer(), tiny.reads(200, template=template)
    for canary in plan_canaries(CanaryConfig(groups={1: 30}), answers=2).canaries:
        canary = replace(canary, inserted=True)
        (unit,) = encode_units([[Row(canary.example("preference"))]], "preference", tokenizer, settings)
        scored = [encode_secret(answer, "preference", tokenizer, settings)[0] for answer in canary.answers]
        assert [(item.input_ids, item.loss_mask) for item in scored] == [
            (item.input_ids, item.loss_mask) for item in unit.sequences
        ]


def test_a_label_audit_compares_each_group_with_its_own_other_answers() -> None:
    """A mutant takes the pairs of all groups: one that trained eight times is so low that an idle group seems remembered."""
    above = 0
    for seed in range(20):
        rng, rows = np.random.default_rng(seed), []
        for number in range(400):
            group, coin, noise = (1 if number < 200 else 16), bool(rng.random() < 0.5), rng.normal()
            gain = noise + (0.0 if group == 1 else 10.0 * (coin - 0.5))
            rows.append(row(f"c{number:05d}", group, coin, gain, 0.0))
        settings = AuditConfig(canaries=CanaryConfig(groups={1: 200, 16: 200})).fixed()
        summary = summarise(tokens_of(rows), Claim(1.0, 0.0, "label"), settings, AuditContext(own_references=True))
        above += summary.attacks["ratio"].auc_interval[0] > 0.5  # type: ignore[index]
        assert summary.repeated["16"].attacks["ratio"].auc > 0.99  # type: ignore[operator]
        assert summary.exposure["1"].held_out_mean is None
    assert above <= 4  # of 20, at 1/40 each
