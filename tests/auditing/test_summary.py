"""The summary of an audit: everything that reports read, and a verdict that says no more than was shown."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from published import opened
from scipy import stats
from score_tables import row, token_table, tokens_of

from dpllm.auditing import attacks
from dpllm.auditing.statistics import words_control
from dpllm.auditing.summary import AuditContext, _method, group_test, judge, levels, summarise
from dpllm.auditing.table import TokenTable, read_tokens
from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryConfig
from dpllm.errors import ConfigError
from dpllm.files import read_json
from dpllm.privacy.plan import AuditSettings
from dpllm.recipe.sections import default_ways
from dpllm.statement import privacy_record
from dpllm.statement.audit import Controls, parse_audit
from dpllm.statement.audit_bounds import Claim, GradientAudit, OneRunBound
from dpllm.verification import check_audits
from dpllm.verification.values import Wrong

MODEL_CARDS = Path(__file__).parents[2] / "model_cards"
CLAIM = Claim(epsilon=4.0, delta=1e-5, unit="example")
SIGNIFICANCE = 1e-8
DEFAULT = {name: tuple(ways) for name, ways in default_ways(200).items()}


def controls(*, base=False, words=False, positive="AUC 0.99 on the canaries planted 32 times"):
    seen = {"auc": 0.5, "interval": [0.4, 0.6], "succeeds": words}
    return Controls.pick({"base_separates": base, "words": seen, "positive": positive, "twin": None, "level": 0.001})


def summarised(table, claim, *, alpha=0.05, falling=(), falling_in=(), **arguments):
    """As audit.json holds it."""
    ways = {"falling": falling, "falling_in": falling_in}
    tokens = table if isinstance(table, TokenTable) else tokens_of(table)
    return summarise(tokens, claim, AuditSettings.pick({"alpha": alpha, "version": 2, **ways}), **arguments).to_json()


def make_table(rng, lift, groups=((1, 200), (4, 20)), references=300):
    """A table in which every insertion raises the secret's log-probability by about ``lift``."""
    rows = []
    for group, count in groups:
        for index in range(count):
            inserted, base = bool(rng.random() < 0.5), rng.normal(-18, 2)
            tuned = base + rng.normal(0, 0.5) + (lift * group if inserted else 0.0)
            rows.append(row(f"c{group}-{index}", group, inserted, tuned, base, tuned_greedy=tuned > -3))
    for index in range(references):
        base = rng.normal(-18, 2)
        rows.append(row(f"r{index}", 0, None, base + rng.normal(0, 0.5), base))
    return rows


def bound(value, ceiling=3.7, num_canaries=200, alpha=0.05):
    settings = {"value": value, "alpha": alpha, "delta": 1e-5, "falling": (10, 100), "falling_in": ()}
    settings |= {"best_guesses": 100, "best_side": "falling", "correct": 90, "weight": 400}
    return OneRunBound(**settings, num_canaries=num_canaries, ceiling=ceiling)


@pytest.mark.parametrize(
    ("claim", "result", "num_inserted", "word"),
    [
        (CLAIM, bound(4.1, ceiling=5.0), 100, "falsified"), (CLAIM, bound(4.0, ceiling=5.0), 100, "consistent"),
        (CLAIM, bound(0.0), 100, "consistent"), (CLAIM, bound(0.0, ceiling=0.99), 100, "inconclusive"),
        (CLAIM, bound(0.0), 0, "inconclusive"), (CLAIM, bound(0.0), 200, "inconclusive"),
        (CLAIM, bound(0.0, ceiling=0.0, num_canaries=0), 0, "inconclusive"), (None, bound(3.0), 100, "no_claim"),
    ],
)  # fmt: skip
def test_the_verdict_says_no_more_than_was_shown(claim, result, num_inserted, word):
    said, reason = judge(claim, result, {}, num_inserted, controls())
    assert said == word
    assert "private" not in said + reason
    assert reason.endswith(".")


def test_nothing_found_means_nothing_without_a_positive_control():
    said, reason = judge(CLAIM, bound(0.0), {}, 100, controls(positive=None))
    assert said == "inconclusive"
    assert "seen to work nowhere" in reason
    # What was found needs no proof that anything can be found.
    assert judge(CLAIM, bound(5.0), {}, 100, controls(positive=None))[0] == "falsified"


