"""A sweep: one recipe at several epsilons, as one tuning group of the ledger.

Comes in: a recipe, its overrides, the epsilons. Goes out: a directory with one run for each, audited and with a card, and
their comparison. Every run is planned and reserved before the first one starts, all of them or none, so that a sweep never
ends half-way for lack of budget. Training itself is run/loop.py's.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm import ledger
from dpllm.comparison.compare import Comparison, compare
from dpllm.errors import AuditContradiction, ConfigError, DpllmError, Refused
from dpllm.files import digest, read_json, write_json
from dpllm.ledger import RunRequest, dataset_policy, reserving
from dpllm.privacy import guards
from dpllm.privacy.plan import Plan
from dpllm.recipe import derived
from dpllm.recipe.config import RunConfig, load_config
from dpllm.run.directory import RunDir, check_directory
from dpllm.run.promise import Start, Subject, decide, read_subject
from dpllm.run.resume import TRAIN_MAY_CHANGE
from dpllm.statement.run_files import read_status

if TYPE_CHECKING:
    from rich.console import Console

    from dpllm.auditing.record import AuditRecord

STATE = "sweep.json"
"""In the sweep's directory: what was asked for, and the name of its tuning group; public values only."""
EXAMPLE = "--privacy.epsilon 1,3,8,inf"
# Beside the epsilons, which are compared by themselves: what a resumed run may change too.
MAY_CHANGE: dict[str, Any] = {
    "privacy": {"epsilon"},
    "train": TRAIN_MAY_CHANGE,
    "card": True,
    "telemetry": True,
    "output_dir": True,
}


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its recipe, and its target, which is infinite for the run without differential privacy."""

    epsilon: float
    config: RunConfig
    name: str  # of its directory below the sweep's, and of its run in the ledger below the group's
    said: str  # on its card, before the group's name

    @property
    def run(self) -> RunDir:
        """Its run directory."""
        return RunDir(Path(self.config.output_dir))


def sweep(
    recipe: str | Path,
    overrides: Mapping[str, Any],
    *,
    resume: bool = False,
    tasks: int = 0,
    console: Console,
) -> Comparison:
    """Trains, audits, cards and compares a recipe at several epsilons.

    Args:
        recipe: YAML file.
        overrides: Dotted key -> value; ``privacy.epsilon`` holds the list, and ``output_dir`` names the sweep's directory.
        resume: Go on with the sweep in ``output_dir``; runs that are finished are kept.
        tasks: Evaluation prompts for scores of what is written; 0: none.
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
    points, root = _read_points(recipe, overrides)
    with trained(points, root, resume=resume, console=console) as runs:
        return compare(runs, root / "compare", tasks=tasks, losses=True, console=console)


