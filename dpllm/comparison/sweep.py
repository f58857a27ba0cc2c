"""A sweep: one recipe at several epsilons, as one tuning group of the ledger.

Comes in: a recipe, its overrides, the epsilons. Goes out: a directory with one run for each, audited and with a card, and
their comparison. Every run is planned and reserved before the first one starts, all of them or none, so that a sweep never
ends half-way for lack of budget. Training itself is run/loop.py's.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm import ledger
from dpllm.comparison.compare import Comparison, compare
from dpllm.comparison.sweep_runs import STATE, Point, read_points, state_of
from dpllm.errors import AuditContradiction, BudgetExceeded, ConfigError, DpllmError, Refused
from dpllm.files import read_json, write_json
from dpllm.ledger import RunRequest, admission, dataset_policy, reserving
from dpllm.privacy import guards
from dpllm.privacy.plan import Plan
from dpllm.privacy.renyi import Fit
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir
from dpllm.run.promise import Subject, decide, read_subject

if TYPE_CHECKING:
    from rich.console import Console


def sweep(
    recipe: str | Path,
    overrides: Mapping[str, Any],
    *,
    by: str,
    resume: bool = False,
    tasks: int = 0,
    console: Console,
) -> Comparison:
    """Trains, audits, cards and compares a recipe at several epsilons.

    Args:
        recipe: YAML file.
        overrides: Dotted key -> value; ``privacy.epsilon`` holds the list, and ``output_dir`` names the sweep's directory.
        by: Who answers for the list of runs, which a planned budget seals.
        resume: Go on with the sweep in ``output_dir``; runs that are finished are kept.
        tasks: Evaluation rows on which to generate for BLEU and ROUGE-L; 0: none.
        console: Where progress goes.

    Returns:
        The comparison, which lies in ``compare/`` of the sweep's directory and is private.

    Raises:
        ConfigError: The list is none, another key is swept, or the directory holds something else.
        Refused: A guard refuses one of the runs, or the budget does not hold all of them; nothing is then reserved.
        AuditContradiction: An audit contradicts the guarantee of a run; the others were trained and compared all the same.
        DpllmError: A run was interrupted.

    Guarantee:
        All runs with differential privacy are reserved in one transaction before the first gradient of any of them, and
        together they have the epsilon that the ledger states for the group.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a launcher started several processes, and each would reserve a group of its own. Type dpllm sweep alone; for "
            "several GPUs train each epsilon with accelerate launch."
        )
    points, root = read_points(recipe, overrides)
    with RunDir(root).locked():
        state = state_of(points, root, resume)
        points, entries = _fix(points, root, state, by)
        console.print(f"[bold]Sweep[/] {state['group']}: {', '.join(point.name for point in points)} in {root}")
        for point in points:
            _train(point, entries.get(point.name), console)
        contradictions = _audit(points, console)
        _measure(points, tasks, console)
        comparison = compare([point.run for point in points], root / "compare")
    if contradictions:
        raise AuditContradiction("; ".join(contradictions))
    return comparison


def _fix(points: Sequence[Point], root: Path, state: dict[str, Any], by: str) -> tuple[list[Point], dict[str, str]]:
    """Decides on and reserves every run, unless an earlier start did.

    Returns:
        The runs as they will be trained, and their reservations by name.

    Raises:
        DpllmError: What would refuse one of them, or the budget does not hold all; nothing was then reserved.
    """
    config = points[0].config  # the smallest epsilon: with differential privacy
    book = ledger.open_ledger(config.privacy.ledger, create=False)
    with book or contextlib.nullcontext(), book.counting() if book else contextlib.nullcontext():
        subject = read_subject(config)
        policy = subject.policy
        assert policy is not None
        if book is not None:
            account = book.records.charged_to(policy.dataset, policy.derived_from)
            if held := _entries(book, account, state["group"], points):
                return _as_fixed(points, state), held
        plans = _plans(points, subject, book)
        _check_model(config)
    if any(pinned is not None for _, pinned in plans.values()):
        state["pinned"] = {name: pinned for name, (_, pinned) in plans.items() if pinned}
    write_json(root / STATE, {**state, "by": by})
    book = ledger.open_ledger(config.privacy.ledger)
    assert book is not None
    try:
        with book, book.counting():
            if policy.records is None:  # there was no ledger to tell the data by
                again = read_subject(config)
                if again.digest != subject.digest:
                    raise Refused(
                        f"data.train ({config.data.train}) changed while the sweep was planned, so its runs would be reserved "
                        "for other records than were counted. Start it again, and leave the file alone meanwhile."
                    )
                policy = again.policy
                assert policy is not None
            reserving.reserve_all(
                book,
                policy.dataset,
                [RunRequest.of(plan, f"{state['group']}/{name}") for name, (plan, _) in plans.items()],
                group=reserving.Group(state["group"], by),
                records=policy.records,
                derived_from=policy.derived_from,
            )
            account = book.records.charged_to(policy.dataset, policy.derived_from)
            return _as_fixed(points, state), _entries(book, account, state["group"], points)
    except Refused:  # nothing was reserved, so there is no sweep to resume
        (root / STATE).unlink(missing_ok=True)
        raise