@pytest.mark.parametrize(
    ("value", "ceiling", "positive", "word"),
    [
        (0.4, 2.4, "gradients", "consistent"),
        (0.4, 0.99, "gradients", "inconclusive"),
        (0.4, 2.4, None, "inconclusive"),
        (4.1, 5.0, None, "falsified"),
    ],
)
def test_without_canaries_of_text_gradient_canaries_decide_about_the_mechanism(value, ceiling, positive, word):
    seen = {"canaries": 100, "inserted": 50, "steps": 9, "epsilon_lower_bound": value, "alpha": 0.02, "delta": 1e-5}
    seen |= {"ceiling": ceiling, "auc": 0.6, "noise_refuted": False, "drawn_refuted": False, "noise": 0.7, "drawn": 1.0}
    seen |= {"noise_planned": 0.7, "drawn_planned": 1.0}
    seen |= dict.fromkeys(("auc_interval", "noise_interval", "drawn_standard_error"))
    nothing = bound(0.0, ceiling=0.0, num_canaries=0)
    said, reason = judge(CLAIM, nothing, {}, 0, controls(positive=positive), GradientAudit.pick(seen))
    assert said == word
    assert said == "falsified" or "nothing was asked of the weights" in reason


@pytest.mark.parametrize("failed", ["base", "words"])
@pytest.mark.parametrize("value", [0.0, 9.0])
def test_coins_that_were_none_give_no_verdict(failed, value):
    said, reason = judge(CLAIM, bound(value), {}, 100, controls(**{failed: True}))
    assert said == "inconclusive"
    assert "cannot be trusted" in reason


@pytest.mark.parametrize(
    ("secret", "words"), [([1, 1, 1], "the secret's tokens"), ([0, 1, 1], "every token that entered")]
)
def test_a_bound_says_which_tokens_were_scored(secret, words):
    """Of secrets in prompts those that no loss had."""
    table = token_table([[-1.0, -2.0, -3.0]], [[-1.0, -2.0, -3.0]], secret_N=np.array(secret, dtype=bool))
    assert f"of {words}" in _method(attacks.scoring(table, []))


def test_carriers_whose_words_tell_the_coin_give_no_verdict(seed):
    """What enters the score must not be distinguishable by words alone, and that is the carrier as well as the secret."""
    rng = np.random.default_rng([seed, 11])
    plan = canaries.plan_canaries(CanaryConfig(groups={1: 200}, references=100), generator=random.Random(seed))
    short = [replace(canary, carrier=f"{canary.carrier.split(' of ')[0]} is") for canary in plan.canaries]
    told = [other if other.inserted else canary for other, canary in zip(short, plan.canaries, strict=True)]
    for planted, word in ((plan.canaries, "consistent"), (told, "inconclusive")):
        context = AuditContext(words=words_control(planted))
        report = summarised(make_table(rng, 1.0), CLAIM, falling=[40, 120], context=context)
        assert report["verdict"] == word, report["verdict_reason"]
        assert ("sees the words of carrier and secret" in report["verdict_reason"]) == (word == "inconclusive")


def test_a_repeated_group_refutes_what_the_claim_allows_for_it_and_no_less():
    tests = {8: group_test(Claim(0.1, 1e-6, "example").of(8), bound(0.79))}
    assert judge(Claim(0.1, 1e-6, "example"), bound(0.0), tests, 100, controls())[0] == "consistent"
    tests = {8: group_test(Claim(0.1, 1e-6, "example").of(8), bound(0.81, alpha=0.025))}
    said, reason = judge(Claim(0.1, 1e-6, "example"), bound(0.0), tests, 100, controls())
    assert said == "falsified"
    assert "planted 8 times, at confidence 0.975" in reason


def test_alpha_is_divided_among_the_groups_that_can_refute_anything():
    sizes = {1: 200, 4: 20, 32: 20}
    assert levels(sizes, Claim(4.0, 1e-5, "example"), 0.05) == {1: 0.05}
    assert levels(sizes, Claim(0.01, 1e-6, "example"), 0.05) == {1: 0.05 / 3, 4: 0.05 / 3, 32: 0.05 / 3}
    assert levels(sizes, Claim(4.0, 1e-5, "patient_id"), 0.05) == {1: 0.05}
    assert levels({**sizes, 32: 100}, Claim(2.0, 1e-5, "patient_id"), 0.05) == {1: 0.025, 32: 0.025}


