"""What ``dpllm plan`` prints: rows of text from the values of planning.

Comes in: a decision, a footprint. Goes out: tables. Must not see data, and must not import torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dpllm.errors import ConfigError
from dpllm.privacy import banded
from dpllm.privacy.plan import RELATION_IN_WORDS, Plan, noise_multiplier_for
from dpllm.privacy.schedule import Schedule, group_rate
from dpllm.recipe.config import RunConfig
from dpllm.recipe.derived import learning_rate_of
from dpllm.run.promise import Decision

if TYPE_CHECKING:
    from rich.table import Table

    from dpllm.forecast.footprint import Footprint

QUANTILE = 0.999
LIMITS = {
    "tpr_at_fpr_0.01": "TPR at 1% FPR",
    "tpr_at_fpr_0.001": "TPR at 0.1% FPR",
    "auc": "AUC",
    "gdp_mu": "mu of Gaussian DP",
}


def plan_table(seen: Decision, title: str) -> Table:
    """Everything of a decision that could be computed."""
    rows = {"REFUSED": "this run would not start; the reasons are below"} if seen.refusals else {}
    rows |= _promise(seen.plan) if seen.plan else {}
    rows |= {"beware": seen.lowered} if seen.lowered else {}
    schedule, plan = seen.schedule, seen.plan
    if schedule:
        batch, most = schedule.expected_batch_size, largest_batch(schedule)
        counted = "rows" if plan and plan.sampling == "example" else "units"
        rows |= {
            "public size N": f"{schedule.dataset_size} {counted}, of which {schedule.canary_slots} are canary slots",
            "sampling rate q": f"{schedule.sampling_rate:.6f}: each joins each step by its own coin"
            + (", when it is its group's turn" if plan and plan.coefficients else ""),
            "steps T": str(schedule.num_steps),
            "logical batch": f"B = {batch} {counted} expected, at most {most} in 99.9% of the steps",
        }
    elif seen.subject is not None:
        rows["public size"] = f"{seen.subject.num_units} without canary slots"
    if plan:
        rows["clipping"] = f"{plan.clipping}, C = {plan.max_grad_norm:g}"
        rows["noise multiplier sigma"] = f"{plan.noise_multiplier:g}"
        if plan.coefficients:
            rows["banded noise"] = _banded(seen.config, plan)
        rows["ledger"] = str(seen.ledger or "no ledger there yet: nothing is spent, and no budget is set")
    if seen.subject and seen.subject.reads:
        rows["data"] = seen.subject.reads
        rows["first example" if seen.config.data.public else "an example"] = seen.subject.example
    return _two_columns(title, rows)


def _banded(config: RunConfig, plan: Plan) -> str:
    bands, rate = plan.bands, group_rate(plan.schedule, plan.bands)
    turns = (
        f"{bands} groups take turns, at rate {rate:.6f}; {8 * (bands - 1)} bytes of earlier noise per trained parameter"
    )
    target, relation = min(plan.epsilon, plan.target_epsilon), plan.neighbouring_relation
    try:
        alone = noise_multiplier_for(target, plan.delta, plan.schedule, relation, rough=True)
    except ConfigError:  # no independent noise that is considered keeps the promise
        return f"{bands} bands; {turns}"
    rate_T = banded.rates(learning_rate_of(config.train), plan.schedule.num_steps)
    effect = banded.effect(plan.coefficients, rate_T, plan.noise_multiplier, alone)
    return (
        f"{bands} bands: {effect.last_iterate:.3f} of the noise that independent noise would leave in the last weights; noise "
        f"of one step {effect.one_step:.3g} times as large, and so is the learning rate for adamw; {turns}"
    )


def _promise(plan: Plan) -> dict[str, str]:
    beside = ", ".join(f"{name} {_number(value)}" for name, value in plan.accountants.items())
    unit = "example: one row"
    if plan.max_examples_per_unit is not None:
        how = "drawn together" if plan.sampling == "unit" else "drawn one by one"
        unit = f"user-level: column {plan.unit}, at most {plan.max_examples_per_unit} rows of each, {how}"
    known = plan.limits.to_json()
    limits = [f"{words} {value:.3g}" for name, words in LIMITS.items() if (value := known[name]) is not None]
    return {
        "epsilon": f"{plan.epsilon:.4f} (target {plan.target_epsilon:g})",
        "delta": f"{plan.delta:g} (1/N is {1 / plan.schedule.dataset_size:.2g})",
        "by accountant": f"{beside} (stated: {plan.accountant.name} {plan.accountant.version})",
        "privacy unit": unit,
        "neighbouring relation": f"{plan.neighbouring_relation}: {RELATION_IN_WORDS[plan.neighbouring_relation]}",
        "limits on an attacker": "membership inference, at most: " + ", ".join(limits)
        if limits
        else "none can be certified",
    }


def footprint_tables(needs: Footprint) -> list[Table | str]:
    """What trains, and what memory a step takes."""
    from dpllm.model.adapters import trainable_text

    rows = {}
    if needs.memory:
        parts = ", ".join(
            f"{name.replace('_', ' ')} {size_text(size)}" for name, size in vars(needs.memory).items() if size
        )
        counted = f"with {needs.packing} in one forward pass"
        rows["memory"] = f"about {size_text(needs.memory.total)}, {counted}: {parts}"
    rows["basis"] = needs.basis
    return [trainable_text(needs.kinds, needs.total), _two_columns("An estimate of memory", rows)]


def size_text(size: int) -> str:
    """Bytes for people, in powers of 1000."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "none can be certified"
    return f"{value:.4f}" if value < 1e6 else f"{value:.3e}"


def _two_columns(title: str, rows: dict[str, str]) -> Table:
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for key, value in rows.items():
        table.add_row(key, value)
    return table


def largest_batch(schedule: Schedule) -> int:
    """The smallest number of units that a step exceeds with probability 0.1% at most; the logical batch is Binomial(N, q)."""
    from scipy import stats

    return int(stats.binom.ppf(QUANTILE, schedule.dataset_size, schedule.sampling_rate))
