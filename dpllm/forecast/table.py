"""What ``dpllm plan`` prints: rows of text from the values of planning, and how many units and physical batches a step has.

Comes in: a decision, a footprint. Goes out: tables. Must not see data, and must not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpllm.forecast.advice import effect_of
from dpllm.privacy.banded import Effect
from dpllm.privacy.plan import RELATION_IN_WORDS, Plan
from dpllm.privacy.schedule import Schedule, Shape, group_rate, physical_batches_expected
from dpllm.recipe.config import RunConfig
from dpllm.recipe.derived import rows_of_one, shapes_for
from dpllm.run.promise import Decision

if TYPE_CHECKING:
    from rich.table import Table

    from dpllm.forecast.footprint import Footprint

QUANTILE = 0.999
FIXED = 64  # as of ``shapes_of``, where the size of the model is not known
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
        sizes = batches_of(seen.config, schedule)
        counted = "rows" if plan and plan.sampling == "example" else "units"
        rows |= {
            "public size N": f"{schedule.dataset_size} {counted}, of which {schedule.canary_slots} are canary slots",
            "sampling rate q": f"{schedule.sampling_rate:.6f}: each joins each step by its own coin"
            + (", when it is its group's turn" if plan and plan.coefficients else ""),
            "steps T": str(schedule.num_steps),
            "logical batch": f"B = {sizes.expected} {counted} expected, at most {sizes.largest} in 99.9% of the steps",
            "physical batches": _physical(sizes),
        }
    elif seen.subject is not None:
        rows["public size"] = f"{seen.subject.num_units} without canary slots"
    if plan:
        rows["clipping"] = f"{plan.clipping}, C = {plan.max_grad_norm:g}"
        rows["noise multiplier sigma"] = f"{plan.noise_multiplier:g}"
        if effect := effect_of(seen.config, plan):
            rows["banded noise"] = _banded(plan, effect)
        rows["ledger"] = str(seen.ledger or "no ledger there yet: nothing is spent, and no budget is set")
    if seen.subject and seen.subject.reads:
        rows["data"] = seen.subject.reads
        rows["first example" if seen.config.data.public else "an example"] = seen.subject.example
    return _two_columns(title, rows)


def _banded(plan: Plan, effect: Effect) -> str:
    bands, rate = plan.bands, group_rate(plan.schedule, plan.bands)
    return (
        f"{bands} bands: {effect.last_iterate:.3f} of the noise that independent noise would leave in the last weights; noise "
        f"of one step {effect.one_step:.3g} times as large, and so is the learning rate for adamw; {bands} groups take turns, "
        f"at rate {rate:.6f}; {8 * (bands - 1)} bytes of earlier noise per trained parameter"
    )


def _promise(plan: Plan) -> dict[str, str]:
    beside = ", ".join(f"{name} {_number(value)}" for name, value in plan.accountants.items())
    unit = "example: one row"
    if plan.max_examples_per_unit is not None:
        how = "drawn together" if plan.sampling == "unit" else "drawn one by one"
        unit = f"user-level: column {plan.unit}, at most {plan.max_examples_per_unit} rows of each, {how}"
    limits = [f"{words} {value:.3g}" for name, words in LIMITS.items() if (value := plan.limits.get(name)) is not None]
    return {
        "epsilon": f"{plan.epsilon:.4f} (target {plan.target_epsilon:g})",
        "delta": f"{plan.delta:g} (1/N is {1 / plan.schedule.dataset_size:.2g})",
        "by accountant": f"{beside} (stated: {plan.accountant['name']} {plan.accountant['version']})",
        "privacy unit": unit,
        "neighbouring relation": f"{plan.neighbouring_relation}: {RELATION_IN_WORDS[plan.neighbouring_relation]}",
        "limits on an attacker": "membership inference, at most: " + ", ".join(limits)
        if limits
        else "none can be certified",
    }


def _physical(sizes: Batches) -> str:
    if sizes.shapes is None or sizes.physical_expected is None or sizes.padding_rows is None:
        return f"of as many sequences as fit, found when training starts (auto); {sizes.assumption}"
    share = sizes.padding_rows / (sizes.expected * sizes.sequences_per_unit)
    return (
        f"about {sizes.physical_expected:.0f} a step, of at most {sizes.physical_size} sequences, if lengths are spread evenly; "
        f"padding rows that fill them up: about {sizes.padding_rows:.0f} ({share:.1%}); one process, {sizes.assumption}"
    )


def footprint_tables(needs: Footprint) -> list[Table | str]:
    """What trains; and what noise a step adds and what memory it takes."""
    from dpllm.model.adapters import trainable_text

    rows = {}
    if needs.noise_per_coordinate is not None and needs.noise_total is not None:
        times = ", times what banded noise adds to a step," if needs.memory and needs.memory.noise else ""
        rows["noise per coordinate"] = f"sigma C / B{times} = {needs.noise_per_coordinate:.3g} in the averaged gradient"
        rows["noise in total"] = f"times sqrt(d) = {needs.noise_total:.3g}, beside a signal of length C at most"
    if needs.memory:
        parts = ", ".join(
            f"{name.replace('_', ' ')} {size_text(size)}" for name, size in vars(needs.memory).items() if size
        )
        counted = f", with {needs.physical_batch_size} sequences in one forward pass" if needs.found else ""
        rows["memory"] = f"about {size_text(needs.memory.total)}{counted}: {parts}"
    rows["basis"] = needs.basis
    trains = trainable_text(needs.kinds, needs.total)
    return [trains, _two_columns("Noise, and an estimate of memory", rows)]


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


@dataclass(frozen=True)
class Batches:
    """Sizes of a step's batches, for one process; None where a run finds them at its start."""

    expected: int  # B, the mean of the logical batch, in units
    largest: int  # the smallest number of units that a step exceeds with probability 0.1% at most
    sequences_per_unit: int  # with how many sequences one unit is counted
    physical_size: int | None  # sequences in one forward pass, at most
    shapes: tuple[Shape, ...] | None  # of physical batches, as (tokens, rows): see ``schedule.shapes_of``
    physical_expected: float | None  # physical batches of a step, where lengths are spread evenly up to data.max_length
    padding_rows: float | None  # of these, rows that fill them up and learn nothing
    assumption: str  # in words, what is counted