def _plans(
    points: Sequence[Point], subject: Subject, book: ledger.Ledger | None
) -> dict[str, tuple[Plan, dict[str, float] | None]]:
    """The promise of each run, and the noise to hold fast where an adaptive budget decided it.

    Raises:
        DpllmError: One of them is refused; under an adaptive budget also where those before it leave too little.
    """
    terms = dataset_policy.terms(book, subject.dataset, points[0].config.privacy.derived_from)
    plans = {}
    for point in points:
        try:
            # Whether the data may be used without differential privacy is another question.
            known = subject if point.config.privacy.enabled else None
            plan = decide(point.config, subject=known, terms=terms, fetch=True).obeyed().plan
        except BudgetExceeded as error:
            raise BudgetExceeded(
                f"{point.name}, after the runs of the sweep before it: {error}",
                dataset=subject.dataset,
                reason="over_budget",
            ) from None
        if plan is None:
            continue
        pinned, fit = None, terms["fit"]
        if fit is not None:
            pinned = {"noise_multiplier": plan.noise_multiplier, "delta": plan.delta}
            terms["fit"] = Fit(fit.order, fit.allowance - admission.divergence(plan.event, fit.order))
        plans[point.name] = plan, pinned
    return plans


def _check_model(config: RunConfig) -> None:
    """The commonest reasons why training cannot begin, before anything is reserved."""
    import torch

    from dpllm.forecast.footprint import skeleton
    from dpllm.model.loading import check_length, load_tokenizer

    load_tokenizer(config.model)
    net = skeleton(config, torch.float32)
    guards.check_model(net)
    check_length(config, net)


def _as_fixed(points: Sequence[Point], state: dict[str, Any]) -> list[Point]:
    """The runs with the noise that was planned for them, and with what their cards say about the choice among them."""
    several = ", ".join(f"{point.epsilon:g}" for point in points)
    said = (
        f"One of {len(points)} runs that differ in privacy.epsilon alone ({several}), fixed together before the first as tuning "
        f"group {state['group']} of the ledger."
    )
    fixed = []
    for point in points:
        privacy = point.config.privacy.model_copy(update=state["pinned"].get(point.name, {}))
        card = point.config.card.model_copy(update={"tuning": point.config.card.tuning or said})
        fixed.append(Point(point.epsilon, point.config.model_copy(update={"privacy": privacy, "card": card})))
    return fixed


def _entries(book: ledger.Ledger, account: str, group: str, points: Sequence[Point]) -> dict[str, str]:
    found = {run.reservation.run: run.reservation.entry for run in book.account(account).groups().get(group, [])}
    return {point.name: found[f"{group}/{point.name}"] for point in points if f"{group}/{point.name}" in found}


def _train(point: Point, entry: str | None, console: Console) -> None:
    """Trains one run, goes on with it, or keeps it where it is finished."""
    from dpllm.run.loop import train

    run = point.run
    status = read_json(run.run).get("status") if run.run.exists() else None
    if status == "completed":
        console.print(f"[bold]{point.name}[/]: finished before")
        return
    goes_on = bool(run.checkpoints())
    if not goes_on and entry is not None:
        _refuse_lost(point, entry)
    console.print(f"[bold]{point.name}[/]")
    try:
        record = train(
            point.config, resume=goes_on, overwrite=not goes_on, entry=None if goes_on else entry, console=console
        )
    except DpllmError:
        console.print("The other runs keep their places in the ledger: --resume goes on with the sweep.")
        raise
    if record["status"] != "completed":
        raise DpllmError(
            f"{point.name} was interrupted after {record['steps_taken']} steps, so there is nothing to compare yet. Type the "
            "same command with --resume: the runs of the sweep keep their places in the ledger."
        )


def _refuse_lost(point: Point, entry: str) -> None:
    """Steps that were charged and whose update no checkpoint has: the run cannot be had for what was reserved."""
    book = ledger.open_ledger(point.config.privacy.ledger, create=False)
    if book is None:
        return
    with book:
        seen = book.run(entry)
    if seen.steps:
        closed = seen.state in ("completed", "reconciled")
        close = "" if closed else f"Close it: dpllm ledger reconcile {entry} --reason WHY. "
        raise Refused(
            f"{point.name} was stopped after {seen.steps} charged steps and left no checkpoint, so its place in the group is "
            f"used up. {close}Start another sweep; with train.checkpoint_every it would leave checkpoints."
        )


def _audit(points: Sequence[Point], console: Console) -> list[str]:
    """Audits what has canaries and writes every card; says which promises an audit contradicts."""
    from dpllm.card.card import write_card

    free = next((point for point in points if math.isinf(point.epsilon)), None)
    contradictions = []
    for point in sorted(points, key=lambda point: -point.epsilon):  # the twin first
        run = point.run
        if point.config.audit.canaries is not None:
            twin = free.run if free is not None and point is not free else None
            report = _audit_one(point, twin)
            console.print(f"[bold]{point.name}[/] audited: {report['verdict']}")
            if report["verdict"] == "falsified":
                contradictions.append(f"{point.name}: {report['verdict_reason']}")
        write_card(run)
    return contradictions


def _audit_one(point: Point, twin: RunDir | None) -> dict[str, Any]:
    from dpllm.auditing.run import audit

    path = point.run.audit_dir(point.config.privacy.enabled) / "audit.json"
    if path.exists():  # of an earlier start; another audit would count as one more
        return read_json(path)
    if twin is not None:
        with contextlib.suppress(ConfigError):  # a twin whose own controls failed shows nothing
            return audit(point.run, twin=twin)
    return audit(point.run)


def _measure(points: Sequence[Point], tasks: int, console: Console) -> None:
    from dpllm.comparison.tasks import measure

    measure([point.run for point in points], rows=tasks, console=console)
