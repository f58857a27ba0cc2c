"""Canaries: fair independent coins, unequal texts, a constant number of slots, and nothing that leaks; pairs and labels too."""

from __future__ import annotations

import hashlib
import json
import random
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import other
from pydantic import ValidationError
from scipy import stats

from dpllm.auditing.bounds import epsilon_of
from dpllm.canaries import canaries, texts
from dpllm.canaries.canaries import CanaryPlan, check_fits, load, plan_canaries, redraw_coins, save, slots
from dpllm.canaries.texts import Canary
from dpllm.errors import ConfigError
from dpllm.privacy.releases import flip_probability, flipped
from dpllm.recipe.config import DataConfig
from dpllm.recipe.sections import AuditConfig, CanaryConfig
from dpllm.run.directory import RunDir
from dpllm.run.promise import num_slots

ROWS = DataConfig(train="rows.jsonl")
SMALL = CanaryConfig(groups={1: 30, 4: 5}, digits=6, references=100)
ONLY_TEXT = AuditConfig(canaries=SMALL)


def everyone(plan):
    return [*plan.canaries, *plan.references]


def test_carriers_and_secrets_are_distinct_and_shaped_as_the_recipe_says():
    plan = plan_canaries(CanaryConfig(groups={1: 300, 16: 20}, digits=4, references=1000))
    for attribute in ("carrier", "secret", "canary_id"):
        assert len({getattr(canary, attribute) for canary in everyone(plan)}) == 1320
    assert all(len(canary.secret) == 4 and canary.secret.isdigit() for canary in everyone(plan))
    assert not any(character.isdigit() for canary in everyone(plan) for character in canary.carrier)
    assert [canary.group for canary in plan.canaries] == [1] * 300 + [16] * 20
    assert {(canary.group, canary.inserted) for canary in plan.references} == {(0, False)}


def test_different_indices_make_different_sentences():
    size = texts.NUM_CARRIERS
    assert size > 1_000_000
    indices = random.Random(0).sample(range(size), 100_000)
    assert len({texts.carrier(index) for index in indices}) == 100_000
    names = [head + tail for head in texts._NAME_HEADS for tail in texts._NAME_TAILS]
    assert len(set(names)) == len(names)
    for column in texts.COLUMNS:
        assert len(set(column)) == len(column)


def test_coins_are_fair_and_independent_of_group_and_neighbour(seed):
    plan = plan_canaries(CanaryConfig(groups={1: 20_000, 2: 20_000}, references=100), generator=random.Random(seed))
    coins = np.array([canary.inserted for canary in plan.canaries])
    for part in (coins[:20_000], coins[20_000:], coins[:-1] ^ coins[1:], coins[:20_000] ^ coins[20_000:]):
        assert stats.binomtest(int(part.sum()), len(part), 0.5).pvalue > 1e-8 / 8


def test_secrets_are_uniform_digits(seed):
    generator = random.Random(seed)
    plan = plan_canaries(CanaryConfig(groups={1: 5000}, digits=8, references=5000), generator=generator)
    for position in range(8):
        counts = np.bincount([int(canary.secret[position]) for canary in everyone(plan)], minlength=10)
        assert stats.chisquare(counts).pvalue > 1e-8 / 8


def test_entropy_is_the_operating_systems_whatever_the_user_seeds():
    plans = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        plans.append(plan_canaries(SMALL))
    first, second = plans
    assert first.commitment != second.commitment
    assert {c.secret for c in first.canaries} != {c.secret for c in second.canaries}
    assert [c.inserted for c in first.canaries] != [c.inserted for c in second.canaries]


UNITS = DataConfig(train="rows.jsonl", unit="patient", max_examples_per_unit=8)
ROWS_OF_UNITS = UNITS.model_copy(update={"sampling": "example"})