def test_a_true_claim_is_falsified_no_more_often_than_alpha_by_all_groups_together(seed, full):
    """Randomised response is what uses up a claim; k copies of a canary are under k times the epsilon."""
    rng, claim, audits, false = np.random.default_rng([seed, 8]), Claim(0.02, 0.0, "example"), 2000 if full else 100, 0
    sizes = {1: 200, 4: 60, 32: 60}
    assert set(levels(sizes, claim, 0.05)) == {1, 4, 32}
    for _ in range(audits):
        rows = [row(f"r{index}", 0, None, 0.0, 0.0) for index in range(2)]
        for group, size in sizes.items():
            coins = rng.random(size) < 0.5
            truthful = rng.random(size) < 1 / (1 + np.exp(-group * claim.epsilon))
            answers = np.where(truthful, coins, ~coins) + rng.uniform(0, 0.1, size)
            named = enumerate(zip(coins, answers, strict=True))
            rows += [row(f"c{group}-{i}", group, bool(coin), answer, 0.0) for i, (coin, answer) in named]
        summary = summarised(rows, claim, **DEFAULT)
        false += summary["verdict"] == "falsified"
    assert stats.binomtest(false, audits, 0.05, alternative="greater").pvalue > 0.001


@pytest.mark.parametrize("order", ["members first", "members last", "heavy ties"])
def test_scores_of_whole_rows_falsify_a_true_claim_no_more_often_than_alpha(order, seed, full):
    """The row's score reads what all other rows hold, and that is no more than the mechanism released."""
    rng, claim, audits, false = np.random.default_rng([seed, 12]), Claim(1.0, 0.0, "example"), 2000 if full else 60, 0
    for _ in range(audits):
        coins = rng.random(200) < 0.5
        if order != "heavy ties":
            coins = np.sort(coins) if order == "members last" else np.sort(coins)[::-1]
        truthful = rng.random(200) < 1 / (1 + np.exp(-claim.epsilon))
        noise = 0.0 if order == "heavy ties" else 0.2
        table = rows_of_tokens(rng, np.where(truthful, coins, ~coins), coins, noise=noise)
        summary = summarised(table, claim, falling=[40, 120], falling_in=[30])
        false += summary["verdict"] == "falsified"
    assert stats.binomtest(false, audits, 0.05, alternative="greater").pvalue > 0.001


def rows_of_tokens(rng, answers, coins, *, noise, references=20, tokens=8):
    """Rows whose tokens got likelier where the answer says so, as far as their words let them."""
    size = len(answers) + references
    word_N, sequence_N = rng.integers(0, 30, size * tokens), np.repeat(np.arange(size), tokens)
    lifts = np.append(answers, np.zeros(references))[sequence_N]
    base_N = np.round(-6 - np.sin(word_N), 1)
    tuned_N = base_N + np.cos(word_N) + 0.5 * lifts + rng.uniform(-noise, noise, len(word_N))
    whose = {"groups": (1,) * len(answers) + (0,) * references, "coins": (*map(bool, coins), *([None] * references))}
    secret_N = np.tile(np.arange(tokens) == tokens - 1, size)
    scored = tuned_N.reshape(size, tokens), base_N.reshape(size, tokens)
    return token_table(*scored, **whose, secret_N=secret_N, word_N=word_N)


def test_repeated_groups_find_a_broken_claim_that_the_once_planted_cannot_show(seed):
    rng = np.random.default_rng([seed, 9])
    rows = make_table(rng, 0.05, groups=((1, 100), (32, 60)))
    report = summarised(rows, Claim(0.02, 1e-7, "example"), alpha=0.05, falling=(40, 100))
    assert report["epsilon_lower_bound"]["value"] <= 0.02
    assert report["repeated"]["32"]["test"]["refuted"]
    assert report["verdict"] == "falsified"


def test_a_base_model_that_tells_the_coins_is_noticed(seed):
    rng = np.random.default_rng([seed, 10])
    rows = [row(f"r{i}", 0, None, rng.normal(), rng.normal()) for i in range(100)]
    for index in range(200):
        coin = bool(rng.random() < 0.5)
        rows.append(row(f"c{index}", 1, coin, rng.normal(9 * coin), rng.normal(2 * coin)))
    report = summarised(rows, CLAIM, alpha=0.05, falling=(40,))
    assert report["controls"]["base_separates"]
    assert report["verdict"] == "inconclusive"


def test_the_limit_of_single_units_is_that_of_the_whole_mechanism_where_it_is_lower():
    rows, people = Claim(2.0, 1e-5, "example"), Claim(2.0, 1e-5, "patient_id")
    pair, whole = rows.limits(1, None), {"auc": 0.6, "tpr_at_fpr_0.01": 1.0, "gdp_mu": None}
    assert rows.limits(1, whole) == {**pair, "auc": 0.6}
    assert rows.limits(4, whole) == rows.limits(4, None)  # of four units the mechanism's curve for one says nothing
    assert people.limits(4, whole) == {**pair, "auc": 0.6}


