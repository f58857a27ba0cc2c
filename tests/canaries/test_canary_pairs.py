"""Canary pairs: two answers of which nothing but a coin chooses, planted or left out; or a label that a coin is."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dpllm.auditing.bounds import epsilon_of
from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryPlan, check_fits, load, plan_canaries, redraw_coins, save, slots
from dpllm.canaries.texts import Canary
from dpllm.errors import ConfigError
from dpllm.privacy.releases import flip_probability
from dpllm.recipe.config import DataConfig
from dpllm.recipe.sections import AuditConfig, CanaryConfig

SMALL = CanaryConfig(groups={1: 30, 4: 5}, references=100)
ROWS = DataConfig(train="pairs.jsonl")


def test_both_answers_of_a_pair_are_secrets_of_their_own_drawn_alike(seed: int) -> None:
    plan = plan_canaries(CanaryConfig(groups={1: 3000}, references=100), answers=2, generator=random.Random(seed))
    everyone = [*plan.canaries, *plan.references]
    assert len({text for canary in everyone for text in (canary.secret, canary.rejected)}) == 2 * 3100
    assert all(
        one.example("preference") == {"prompt": one.carrier, **sides(one)} for one in plan.canaries if one.inserted
    )
    larger = sum(canary.secret > canary.rejected for canary in everyone)
    assert stats.binomtest(larger, len(everyone)).pvalue > 1e-8


def sides(canary: Canary) -> dict[str, str]:
    return {"chosen": canary.secret, "rejected": canary.rejected}


def test_the_answers_of_a_pair_are_canaries_of_their_own_and_a_text_is_itself() -> None:
    (first, second), text = plan_canaries(SMALL, answers=2).canaries[0].answers, plan_canaries(SMALL).canaries[0]
    assert (first.canary_id, second.canary_id) == ("c00000", "c00000-")
    assert first.carrier == second.carrier
    assert first.secret != second.secret
    assert (first.rejected, second.rejected) == ("", "")
    assert text.answers == (text,)


def test_a_pair_is_planted_where_its_coin_says_in() -> None:
    plan = plan_canaries(SMALL, answers=2)
    filled = slots(plan, ROWS)
    assert len(filled) == 30 + 4 * 5
    assert sum(map(bool, filled)) == sum(canary.group for canary in plan.canaries if canary.inserted)


def test_the_commitment_binds_answers_and_flips_and_that_of_texts_is_as_it_was(tmp_path: Path) -> None:
    """Audits from before pairs are checked against theirs."""
    plan = plan_canaries(SMALL)
    old = {key: value for key, value in asdict(plan).items() if key not in ("commitment", "salt", "label_epsilon")}
    old |= {
        part: [
            {k: v for k, v in canary.items() if k not in ("rejected", "flipped", "completion")} for canary in old[part]
        ]
        for part in ("canaries", "references")
    }
    content = json.dumps(old, sort_keys=True, separators=(",", ":")).encode()
    assert plan.commitment == hashlib.sha256(bytes.fromhex(plan.salt) + content).hexdigest()
    path = tmp_path / "canaries.json"
    path.write_text(json.dumps({**old, "commitment": plan.commitment, "salt": plan.salt}))
    assert load(path) == plan
    plan = plan_canaries(SMALL, answers=2, label_epsilon=1.0)
    for change in ({"rejected": "1"}, {"flipped": not plan.canaries[0].flipped}):
        save(replace(plan, canaries=(replace(plan.canaries[0], **change), *plan.canaries[1:])), path)
        with pytest.raises(ConfigError, match="does not match its own commitment"):
            load(path)
    save(plan, path)
    assert load(path) == plan


def test_texts_pairs_and_labels_are_no_canaries_of_each_other(tmp_path: Path) -> None:
    audit, path = AuditConfig(canaries=SMALL), tmp_path / "canaries.json"
    assert check_fits(plan_canaries(SMALL, answers=2), audit, path, answers=2)
    with pytest.raises(ConfigError, match="planned for another recipe"):
        check_fits(plan_canaries(SMALL), audit, path, answers=2)
    with pytest.raises(ConfigError, match="planned for another recipe"):
        check_fits(plan_canaries(SMALL, answers=2, label_epsilon=1.0), audit, path, answers=2, label_epsilon=2.0)


LABELS = CanaryConfig(groups={1: 2000}, references=100)


def labels(seed: int, epsilon: float = 1.0) -> CanaryPlan:
    return plan_canaries(LABELS, answers=2, label_epsilon=epsilon, generator=random.Random(seed))


def planted(plan: CanaryPlan) -> list[bool]:
    """Of each pair, whether the answer that its coin prefers is what trains."""
    shown = [canary.example("preference")["chosen"] for canary in plan.canaries]
    return [(text == canary.secret) == canary.inserted for text, canary in zip(shown, plan.canaries, strict=True)]


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_a_label_of_a_canary_is_flipped_as_every_label_is(epsilon: float, seed: int) -> None:
    plan = labels(seed, epsilon)
    assert all(slots(plan, ROWS))  # whatever the coin says
    assert not plan.references
    wrong = np.array(planted(plan)) == 0
    assert stats.binomtest(int(wrong.sum()), len(wrong), flip_probability(epsilon)).pvalue > 1e-8
    coins = np.array([canary.inserted for canary in plan.canaries])
    assert (
        stats.fisher_exact(
            [[(wrong & coins).sum(), (~wrong & coins).sum()], [(wrong & ~coins).sum(), (~wrong & ~coins).sum()]]
        ).pvalue
        > 1e-8
    )


def test_a_flip_is_drawn_once_and_anew_for_another_run(tmp_path: Path, seed: int) -> None:
    plan = labels(seed)
    save(plan, tmp_path / "canaries.json")
    assert planted(load(tmp_path / "canaries.json")) == planted(plan)
    redrawn = redraw_coins(plan, generator=random.Random(seed + 1))
    same = sum(a == b for a, b in zip(planted(redrawn), planted(plan), strict=True))
    share = flip_probability(1.0) ** 2 + (1 - flip_probability(1.0)) ** 2
    assert stats.binomtest(same, len(plan.canaries), share).pvalue > 1e-8


def shown(plan: CanaryPlan) -> float:
    """The bound of the audit's theorem for an attacker who sees every trained label and guesses all coins by them."""
    right, number = sum(not canary.flipped for canary in plan.canaries), len(plan.canaries)
    return epsilon_of(number, (number,), right, delta=0.0, alpha=0.05)


def test_whoever_sees_every_label_proves_nearly_its_epsilon_and_not_more(seed: int) -> None:
    bounds = [shown(labels(seed + number)) for number in range(20)]
    assert sum(value > 1.0 for value in bounds) <= 6  # of 20 at a level of 1/20, beyond it once in 10^4
    assert min(bounds) > 0.6


def no_flips(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(canaries, "flipped", lambda epsilon, below: False)


def other_epsilon(patch: pytest.MonkeyPatch) -> None:
    true = canaries.flipped
    patch.setattr(canaries, "flipped", lambda epsilon, below: true(2 * epsilon, below))


@pytest.mark.parametrize("mutant", [no_flips, other_epsilon])
def test_labels_flipped_less_often_than_promised_are_seen(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    mutant(monkeypatch)
    assert shown(labels(seed)) > 1.4