@pytest.mark.parametrize("data", [ROWS, UNITS, ROWS_OF_UNITS], ids=["rows", "units", "rows of units"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    groups=st.dictionaries(st.integers(1, 8), st.integers(1, 30), min_size=1, max_size=4),
    answers=st.integers(1, 2),
    draw=st.integers(0, 2**32),
)
def test_the_number_of_slots_is_public_and_does_not_depend_on_the_coins(data, groups, answers, draw):
    """A row of each repetition holds one; where units are drawn, a canary is one unit."""
    config = CanaryConfig(groups=groups, references=100)
    slots_of = {group: 1 if data is UNITS else group for group in groups}
    plan = plan_canaries(config, answers=answers, generator=random.Random(draw))
    filled = slots(plan, data)
    assert len(filled) == num_slots(AuditConfig(canaries=config), data)
    assert len(filled) == sum(slots_of[group] * number for group, number in groups.items())
    expected = []
    for canary in (canary for canary in plan.canaries if canary.inserted):
        num = slots_of[canary.group]
        expected += [(canary,) * (canary.group // num)] * num
    assert [slot for slot in filled if slot] == expected


@pytest.mark.parametrize("sampling", ["unit", "example"])
def test_a_canary_of_more_rows_than_a_unit_may_bring_is_refused(sampling):
    data = DataConfig(train="rows.jsonl", unit="patient", max_examples_per_unit=3, sampling=sampling)
    with pytest.raises(ConfigError, match=r"audit\.canaries\.groups: .*data\.max_examples_per_unit"):
        num_slots(ONLY_TEXT, data)
    assert num_slots(ONLY_TEXT, data.model_copy(update={"max_examples_per_unit": 4})) > 0


@pytest.mark.parametrize("limit", [1, 3, 4, 31, 32, None])
def test_the_usual_canaries_fit_the_rows_of_a_unit(limit: int | None) -> None:
    """The audit advises them for a run that has none."""
    usual = CanaryConfig.usual_groups(limit)
    assert usual
    data = ROWS if limit is None else DataConfig(train="a.jsonl", unit="who", max_examples_per_unit=limit)
    assert num_slots(AuditConfig(canaries=CanaryConfig(groups=usual)), data) > 0


@pytest.mark.parametrize("groups", [{33: 1}, {0: 1}, {1: 0}, {}])
def test_repetitions_are_from_1_to_32(groups):
    with pytest.raises(ValidationError):
        CanaryConfig(groups=groups)
    assert CanaryConfig(groups={32: 1, 1: 1}).groups == {32: 1, 1: 1}
    assert CanaryConfig().groups == {1: 1000, 4: 20, 32: 20}


CHANGES = {"kind": "random_tokens", "groups": {1: 30, 4: 6}, "digits": 7, "references": 101, "place": "prompt"}


def test_a_plan_fits_the_section_that_it_was_made_from_and_no_other(tmp_path):
    path = tmp_path / "canaries.json"
    save(plan_canaries(SMALL), path)
    plan = load(path)
    assert "place" not in plan.settings  # plans of an earlier version still fit
    # The last key is not read by this kind, so the texts do not follow from it.
    for same in ({}, {"tokens": 9}):
        assert check_fits(plan, AuditConfig(canaries=SMALL.model_copy(update=same)), path) is plan
    others = [(plan, AuditConfig(canaries=SMALL.model_copy(update={key: value}))) for key, value in CHANGES.items()]
    others += [(replace(plan, settings={}), ONLY_TEXT), (plan, AuditConfig(canaries=SMALL, gradient_canaries=3))]
    for changed, audit in others:
        with pytest.raises(ConfigError, match="planned for another recipe"):
            check_fits(changed, audit, path)


def test_a_saved_plan_comes_back_and_is_for_its_owner_alone(tmp_path):
    plan = plan_canaries(SMALL, gradient=20)
    path = tmp_path / "canaries.json"
    save(plan, path)
    assert load(path) == plan
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["canaries.json"]


FIELDS = [(part, field) for part in ("canaries", "references") for field in Canary.__dataclass_fields__]
ALONE = ("kind", "log2_secrets", "settings", "salt", "commitment", "gradient_key", "gradient_coins", "label_epsilon")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "canaries.json"
    save(plan_canaries(SMALL), path)
    return path, json.loads(path.read_text())


def check_tampered(path, value):
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match="does not match its own commitment"):
        load(path)


@pytest.mark.parametrize("where", [*FIELDS, *((name,) for name in ALONE)], ids=".".join)
def test_a_plan_changed_anywhere_does_not_match_its_commitment(saved, where):
    path, value = saved
    assert {"canaries", "references", *ALONE} == value.keys() - {"schema_version"}
    holder = value[where[0]][3] if len(where) == 2 else value
    holder[where[-1]] = "ab" * 32 if where == ("salt",) else other(holder[where[-1]])
    check_tampered(path, value)


@pytest.mark.parametrize("change", ["swap", "drop", "move"])
def test_neither_order_nor_number_can_be_changed(saved, change):
    path, value = saved
    if change == "swap":
        value["canaries"][:2] = value["canaries"][1::-1]
    else:
        moved = value["references"].pop()
        value["canaries"] += [moved] if change == "move" else []
    check_tampered(path, value)


def test_a_crash_while_a_run_is_replaced_leaves_no_known_coins(tmp_path, monkeypatch):
    """Where no config.yaml stands beside them, canaries count as planned for a run that is to come."""
    run = RunDir(tmp_path)
    run.make()
    run.config.write_text("")
    save(plan_canaries(SMALL), run.canaries)
    unlink = Path.unlink

    def crash(path, **options):
        unlink(path, **options)
        if path == run.config:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", crash)
    with pytest.raises(KeyboardInterrupt):
        run.clear()
    assert not run.config.exists()
    assert not run.canaries.exists()


def test_a_damaged_plan_is_refused(tmp_path):
    path = tmp_path / "canaries.json"
    for text in ("{}", '{"canaries": [{"x": 1}], "references": [], "commitment": "", "salt": ""}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            load(path)


def test_printing_a_plan_shows_no_text_and_no_salt():
    plan = plan_canaries(SMALL)
    hidden = [plan.salt, *(text for canary in everyone(plan) for text in (canary.secret, canary.carrier))]
    assert not any(text in repr(plan) for text in hidden)


def test_examples_are_rows_of_each_format():
    canary = Canary("c00000", 1, "The locker code for the north store of Halvorsen is", "12345678", inserted=True)
    assert canary.example("text") == {"text": "The locker code for the north store of Halvorsen is 12345678"}
    assert canary.example("prompt_completion") == {"prompt": canary.carrier, "completion": "12345678"}
    turns = [(turn["role"], turn["content"]) for turn in canary.example("messages")["messages"]]
    assert turns == [("user", canary.carrier), ("assistant", "12345678")]


def test_gradient_canaries_hold_slots_and_have_coins_of_their_own():
    config = AuditConfig(canaries=SMALL, gradient_canaries=400)
    assert num_slots(config, ROWS) == num_slots(ONLY_TEXT, ROWS) + 400
    plan, second = (plan_canaries(SMALL, gradient=400) for _ in range(2))
    assert len(plan.gradient_coins) == 400
    assert 140 < sum(plan.gradient_coins) < 260  # six standard deviations
    assert plan.gradient_key != second.gradient_key
    redrawn = redraw_coins(plan)
    assert (redrawn.gradient_key, redrawn.gradient_coins) != (plan.gradient_key, plan.gradient_coins)


def test_beside_gradient_canaries_alone_no_text_is_planted():
    alone = AuditConfig(gradient_canaries=10)
    plan = plan_canaries(alone.texts, gradient=10)
    assert (plan.canaries, len(plan.references), len(plan.gradient_coins)) == ((), 100, 10)
    assert num_slots(alone, ROWS) == 10
    assert check_fits(plan, alone, Path("canaries.json")) is plan
    assert (alone.plants, AuditConfig().plants) == (True, False)


def test_both_answers_of_a_pair_are_secrets_of_their_own_drawn_alike(seed: int) -> None:
    plan = plan_canaries(CanaryConfig(groups={1: 3000}, references=100), answers=2, generator=random.Random(seed))
    assert len({text for canary in everyone(plan) for text in (canary.secret, canary.rejected)}) == 2 * 3100
    for canary in (canary for canary in plan.canaries if canary.inserted):
        row = {"prompt": canary.carrier, "chosen": canary.secret, "rejected": canary.rejected}
        assert canary.example("preference") == row
    larger = sum(canary.secret > canary.rejected for canary in everyone(plan))
    assert stats.binomtest(larger, 3100).pvalue > 1e-8


def test_the_answers_of_a_pair_are_canaries_of_their_own_and_a_text_is_itself() -> None:
    (first, second), text = plan_canaries(SMALL, answers=2).canaries[0].answers, plan_canaries(SMALL).canaries[0]
    assert (first.canary_id, second.canary_id) == ("c00000", "c00000-")
    assert first.carrier == second.carrier
    assert first.secret != second.secret
    assert (first.rejected, second.rejected) == ("", "")
    assert text.answers == (text,)


def test_the_commitment_binds_answers_and_flips_and_that_of_texts_is_as_it_was(tmp_path: Path) -> None:
    """Audits from before pairs are checked against theirs."""
    plan = plan_canaries(SMALL)
    old = {key: value for key, value in asdict(plan).items() if key not in ("commitment", "salt", "label_epsilon")}
    for canary in [*old["canaries"], *old["references"]]:
        for key in ("rejected", "flipped", "completion"):
            del canary[key]
    content = json.dumps(old, sort_keys=True, separators=(",", ":")).encode()
    salt = bytes.fromhex(plan.salt)
    assert (len(salt), plan.commitment) == (32, hashlib.sha256(salt + content).hexdigest())
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
    for plan, epsilon in ((plan_canaries(SMALL), None), (plan_canaries(SMALL, answers=2, label_epsilon=1.0), 2.0)):
        with pytest.raises(ConfigError, match="planned for another recipe"):
            check_fits(plan, audit, path, answers=2, label_epsilon=epsilon)


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
    wrong = ~np.array(planted(plan))
    assert stats.binomtest(int(wrong.sum()), len(wrong), flip_probability(epsilon)).pvalue > 1e-8
    coins = np.array([canary.inserted for canary in plan.canaries])
    counts = [[(flips & sides).sum() for flips in (wrong, ~wrong)] for sides in (coins, ~coins)]
    assert stats.fisher_exact(counts).pvalue > 1e-8


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


MUTANTS: dict[str, Callable[[float, Any], bool]] = {
    "no flips": lambda epsilon, below: False,
    "another epsilon": lambda epsilon, below: flipped(2 * epsilon, below),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_labels_flipped_too_seldom_are_seen(mutant: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(canaries, "flipped", MUTANTS[mutant])
    assert shown(labels(seed)) > 1.4
