"""Every figure that a comparison shows.

Comes in: sides. Goes out: their privacy statements, and what was measured beside these with its intervals, for the base model and
each run; and all of it as one JSON value. Must not read any file or round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from dpllm.auditing.attacks import ATTACKS
from dpllm.auditing.summary import PRIMARY_ATTACK
from dpllm.comparison.compared_runs import Side
from dpllm.errors import DpllmError
from dpllm.files import as_json
from dpllm.privacy import accounting
from dpllm.recipe import names
from dpllm.statement.fields import Json, Number, Record
from dpllm.statement.privacy_record import Attack, Audit, Extraction

# Intervals cover the choice of evaluation examples or canaries, and not the randomness of training: another run of the same
# recipe may lie outside.
CONFIDENCE = 0.95
RESAMPLES = 2000
_AT_ONCE = 4_000_000  # numbers of one block of resamples


class Measure(NamedTuple):
    """How a held-out figure is shown, on every page and picture."""

    label: str
    decimals: int | None  # None: four significant digits, at most two decimals
    factor: float = 1.0  # 100 for a share that is shown in percent
    panel: tuple[str, str, str] | None = None  # title, unit and format in a picture; None: it has none


UTILITY = {
    "loss": Measure("Held-out loss (nats per token)", 3, panel=("Held-out loss", "nats per target token", "{:.2f}")),
    "perplexity": Measure("Held-out perplexity", None),
    "accuracy": Measure("Next token right (%)", 1, 100.0),
    "reward_accuracy": Measure("Chosen answer rewarded more (%)", 1, 100.0, ("Reward accuracy", "%", "{:.1f}")),
    "reward_margin": Measure("Margin of rewards", 3),
    "bleu": Measure("BLEU", 2, panel=("BLEU", "", "{:.1f}")),
}
_BOUND = {"value", "ceiling", "alpha", "delta"}
_ATTACK = {"group", "auc", "auc_interval", "tpr_at_1_percent_fpr", "tpr_at_1_percent_fpr_interval"}
_EXPOSURE = {"mean", "null_mean", "base_mean", "inserted"}
_EXTRACTION = {"inserted", "tuned", "base"}


class Figure(Record):
    """What was measured, with its 95% interval; None: not known."""

    value: Number | None
    interval: tuple[Number | None, Number | None] | None = None
    signature: str | None = None
    """How another library computed it."""


Utility = Mapping[str, Figure]
"""By the names of ``UTILITY``."""


@dataclass(frozen=True)
class Together:
    """What several runs come to, and whether they were fixed as one tuning group."""

    runs: int
    epsilon: float
    delta: float
    fixed_together: bool


@dataclass(frozen=True)
class Figures:
    """What a comparison shows: of the base model what was measured of it, of each run its statement and likewise.

    Attributes:
        differences: Other settings: dotted key -> a value for each run, or none where all have the same.
    """

    sides: Sequence[Side]
    base: Utility
    utility: Sequence[Utility]
    together: Together | None
    differences: Mapping[str, Sequence[Any]]
    public: bool

    @property
    def scored(self) -> Json | None:
        """How texts were written and scored, of how many prompts; None where none were."""
        keys = ("protocol", "num_tokens", "prompts", "references")
        return next(({key: side.tasks[key] for key in keys} for side in self.sides if side.tasks), None)

    @property
    def left_out(self) -> list[str]:
        """What may not be published, in sentences."""
        return [line for side in self.sides for line in side.left_out]

    def to_json(self) -> Json:
        """As comparison.json holds it."""
        runs = zip(self.sides, self.utility, strict=True)
        value = {
            "public": self.public,
            "confidence": CONFIDENCE,
            "base": {"name": self.sides[0].record.model.name_or_path, "utility": _measured(self.base)},
            "scored": self.scored,
            "runs": [_run(side, _measured(utility)) for side, utility in runs],
            "together": asdict(self.together) if self.together else None,
            "differences": {
                key: {side.name: one for side, one in zip(self.sides, row, strict=True)}
                for key, row in self.differences.items()
            },
            "left_out": self.left_out,
        }
        return dict(as_json(names.without_paths(value) if self.public else value))


def figures(sides: Sequence[Side], differences: Mapping[str, Sequence[Any]], *, public: bool) -> Figures:
    """The figures of a comparison, of what ``compared_runs.read`` and ``compared_runs.differences`` found."""
    # Of the base model, which is the same for all: from whichever run has it, figures by example first.
    found = [_utility(side, "before", "base") for side in sides]
    known = {measure: [one[measure] for one in found if measure in one] for measure in UTILITY}
    base = {name: max(some, key=lambda one: one.interval is not None) for name, some in known.items() if some}
    utility = [_utility(side, "after", "tuned") for side in sides]
    return Figures(sides, base, utility, together(sides), differences, public)


def shown_attacks(audit: Audit) -> dict[str, Attack]:
    """The attacks of an audit that are compared, the one that counts first."""
    return {name: audit.attacks[name] for name in (PRIMARY_ATTACK, *ATTACKS) if name in audit.attacks}


def extracted(seen: Extraction) -> Figure:
    """Share of the planted secrets that were extracted, with Clopper and Pearson's interval; None of nothing."""
    if not seen.inserted:
        return Figure(value=None)
    from scipy import stats

    limits = stats.binomtest(seen.tuned, seen.inserted).proportion_ci(CONFIDENCE, method="exact")
    return Figure(value=seen.tuned / seen.inserted, interval=(float(limits.low), float(limits.high)))