def batches_of(config: RunConfig, schedule: Schedule) -> Batches:
    """Counts a step's units and physical batches.

    The logical batch is Binomial(N, q): its quantile at 99.9% is exact. A unit is counted with one sequence, or with
    ``data.max_examples_per_unit`` where all its rows are drawn together, which is the most it may bring unless rows are cut
    into chunks. A unit that is longer than a physical batch has physical batches of its own.
    """
    from scipy import stats

    per_unit, batch, named = rows_of_one(config), schedule.expected_batch_size, config.train.physical_batch_size
    number = "two sequences" if config.train.pairs else "one sequence"
    counted = f"{number} {'a row' if config.data.sampling == 'example' else 'a unit'}"
    if config.data.sampling == "unit" and config.data.max_examples_per_unit is not None:
        counted = f"at most {config.data.max_examples_per_unit} rows of a unit, {number} each"
    if config.data.long_examples == "chunk":
        counted += ", and more where a row longer than data.max_length is cut into chunks"
    largest = int(stats.binom.ppf(QUANTILE, schedule.dataset_size, schedule.sampling_rate))
    if named == "auto":
        return Batches(batch, largest, per_unit, None, None, None, None, counted)
    shapes = shapes_for(config, schedule, FIXED)(named)
    each = physical_batches_expected(shapes, batch, each=per_unit)
    rows = sum(number * shape.rows for number, shape in zip(each, shapes, strict=True))
    return Batches(batch, largest, per_unit, named, shapes, sum(each), rows - batch * per_unit, counted)
