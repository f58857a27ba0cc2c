"""What a recipe promises, and everything that would refuse it, before anything runs.

Comes in: the recipe, the number of its units, the ledger. Goes out: an ``Outlook``. Guards are collected, not obeyed: what
can still be computed beside a refusal is. Must not import torch, read weights or write to the ledger.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dpllm import lineage
from dpllm.config import RunConfig
from dpllm.errors import BudgetExceeded, ConfigError, DpllmError
from dpllm.planning.batches import Batches, batches_of
from dpllm.privacy import guards
from dpllm.privacy.plan import Plan, Schedule, make_plan, make_schedule
from dpllm.rundir import RunDir, check_directory

if TYPE_CHECKING:
    from dpllm import ledger
    from dpllm.ledger import protect

UNBOUNDED = 1e9  # a target epsilon that refuses nothing
Value = TypeVar("Value")


@dataclass(frozen=True)
class Outlook:
    """What is known of a run before it starts.

    Attributes:
        config: The recipe.
        num_units: Public number of privacy units without canaries; None where the data could not be counted.
        schedule: None where the recipe has none, say because the batch is larger than the dataset.
        plan: The promise. Where it exceeds its own target or the budget, the figures are those that the refused run would
            have; None where there is nothing to compute, or without differential privacy.
        batches: None without a schedule.
        ledger: What the ledger holds and would hold; None where there is no ledger yet, or nothing to book.
        refusals: Every guard that would refuse the run, in the order in which ``dpllm train`` meets them, but for those that
            need a tokenizer, the model or a second accountant, which needs torch: rows and canaries longer than
            ``data.max_length``, what the model cannot be (``planning.footprint`` looks at it), PRV.
    """

    config: RunConfig
    num_units: int | None
    schedule: Schedule | None
    plan: Plan | None
    batches: Batches | None
    ledger: ledger.Outlook | None
    refusals: tuple[DpllmError, ...]

    @property
    def exit_code(self) -> int:
        """0 if nothing refuses; else the largest exit code of the refusals."""
        return max((error.exit_code for error in self.refusals), default=0)


class _Refusals:
    """Collects refusals, each message once."""

    def __init__(self) -> None:
        self.errors: list[DpllmError] = []

    def attempt(self, call: Callable[[], Value]) -> Value | None:
        """The value of ``call``; None, and one refusal more, where it refuses."""
        try:
            return call()
        except DpllmError as error:
            if str(error) not in map(str, self.errors):
                self.errors.append(error)
            return None


@dataclass(frozen=True)
class Subject:
    """What is known of the training data, none of which is kept.

    Attributes:
        num_units: Public number of things that are sampled, without canaries: declared or counted.
        dataset: Their name in the ledger.
        derived_from: The dataset that is charged instead, where the recipe declares one.
    """

    num_units: int
    dataset: str
    derived_from: str | None


def look_ahead(
    config: RunConfig, cache_dir: Path | None = None, *, subject: Subject | None = None, directory: bool = True
) -> Outlook:
    """Everything that the recipe, the data and the ledger say about a run.

    Args:
        config: The recipe.
        cache_dir: Where calibrations are remembered.
        subject: What is known of the data already; None: they are read.
        directory: Whether the output directory may refuse too.

    Returns:
        The outlook.
    """
    found = _Refusals()
    found.attempt(lambda: guards.check_modes(config))
    if directory:
        found.attempt(lambda: check_directory(config, RunDir(Path(config.output_dir)), resume=False, overwrite=False))
    book = found.attempt(lambda: _open(config))
    try:
        subject = subject or _study(config, book, found)
        if subject is None:
            return Outlook(config, None, None, None, None, None, tuple(found.errors))
        schedule, plan = _promise(config, cache_dir, subject, book, found)
        found.attempt(partial(_ancestry, config, subject, book))
        batches = batches_of(config, schedule) if schedule else None
        seen = _ask(book, subject, plan, found) if book is not None and plan is not None else None
        return Outlook(config, subject.num_units, schedule, plan, batches, seen, tuple(found.errors))
    finally:
        if book is not None:
            book.close()


def subject_of(config: RunConfig) -> Subject:
    """Reads the training data for their number and name, once for many outlooks.

    Raises:
        DataError: The training data cannot be read as declared.
        Refused: The ledger does not permit them to be trained on in this way.
    """
    found = _Refusals()
    book = _open(config)
    try:
        subject = _study(config, book, found)
    finally:
        if book is not None:
            book.close()
    if found.errors:
        raise found.errors[0]
    assert subject is not None
    return subject


def _study(config: RunConfig, book: Any, found: _Refusals) -> Subject | None:
    from dpllm import data
    from dpllm.ledger import protect

    with tempfile.TemporaryDirectory() as cache:
        table = found.attempt(
            lambda: data.load_table(config.data.train, config.data, config.data.train_split, Path(cache))
        )
        if table is None:
            return None
        custody = found.attempt(lambda: protect.take_custody(config, table, book))
        rows = found.attempt(lambda: data.sampled_rows(table, config.data))
        if config.data.eval is not None:
            source, split = config.data.eval, config.data.eval_split
            found.attempt(lambda: data.load_table(source, config.data, split, Path(cache)))
    if rows is None:
        return None
    # Where custody is refused, the declared name is shown: what the ledger holds under it is no secret from its owner.
    dataset = custody.dataset if custody else config.privacy.dataset or data.dataset_name(config.data)
    return Subject(config.data.public_size or len(rows), dataset, custody.derived_from if custody else None)


def _promise(
    config: RunConfig, cache_dir: Path | None, subject: Subject, book: Any, found: _Refusals
) -> tuple[Schedule | None, Plan | None]:
    from dpllm.ledger import protect

    units = subject.num_units
    schedule = found.attempt(lambda: make_schedule(config, units))
    if not config.privacy.enabled:
        return schedule, None
    if schedule is None:  # delta can be judged all the same
        found.attempt(lambda: make_plan(_with_nothing_but_delta(config), units, cache_dir))
        return None, None
    terms = found.attempt(lambda: protect.terms(book, subject.dataset, subject.derived_from))
    return schedule, _plan(config, units, cache_dir, terms or protect.terms(None, subject.dataset, None), found)


def _ancestry(config: RunConfig, subject: Subject, book: Any) -> None:
    base = lineage.of_base(config, fetch=False)
    lineage.settle(base, config, dataset=subject.dataset, derived_from=subject.derived_from, book=book, plan=None)


def _plan(
    config: RunConfig, num_units: int, cache_dir: Path | None, terms: protect.Terms, found: _Refusals
) -> Plan | None:
    plan = found.attempt(lambda: make_plan(config, num_units, cache_dir, **terms))
    if plan is not None:
        return plan
    # What it would cost all the same: without the filter, and with no target for a noise multiplier that is given.
    relaxed = _update(config, "privacy", epsilon=UNBOUNDED) if config.privacy.noise_multiplier else config
    try:
        plan = make_plan(relaxed, num_units, cache_dir, largest_delta=terms["largest_delta"])
    except DpllmError:  # what refuses even that was said already
        return None
    return replace(plan, target_epsilon=config.privacy.epsilon)


def _open(config: RunConfig) -> Any:
    from dpllm import ledger

    return ledger.open_ledger(config.privacy.ledger, create=False)


def _ask(book: Any, subject: Subject, plan: Plan, found: _Refusals) -> ledger.Outlook | None:
    seen: ledger.Outlook | None = found.attempt(
        lambda: book.outlook(
            subject.dataset,
            event=plan.event,
            delta=plan.delta,
            unit=plan.unit,
            relation=plan.neighbouring_relation,
            num_steps=plan.schedule.num_steps,
            derived_from=subject.derived_from,
        )
    )
    if seen and seen.refusal:
        found.errors.append(BudgetExceeded(seen.refusal))
    return seen


def _with_nothing_but_delta(config: RunConfig) -> RunConfig:
    """A recipe in which only delta can be refused: one step, one unit, a noise that meets any target."""
    config = _update(config, "train", batch_size=1, steps=1, epochs=None)
    return _update(config, "privacy", epsilon=UNBOUNDED, noise_multiplier=100.0, clipping="flat")


def _update(config: RunConfig, section: str, **values: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def released_by(run: RunDir) -> dict[str, float]:
    """What an earlier run released with noise, which may be read at no further cost.

    Args:
        run: Its directory.

    Returns:
        ``unclipped_fraction`` and ``max_grad_norm`` of adaptive clipping.

    Raises:
        ConfigError: No run there, or it released nothing under its guarantee.
    """
    from dpllm.rundir import read_json

    record = read_json(run.run)
    released = record.get("metrics", {}).get("released", {})
    if not record.get("guarantee", {}).get("holds") or not {"unclipped_fraction", "max_grad_norm"} <= released.keys():
        raise ConfigError(
            f"{run.root}: released no clip fraction under its guarantee, and an un-noised one is private and not looked at. "
            "Name a completed run with privacy.clipping: adaptive."
        )
    return {name: float(released[name]) for name in ("unclipped_fraction", "max_grad_norm")}
