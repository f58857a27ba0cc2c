"""The guarantee in prose says what the numbers say, no more, and names what it takes for granted."""

import re
from typing import Any

from dpllm.statement.formatting import bound_or_infinite as up
from dpllm.statement.formatting import epsilon_in_prose as statement


def answer(**changes: Any) -> dict[str, Any]:
    sizes = {"dataset_size": 5000, "batch_size": 100, "sampling_rate": 0.02, "num_steps": 150, "noise_multiplier": 0.8}
    limits = {"tpr_at_fpr_0.001": 0.0061848, "tpr_at_fpr_0.01": 0.0367772, "auc": 0.626541, "gdp_mu": 0.93}
    stated = {
        "epsilon": 2.96331,
        "delta": 1e-5,
        "accountant": "pld",
        "relation": "zero_out",
        "group_size": 1,
        "bands": 1,
    }
    return {**sizes, **stated, "limits": limits, "shuffled": {"epsilon": 11.02781, "epochs": 3}, **changes}


def test_every_bound_is_rounded_up() -> None:
    text = statement(answer())
    assert "(2.964, 1e-05)-differentially private" in text
    assert "e^2.964" in text
    assert "11.03" in text
    for share, true in ((0.619, 0.61848), (3.68, 3.67772)):
        assert f"{share}%" in text
        assert share >= true
    assert "at most 0.6266 (0.5 is guessing)" in text
    assert up(2.0000001) == "2.001"
    assert up(None) == "infinite"


def test_the_assumptions_are_named() -> None:
    text = statement(answer())
    for assumption in ("Poisson sampling", "clipped to norm C", "0.8 C", "own coin", "public", "N = 5000", "150 steps"):
        assert assumption in text
    for gap in ("base model", "evaluation data", "hyper-parameters", "further runs", "floating-point"):
        assert gap in text
    assert "shuffling instead" in text
    assert "3 epochs" in text
    assert "1 epoch " in statement(answer(shuffled={"epsilon": 5.0, "epochs": 1}))


def test_the_neighbouring_relation_stands_in_words() -> None:
    other = statement(answer(relation="add_or_remove_one"))
    assert "replaced by nothing while N stays the same" in statement(answer())
    assert "one has one unit more than the other" in other
    assert ("declared in advance" in other) > ("declared in advance" in statement(answer()))


def test_groups_are_said_to_be_such() -> None:
    group = statement(answer(group_size=4))
    assert "up to 4 units together" in group
    assert "4 of them together" in group
    assert "4" not in re.sub(r"2\.964|0\.6266", "", statement(answer()))


def test_without_a_finite_epsilon_nothing_is_claimed() -> None:
    text = statement(answer(epsilon=None))
    assert "no guarantee" in text
    assert "differentially private" not in text
    assert "infinite" in statement(answer(shuffled={"epsilon": None, "epochs": 3}))


def test_groups_of_banded_noise_are_said_to_take_turns() -> None:
    said = statement(answer(bands=8))
    assert "banded noise of 8 bands" in said
    assert "Each unit has one of 8 groups" in said
