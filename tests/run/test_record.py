"""Held-out figures leave where weights and rows allow it, and nowhere else."""

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models as tm

from dpllm.recipe.config import RunConfig
from dpllm.run.promise import Decision
from dpllm.run.record import INTERRUPTED, grown, may_publish_cost, may_publish_figures, may_publish_weights


def config(public: bool, eval_public: bool, privacy: dict[str, Any]) -> RunConfig:
    return tm.recipe(data={"eval": "b.jsonl", "public": public, "eval_public": eval_public}, privacy=privacy)


@pytest.mark.parametrize("eval_public", [True, False])
@pytest.mark.parametrize(
    ("public", "privacy", "released"),
    [
        (False, {}, True),
        (True, {}, True),
        (False, {"insecure_seed": 1}, False),
        (True, {"insecure_seed": 1}, True),
        (False, {"enabled": False}, False),
        (True, {"enabled": False}, True),
    ],
)
def test_samples_and_figures_of_public_rows_are_private_where_the_weights_are(
    public: bool, eval_public: bool, privacy: dict[str, Any], released: bool
) -> None:
    """They are computed through weights that saw private rows without a guarantee."""
    asked = config(public, eval_public, privacy)
    run: Any = SimpleNamespace(config=asked, decision=Decision(asked))
    assert may_publish_weights(run) is released
    assert may_publish_figures(run) is (released and eval_public)


@pytest.mark.parametrize(
    ("public", "eval_public", "evaluation", "released"),
    [
        (True, True, "b.jsonl", True),
        (True, False, None, True),
        (True, False, "b.jsonl", False),
        (False, True, "b.jsonl", False),
    ],
)
def test_time_and_memory_are_told_of_public_rows_alone(
    public: bool, eval_public: bool, evaluation: str | None, released: bool
) -> None:
    asked = config(public, eval_public, {})
    asked = asked.model_copy(update={"data": asked.data.model_copy(update={"eval": evaluation})})
    assert may_publish_cost(asked) is released


def test_deviations_of_a_resumed_run_only_grow() -> None:
    """An attempt that was interrupted may have shown what the one after it, with another recipe, does not."""
    assert grown(["two", "new"], ["one", "two", INTERRUPTED]) == ["two", "new", "one"]
    assert grown(["two", INTERRUPTED], [INTERRUPTED]) == ["two", INTERRUPTED]