def test_a_summary_finds_what_was_memorised_and_only_that(seed):
    rng = np.random.default_rng([seed, 5])
    nothing = summarised(make_table(rng, 0.0), CLAIM, alpha=0.05, falling=(10, 50, 100))
    assert nothing["epsilon_lower_bound"]["value"] < 2
    assert nothing["exposure"]["1"]["p_value"] > SIGNIFICANCE
    much = summarised(make_table(rng, 8.0), Claim(1.0, 1e-5, "example"), alpha=0.05, falling=(10, 50, 100))
    assert much["attacks"]["ratio"]["auc"] > 0.99
    assert 0.3 < much["attacks"]["ratio"]["base_control_auc"] < 0.7
    assert much["exposure"]["1"]["mean"] > 5 > 3 > much["exposure"]["1"]["base_mean"]
    assert much["exposure"]["1"]["p_value"] < 1e-9
    assert much["extraction"]["4"]["tuned"] > 0 == much["extraction"]["4"]["base"]
    assert much["verdict"] == "falsified"


def test_repeated_canaries_do_not_speak_about_the_claim(seed):
    rng = np.random.default_rng([seed, 6])
    report = summarised(make_table(rng, 5.0, groups=((4, 300),)), CLAIM, alpha=0.05, falling=(10, 50))
    assert report["attacks"]["ratio"]["group"] == 4
    assert report["epsilon_lower_bound"]["num_canaries"] == 0
    assert report["verdict"] == "inconclusive"


def test_without_a_claim_the_bound_states_its_delta(seed):
    report = summarised(make_table(np.random.default_rng([seed, 7]), 3.0), None, alpha=0.05, falling=(10, 50))
    assert (report["claim"], report["attacks"]["ratio"]["limits"], report["verdict"]) == (None, None, "no_claim")
    assert report["epsilon_lower_bound"]["delta"] == 1e-5
    assert report["epsilon_lower_bound"]["value"] > 0


def test_groups_of_which_none_or_all_were_inserted_are_summarised():
    rng = np.random.default_rng(0)
    for coin in (True, False):
        rows = [row(f"c{i}", 1, coin, rng.normal(), rng.normal()) for i in range(20)]
        rows += [row(f"r{i}", 0, None, rng.normal(), rng.normal()) for i in range(100)]
        report = summarised(rows, CLAIM, alpha=0.05, falling=(10, 20))
        json.dumps(report, allow_nan=False)
        assert report["verdict"] == "inconclusive"
        assert (report["exposure"]["1"]["mean"] is None) == (not coin)


def test_a_table_without_references_is_refused():
    with pytest.raises(ConfigError, match="no references"):
        summarised([row("a")], CLAIM, alpha=0.05, falling=(10,))


def checked(folder, report):
    """The checks of an audit that is published in ``folder`` and shown on its card."""
    (folder / "audit" / "audit.json").write_text(json.dumps(report))
    audit = parse_audit(report, "audit.json")
    block = read_json(folder / "privacy.json")
    block["audit"] = audit.to_json()
    block["plan"]["audit"] = audit.settings.to_json()  # as if fixed before training
    release = opened(folder, block, hashes=dict(report["weights"]))
    return {check.name: check.status for check in check_audits.check(release)}


def test_a_bound_by_falling_weights_is_computed_again(tmp_path):
    card = shutil.copytree(MODEL_CARDS / "clinic-epsilon-8" / "export", tmp_path / "card")
    report, block = read_json(card / "audit" / "audit.json"), read_json(card / "privacy.json")
    tokens = read_tokens(card / "audit" / "tokens.parquet")
    stated = privacy_record.read(block)
    gradient = check_audits.gradient(card / "audit", stated, parse_audit(report, "audit.json"))
    known = report["controls"]
    context = AuditContext(stated.plan.limits.to_json(), known["words"], known["twin"], gradient=gradient)
    fresh = summarised(tokens, Claim(**report["claim"]), context=context, **DEFAULT)
    settings = {"alpha": 0.05, **{name: list(ways) for name, ways in DEFAULT.items()}}
    report = {**report, **fresh, "settings": {**report["settings"], **settings}}
    bound = report["epsilon_lower_bound"]
    assert "fall with the rank" in bound["method"]
    assert checked(card, report)["audit: statistics"] == "verified"
    for name, wrong in (("weight", bound["weight"] + 1), ("falling", [57])):
        with pytest.raises(Wrong, match="does not follow from the scores"):
            checked(card, {**report, "epsilon_lower_bound": {**bound, name: wrong}})