def cost(side: Side) -> Json:
    """What a run took; the seconds of a step include evaluation, checkpoints and setting up."""
    steps, seconds = side.record.steps_taken, side.record.duration_seconds
    return {
        "steps": steps,
        "seconds": seconds,
        "seconds_per_step": seconds / steps if steps and seconds is not None else None,
        "peak_memory_bytes": side.record.peak_memory_bytes,
    }


def _run(side: Side, utility: Json) -> Json:
    statement, total = side.statement, side.statement.composed
    privacy: Json = {"enabled": side.private, "guarantee": statement.guarantee, "reason": side.no_guarantee}
    if statement.terms is not None:
        # What a run without a guarantee was planned for is no epsilon of it.
        epsilon = "epsilon" if statement.guarantee else "planned_epsilon"
        privacy |= {epsilon: statement.terms.epsilon, "delta": statement.terms.delta}
    if total is not None:
        privacy["ledger"] = {
            "epsilon": total.spent_epsilon,
            "delta": total.delta,
            "budget": total.budget.epsilon if total.budget else None,
            "group": total.group.to_json() if total.group else None,
        }
    return {
        "name": side.name,
        "status": side.record.status,
        "privacy": privacy,
        "utility": utility,
        "leakage": _leakage(statement.audit) if statement.audit is not None else {},
        "cost": {**cost(side), "hardware": side.record.hardware},
    }


def _measured(utility: Utility) -> Json:
    return {name: {"interval": None, **figure.to_json()} for name, figure in utility.items()}


def _leakage(audit: Audit) -> Json:
    return {
        "verdict": audit.verdict,
        "epsilon_lower_bound": audit.epsilon_lower_bound.model_dump(include=_BOUND),
        "attacks": {name: seen.model_dump(include=_ATTACK) for name, seen in shown_attacks(audit).items()},
        "exposure": {group: seen.model_dump(include=_EXPOSURE) for group, seen in audit.exposure.items()},
        "extraction": {
            group: {**seen.model_dump(include=_EXTRACTION), "share": share.value, "interval": share.interval}
            for group, seen in audit.extraction.items()
            for share in [extracted(seen)]
        },
    }


def _utility(side: Side, moment: str, which: str) -> Utility:
    """Held-out figures: by example where they were computed from the exported weights, else as the run recorded them."""
    recorded = {name: side.evaluation.get(f"eval_{name}_{moment}") for name in UTILITY}
    found = {name: Figure(value=value) for name, value in recorded.items() if value is not None}
    if examples := (side.held_out or {}).get(which):
        tokens = examples["tokens"]
        for name, column in (("loss", examples["loss"]), ("accuracy", examples["correct"])):
            found[name] = Figure(value=sum(column) / sum(tokens), interval=ratio(column, tokens))
    if loss := found.get("loss"):
        limits = loss.interval and (_exp(loss.interval[0]), _exp(loss.interval[1]))
        found["perplexity"] = Figure(value=_exp(loss.value), interval=limits)
    for name, scores in ((side.tasks or {}).get(which) or {}).items():
        found[name] = Figure.pick(scores)
    return found


def _exp(value: float | None) -> float | None:
    return math.exp(value) if value is not None and value < 700 else None


def together(sides: Sequence[Side]) -> Together | None:
    """What all compared runs with a guarantee come to: a report about several releases tells of all of them.

    Returns:
        None for fewer than two runs, or where they are not about the same unit and relation.

    Guarantee:
        Composed by PLD, which holds where the runs were fixed before the first of them, as those of a group are.
    """
    promised = [side.statement for side in sides if side.statement.guarantee]
    terms = [statement.terms for statement in promised]
    if len(terms) < 2 or len({(one.unit, one.neighbouring_relation) for one in terms}) > 1:
        return None
    delta = max(one.delta for one in terms)
    try:
        whole = accounting.compose([one.event for one in terms])
        epsilon = accounting.stated(whole, delta, terms[0].neighbouring_relation)[0]
    except DpllmError:  # no accountant knows all of them
        return None
    groups = {one.composed.group.name if one.composed and one.composed.group else None for one in promised}
    return Together(len(terms), epsilon, delta, len(groups) == 1 and None not in groups)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float] | None:
    """Percentile bootstrap of sum(numerators) / sum(denominators) over examples, which are drawn whole.

    Args:
        numerators: One for each example, such as its loss in nats.
        denominators: Likewise, >= 0, such as its number of target tokens.

    Returns:
        Low and high; None for fewer than two examples. The resampling is seeded, so that the same figures give the same
        interval. In simulations of 95% intervals it covers the truth in 85% at 8 examples, 92% at 30 and 95% at 200.

    References:
        Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3.
    """
    # A legend of shapes: E examples, B resamples of one block.
    above_E, below_E = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    count = len(above_E)
    if count < 2 or not below_E.sum() > 0:
        return None
    generator = np.random.default_rng(0)
    found: list[np.ndarray] = []
    block = max(1, _AT_ONCE // count)
    for start in range(0, RESAMPLES, block):
        drawn_BE = generator.integers(0, count, size=(min(block, RESAMPLES - start), count))
        above_B, below_B = above_E[drawn_BE].sum(axis=1), below_E[drawn_BE].sum(axis=1)
        found.append(above_B[below_B > 0] / below_B[below_B > 0])
    low, high = np.quantile(np.concatenate(found), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