@contextlib.contextmanager
def trained(points: Sequence[Point], root: Path, *, resume: bool, console: Console) -> Iterator[list[RunDir]]:
    """Runs that were reserved as one group, trained and audited, and have cards; see ``sweep``."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a launcher started several processes, and each would reserve its own group. Type dpllm sweep alone; for several "
            "GPUs train each epsilon with accelerate launch."
        )
    with RunDir(root).locked():
        state = _state_of(points, root, resume)
        points, entries = _fix(points, root, state)
        console.print(f"Group {state['group']}: {', '.join(point.name for point in points)} in {root}")
        for point in points:
            _train(point, entries.get(point.name), console)
        contradictions = _audit(points, console)
        yield [point.run for point in points]
    if contradictions:
        raise AuditContradiction("; ".join(contradictions))


def _read_points(recipe: str | Path, overrides: Mapping[str, Any]) -> tuple[list[Point], Path]:
    """The runs of a sweep, and its directory. Nothing is read but the recipe."""
    rest = {key: value for key, value in overrides.items() if key != "privacy.epsilon"}
    if "privacy.epsilon" not in overrides:
        raise ConfigError(f"a sweep needs a list of epsilons. Type {EXAMPLE}")
    epsilons = _parse_epsilons(overrides["privacy.epsilon"])
    try:
        config = load_config(recipe, rest)
    except ConfigError as error:
        lists = [
            key for key, value in rest.items() if isinstance(value, str) and "," in value and f"{key}:" in str(error)
        ]
        if not lists:
            raise
        raise ConfigError(
            f"--{lists[0]} {rest[lists[0]]}: a sweep varies only privacy.epsilon, because each run costs budget. Give "
            f"{lists[0]} one value; dpllm plan {recipe} --{lists[0]} VALUE plans another and spends nothing."
        ) from None
    if not config.privacy.enabled:
        raise ConfigError(
            f"{recipe}: privacy.enabled is false, so no run of the sweep would have differential privacy. Set it to true, and "
            f"add inf to the list for a run without it: {EXAMPLE}"
        )
    if config.privacy.noise_multiplier is not None:
        raise ConfigError(
            f"{recipe}: privacy.noise_multiplier is set, so every run would have the same epsilon. Set it to null."
        )
    root, several = Path(config.output_dir), ", ".join(f"{epsilon:g}" for epsilon in epsilons)
    said = f"One of {len(epsilons)} runs that differ in privacy.epsilon alone ({several})"
    points = []
    for epsilon in epsilons:
        terms: dict[str, Any] = {"epsilon": epsilon} if math.isfinite(epsilon) else {"enabled": False}
        name = f"eps-{epsilon:g}"
        privacy, place = config.privacy.model_copy(update=terms), str(root / name)
        points.append(Point(epsilon, config.model_copy(update={"privacy": privacy, "output_dir": place}), name, said))
    return points, root


def _parse_epsilons(value: Any) -> list[float]:
    """Two or more different epsilons, such as "1,3,8,inf" or a list of numbers, from the smallest to the largest."""
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    found = []
    for word in words:
        try:
            number = float("nan") if isinstance(word, bool) else float(word)
        except (TypeError, ValueError):
            number = float("nan")
        if not number > 0:
            raise ConfigError(
                f"--privacy.epsilon {value}: {str(word).strip()!r} is not an epsilon. Every run needs one above 0, or inf for "
                f"no differential privacy. Type {EXAMPLE}"
            )
        found.append(number)
    if len({f"{number:g}" for number in found}) < len(found):
        raise ConfigError(
            f"--privacy.epsilon {value}: has a value twice, so two runs would share a directory. Type each once."
        )
    if len(found) < 2:
        raise ConfigError(
            f"--privacy.epsilon {value}: a sweep needs at least two values. Type more, as in {EXAMPLE}; or dpllm train."
        )
    return sorted(found)


def _state_of(points: Sequence[Point], root: Path, resume: bool) -> dict[str, Any]:
    """What the sweep in this directory is; a new one gets its name here."""
    path = root / STATE
    first = points[0].config.model_dump(mode="json", exclude=MAY_CHANGE)
    ours = {"recipe": digest(first), "epsilons": [f"{point.epsilon:g}" for point in points]}
    if not resume:
        if path.exists():
            raise ConfigError(
                f"{root}: already holds a sweep. Type --resume to go on with it, or another --output_dir."
            )
        if (root / "config.yaml").exists():
            raise ConfigError(
                f"{root}: holds a run, but a sweep needs a directory of its own. Type another --output_dir."
            )
        for point in points:
            check_directory(point.config, point.run, resume=False, overwrite=False)
        return {**ours, "group": f"{root.name}-{secrets.token_hex(4)}"}
    if not path.exists():
        raise ConfigError(f"{root}: holds no sweep to resume (no {STATE}). Leave --resume out.")
    state = read_json(path)
    if not isinstance(state.get("group"), str):
        raise ConfigError(
            f"{path}: is not the state of a sweep; the file is damaged. Restore it, or type another --output_dir for a new "
            "sweep."
        )
    for key, what in (("epsilons", "list of epsilons"), ("recipe", "recipe")):
        if state.get(key) != ours[key]:
            raise ConfigError(
                f"{root}: its sweep has another {what}, and its runs were fixed before the first one. Type the same again, or "
                "another --output_dir for a new sweep."
            )
    return state


def _fix(points: Sequence[Point], root: Path, state: dict[str, Any]) -> tuple[list[Point], dict[str, str]]:
    """Decides on and reserves every run, unless an earlier start did; returns them, and their reservations by name."""
    config = points[0].config  # the smallest epsilon: with differential privacy
    book = ledger.open_ledger(config.privacy.ledger, create=False)
    with book or contextlib.nullcontext(), book.counting() if book else contextlib.nullcontext():
        subject = read_subject(config)
        policy = subject.policy
        assert policy is not None
        if book is not None and (held := _entries(book, policy, state["group"], points)):
            return _as_fixed(points, state), held
        plans = plans_of(points, subject, book)
        _check_model(config)
    write_json(root / STATE, state)
    book, flaw = ledger.open_ledger(config.privacy.ledger), derived.deviations(config)[0]
    assert book is not None
    try:
        with book, book.counting():
            if policy.records is None:  # there was no ledger to tell the data by
                again = read_subject(config)
                if again.digest != subject.digest:
                    raise Refused(
                        f"data.train ({config.data.train}) changed while the sweep was planned, so its runs would be reserved "
                        "for other records than were counted. Start again, and do not change the file meanwhile."
                    )
                policy = again.policy
                assert policy is not None
            reserving.reserve_all(
                book,
                policy.dataset,
                [
                    RunRequest.of(plan, f"{state['group']}/{name}", flaw=flaw, final=config.privacy.final)
                    for name, plan in plans.items()
                ],
                group=state["group"],
                records=policy.records,
                derived_from=policy.derived_from,
            )
            return _as_fixed(points, state), _entries(book, policy, state["group"], points)
    except Refused:  # nothing was reserved, so there is no sweep to resume
        (root / STATE).unlink(missing_ok=True)
        raise


def plans_of(points: Sequence[Point], subject: Subject, book: ledger.Ledger | None) -> dict[str, Plan]:
    """The promise of each run with differential privacy."""
    if points[0].config.privacy.fit_budget:
        raise ConfigError(
            "privacy.fit_budget lowers the epsilon of one run, and a group has the epsilons that were typed. Leave it out."
        )
    terms = dataset_policy.terms(book, subject.dataset, points[0].config.privacy.derived_from)
    plans = {}
    for point in points:
        # Whether the data may be used without differential privacy is another question.
        known = subject if point.config.privacy.enabled else None
        plan = decide(point.config, subject=known, terms=terms, fetch=True).obeyed().plan
        if plan is not None:
            plans[point.name] = plan
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


def _entries(
    book: ledger.Ledger, policy: dataset_policy.DatasetPolicy, group: str, points: Sequence[Point]
) -> dict[str, str]:
    """The reservations of the group, by the names of their runs."""
    account = book.records.charged_to(policy.dataset, policy.derived_from)
    found = {run.reservation.run: run.reservation.entry for run in book.account(account).groups().get(group, [])}
    return {point.name: found[f"{group}/{point.name}"] for point in points if f"{group}/{point.name}" in found}


def _as_fixed(points: Sequence[Point], state: dict[str, Any]) -> list[Point]:
    """The runs with what their cards say about the choice among them."""
    fixed = []
    for point in points:
        said = f"{point.said}, fixed together before the first as tuning group {state['group']} of the ledger."
        card = point.config.card.model_copy(update={"tuning": point.config.card.tuning or said})
        fixed.append(replace(point, config=point.config.model_copy(update={"card": card})))
    return fixed


def _train(point: Point, entry: str | None, console: Console) -> None:
    """Trains one run, goes on with it, or keeps it where it is finished."""
    from dpllm.run.loop import train

    run = point.run
    if read_status(run) == "completed":
        console.print(f"{point.name}: finished before")
        return
    goes_on = bool(run.checkpoints())
    if goes_on:
        entry = None
    elif entry is not None:
        _refuse_lost(point, entry)
    console.print(point.name)
    try:
        start = Start(resume=goes_on, overwrite=not goes_on, entry=entry)
        record = train(point.config, start, console=console)
    except DpllmError:
        console.print("The other runs keep their places in the ledger: type --resume to go on with the sweep.")
        raise
    if record.status != "completed":
        raise DpllmError(
            f"{point.name} was interrupted after {record.steps_taken} steps, so there is nothing to compare yet. Type the "
            "same command with --resume: the runs of the sweep keep their places in the ledger."
        )


def _refuse_lost(point: Point, entry: str) -> None:
    """Steps that were charged and whose update no checkpoint has: the run cannot be had for what was reserved."""
    with ledger.open_ledger(point.config.privacy.ledger, create=False) or contextlib.nullcontext() as book:
        seen = book.run(entry) if book else None
    if seen and seen.steps:
        closed = seen.state in ("completed", "reconciled")
        close = "" if closed else f"Close it: dpllm ledger reconcile {entry} --reason WHY. "
        raise Refused(
            f"{point.name} was stopped after {seen.steps} charged steps without a checkpoint, so its place in the group is used "
            f"up. {close}Start another sweep, with train.checkpoint_every to have checkpoints."
        )


def _audit(points: Sequence[Point], console: Console) -> list[str]:
    """Audits what has canaries and writes every card; says which promises an audit contradicts."""
    from dpllm.card.card import write_card
    from dpllm.verification.verify import undone_unless_verified

    twin = next((point.run for point in points if math.isinf(point.epsilon)), None)
    contradictions = []
    for point in sorted(points, key=lambda point: -point.epsilon):  # the twin first
        if point.config.audit.plants:
            report = _audit_one(point, twin if point.config.privacy.enabled else None)
            console.print(f"{point.name} audited: {report.verdict}")
            if report.verdict == "falsified":
                contradictions.append(f"{point.name}: {report.verdict_reason}")
        with undone_unless_verified(point.run.root):
            write_card(point.run)
    return contradictions


def _audit_one(point: Point, twin: RunDir | None) -> AuditRecord:
    from dpllm.auditing.record import read_audit
    from dpllm.auditing.run import audit

    path = point.run.audit_dir(point.config.privacy.enabled) / "audit.json"
    if path.exists():  # of an earlier start; another audit would count as one more
        return read_audit(path)
    with contextlib.suppress(ConfigError):  # a twin whose own controls failed shows nothing
        if twin is not None:
            return audit(point.run, twin=twin)
    return audit(point.run)
