"""Epsilon while a run goes on: an upper bound that costs next to nothing.

Comes in: a Plan and a number of steps. Goes out: a number, or words for a progress bar. Must not know the data.
"""

from __future__ import annotations

from dpllm.privacy import accounting
from dpllm.privacy.plan import Plan

INTERVAL = 5e-3  # of PLD's discretisation: ten times faster than the stated epsilon's, and larger rather than smaller


class EpsilonSpent:
    """An upper bound on the epsilon of the steps so far.

    Guarantee:
        At least the epsilon of the steps executed, and at most the Plan's. It is computed at fifths of the run, each when
        its first step is done, and so rises in five stairs.
    """

    def __init__(self, plan: Plan | None) -> None:
        """``plan`` is None for a run without differential privacy, which has no epsilon."""
        self._plan, self._known = plan, (0, 0.0)

    def __call__(self, step: int) -> float | None:
        """The bound after ``step`` steps, counted from 1; 0 before the first."""
        if self._plan is None:
            return None
        schedule = self._plan.schedule
        if step > self._known[0]:
            fifth = -(-schedule.num_steps // 5)
            grid = min(schedule.num_steps, -(-step // fifth) * fifth)
            event, relation = self._plan.event_after(grid), self._plan.neighbouring_relation
            value = accounting.epsilon(event, self._plan.delta, relation, interval=INTERVAL)
            self._known = (grid, min(value, self._plan.epsilon))
        return self._known[1]

    def words(self, step: int) -> str:
        """The same for a progress bar."""
        value = self(step)
        if self._plan is None or value is None:
            return "training, no differential privacy"
        return f"training, epsilon spent <= {value:.2f} of {self._plan.epsilon:.2f}"
