"""Canaries: fair independent coins, unequal texts, a constant number of slots, and nothing that leaks."""

from __future__ import annotations

import json
import random
import stat
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.audit import canaries
from dpllm.audit.canaries import Canary, load, num_slots, plan_canaries, save, slots
from dpllm.config import CanaryConfig
from dpllm.errors import ConfigError

SMALL = CanaryConfig(groups={1: 30, 4: 5}, digits=6, references=100)


def everyone(plan):
    return [*plan.canaries, *plan.references]


def test_carriers_and_secrets_are_distinct_and_shaped_as_the_recipe_says():
    plan = plan_canaries(CanaryConfig(groups={1: 300, 16: 20}, digits=4, references=1000))
    assert len({canary.carrier for canary in everyone(plan)}) == 1320
    assert len({canary.secret for canary in everyone(plan)}) == 1320
    assert len({canary.canary_id for canary in everyone(plan)}) == 1320
    assert all(len(canary.secret) == 4 and canary.secret.isdigit() for canary in everyone(plan))
    assert not any(character.isdigit() for canary in everyone(plan) for character in canary.carrier)
    assert [canary.group for canary in plan.canaries] == [1] * 300 + [16] * 20
    assert {(canary.group, canary.inserted) for canary in plan.references} == {(0, False)}


def test_different_indices_make_different_sentences():
    size = canaries._grammar_size()
    assert size > 1_000_000
    indices = random.Random(0).sample(range(size), 100_000)
    assert len({canaries._carrier(index) for index in indices}) == 100_000
    names = [head + tail for head in canaries._NAME_HEADS for tail in canaries._NAME_TAILS]
    assert len(set(names)) == len(names)
    for column in canaries._COLUMNS:
        assert len(set(column)) == len(column)


def test_coins_are_fair_and_independent_of_group_and_neighbour(seed):
    plan = plan_canaries(CanaryConfig(groups={1: 20_000, 2: 20_000}, references=100), generator=random.Random(seed))
    coins = np.array([canary.inserted for canary in plan.canaries])
    for part in (coins[:20_000], coins[20_000:], coins[:-1] ^ coins[1:], coins[:20_000] ^ coins[20_000:]):
        assert stats.binomtest(int(part.sum()), len(part), 0.5).pvalue > 1e-8 / 8


def test_secrets_are_uniform_digits_and_candidates_are_like_references(seed):
    generator = random.Random(seed)
    plan = plan_canaries(CanaryConfig(groups={1: 5000}, digits=8, references=5000), generator=generator)
    for place in range(8):
        counts = [
            np.bincount([int(c.secret[place]) for c in part], minlength=10) for part in (plan.canaries, plan.references)
        ]
        assert stats.chisquare(counts[0]).pvalue > 1e-8 / 8
        assert stats.chi2_contingency(counts).pvalue > 1e-8 / 8


def test_entropy_is_the_operating_systems_whatever_the_user_seeds():
    plans = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        plans.append(plan_canaries(SMALL))
    assert plans[0].commitment != plans[1].commitment
    assert {c.secret for c in plans[0].canaries} != {c.secret for c in plans[1].canaries}
    assert [c.inserted for c in plans[0].canaries] != [c.inserted for c in plans[1].canaries]


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.integers(1, 20), st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 2**32))
def test_the_number_of_slots_is_public_and_does_not_depend_on_the_coins(groups, entropy):
    config = CanaryConfig(groups=groups, references=100)
    plan = plan_canaries(config, generator=random.Random(entropy))
    filled = slots(plan)
    assert len(filled) == num_slots(config) == sum(k * n for k, n in groups.items())
    for canary in plan.canaries:
        held = sum(slot is not None and slot.canary_id == canary.canary_id for slot in filled)
        assert held == (canary.group if canary.inserted else 0)


def test_references_hold_no_slot():
    plan = plan_canaries(SMALL)
    assert not {slot.canary_id for slot in slots(plan) if slot} & {canary.canary_id for canary in plan.references}


def test_a_saved_plan_comes_back_and_is_for_its_owner_alone(tmp_path):
    plan = plan_canaries(SMALL)
    path = tmp_path / "canaries.json"
    save(plan, path)
    assert load(path) == plan
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["canaries.json"]


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("inserted", lambda value: not value),
        ("secret", lambda value: value[::-1] + "0"),
        ("group", lambda value: value + 1),
    ],
)
def test_a_plan_changed_afterwards_does_not_match_its_commitment(tmp_path, key, change):
    path = tmp_path / "canaries.json"
    save(plan_canaries(SMALL), path)
    value = json.loads(path.read_text())
    value["canaries"][3][key] = change(value["canaries"][3][key])
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match="does not match its own commitment"):
        load(path)


def test_a_damaged_plan_is_refused(tmp_path):
    path = tmp_path / "canaries.json"
    for text in ("{}", '{"canaries": [{"x": 1}], "references": [], "commitment": "", "salt": ""}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            load(path)


def test_the_commitment_hides_the_plan_behind_its_salt():
    plan = plan_canaries(SMALL)
    assert len(bytes.fromhex(plan.salt)) == 32
    other = canaries._commit(plan.canaries, plan.references, "00" * 32)
    assert other != plan.commitment == canaries._commit(plan.canaries, plan.references, plan.salt)


def test_printing_a_plan_shows_no_text_and_no_salt():
    plan = plan_canaries(SMALL)
    shown = repr(plan)
    assert plan.salt not in shown
    assert not any(canary.secret in shown or canary.carrier in shown for canary in everyone(plan))


def test_examples_are_rows_of_each_format():
    canary = Canary("c00000", 1, "The locker code for the north store of Halvorsen is", "12345678", inserted=True)
    assert canary.example("text") == {"text": "The locker code for the north store of Halvorsen is 12345678"}
    assert canary.example("prompt_completion") == {"prompt": canary.carrier, "completion": "12345678"}
    user, assistant = canary.example("messages")["messages"]
    assert (user["role"], user["content"]) == ("user", canary.carrier)
    assert (assistant["role"], assistant["content"]) == ("assistant", "12345678")
    with pytest.raises(ConfigError, match=r"set data\.format"):
        canary.example("auto")


def test_more_canaries_than_secrets_are_refused():
    with pytest.raises(ConfigError, match=r"raise audit\.canaries\.digits"):
        plan_canaries(CanaryConfig(groups={1: 9_950}, digits=4, references=100))


def test_planning_and_statistics_do_not_import_torch():
    code = "import sys, dpllm.audit.canaries, dpllm.audit.summary, dpllm.audit.figure; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
