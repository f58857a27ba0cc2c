"""Reserves several runs as one group of the ledger, then trains them: a recipe at several epsilons, or a run and its audit twin.

Comes in: a recipe and its overrides. Goes out: a directory with one audited run and its card for each point. Either all runs are
reserved before the first one starts, or none is, so a group never stops half-way for lack of budget. run/loop.py trains them.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm import ledger
from dpllm.errors import BudgetExceeded, ConfigError, DpllmError, Refused
from dpllm.files import digest, read_json, write_json
from dpllm.ledger import RunRequest, admission, dataset_policy
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy import accounting, guards
from dpllm.privacy.plan import Plan
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig, load_config
from dpllm.recipe.sections import CanaryConfig
from dpllm.run.directory import RunDir, check_directory
from dpllm.run.promise import Start, decide
from dpllm.run.subject import Subject, read_subject
from dpllm.statement.run_files import read_status

if TYPE_CHECKING:
    from rich.console import Console

    from dpllm.statement.audit import AuditRecord

STATE = "sweep.json"
"""File in the group's directory with a digest of the request and the group's name; holds public values only."""
EXAMPLE = "--privacy.epsilon 1,3,8,inf"


@dataclass(frozen=True)
class Point:
    """One run of a group: its recipe and its target epsilon, infinite for the run without differential privacy."""

    epsilon: float
    config: RunConfig
    name: str  # of its directory in the group's directory, and of its run in the ledger's group
    tuning: str  # the sentence on its card that precedes the group's name

    @property
    def run(self) -> RunDir:
        """The run directory."""
        return RunDir(Path(self.config.output_dir))


def at_epsilons(recipe: str | Path, overrides: Mapping[str, Any]) -> list[Point]:
    """A recipe at each epsilon of a list, the smallest first. Reads only the recipe.

    Args:
        recipe: YAML file.
        overrides: Dotted key -> value; ``privacy.epsilon`` holds the list, and ``output_dir`` names the group's directory.

    Raises:
        ConfigError: There is no such list, or the recipe fixes the noise or turns differential privacy off.
    """
    other_overrides = {key: value for key, value in overrides.items() if key != "privacy.epsilon"}
    if "privacy.epsilon" not in overrides:
        raise ConfigError(f"a sweep needs a list of epsilons. Type {EXAMPLE}")
    epsilons = _parse_epsilons(overrides["privacy.epsilon"])
    config = load_config(recipe, other_overrides)
    if not config.privacy.enabled:
        raise ConfigError(
            f"{recipe}: privacy.enabled is false, so no run of the sweep would have differential privacy. Set it to true, and "
            f"add inf to the list for a run without it: {EXAMPLE}"
        )
    if config.privacy.noise_multiplier is not None:
        raise ConfigError(
            f"{recipe}: privacy.noise_multiplier is set, so every run would have the same epsilon. Set it to null."
        )
    listed = ", ".join(f"{epsilon:g}" for epsilon in epsilons)
    tuning = f"One of {len(epsilons)} runs that differ in privacy.epsilon alone ({listed})"
    points = []
    for epsilon in epsilons:
        terms: dict[str, Any] = {"privacy.epsilon": epsilon} if math.isfinite(epsilon) else {"privacy.enabled": False}
        name = f"eps-{epsilon:g}"
        output_dir = str(Path(config.output_dir) / name)
        points.append(Point(epsilon, config.changed({**terms, "output_dir": output_dir}), name, tuning))
    return points


def _parse_epsilons(value: Any) -> list[float]:
    """Parses two or more epsilons, such as "1,3,8,inf" or a list of numbers, and sorts them."""
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        epsilons = {f"{float(word):g}": float(word) for word in words if not isinstance(word, bool)}
    except (TypeError, ValueError):
        epsilons = {}
    if len(epsilons) < max(2, len(words)) or not all(epsilon > 0 for epsilon in epsilons.values()):
        raise ConfigError(
            f"--privacy.epsilon {value}: is no list of two or more different epsilons, each above 0, or inf for no differential "
            f"privacy. Type {EXAMPLE}"
        )
    return sorted(epsilons.values())


def twins(recipe: str | Path, overrides: Mapping[str, Any], *, constant_rate: bool = False) -> list[Point]:
    """Two runs: one without text canaries, to be published, and its audit twin with the recipe's canaries or the default ones.

    The twin trains on the same people again, so it is charged too; its weights hold the canaries' text. With ``constant_rate``
    the twin's learning rate stays at the recipe's peak, so that its weights reveal more of the last steps.
    """
    config = load_config(recipe, overrides)
    if not config.privacy.enabled:
        raise ConfigError(f"{recipe}: privacy.enabled is false, so a twin has no guarantee to test. Leave --twin out.")
    if constant_rate and config.train.lr_scheduler == "constant":
        raise ConfigError(f"{recipe}: train.lr_scheduler is constant already. Leave --constant-rate out.")
    usual = CanaryConfig.usual_groups(config.data.max_examples_per_unit)
    texts = config.audit.canaries or CanaryConfig(groups=usual)
    points = []
    twin, settings = "The audit twin of a run without canaries of text, and not to be published", config.train
    if constant_rate:
        twin += ", at a constant learning rate where that run's falls: its weights show more of each step"
        settings = settings.changed({"lr_scheduler": "constant", "warmup": 0.0})
    for name, tuning, canaries, train in (
        (
            "production",
            "Trained beside an audit twin with canaries of text, which is not published",
            None,
            config.train,
        ),
        ("twin", twin, texts, settings),
    ):
        output_dir = str(Path(config.output_dir) / name)
        trained = config.changed({"audit.canaries": canaries, "train": train, "output_dir": output_dir})
        points.append(Point(config.privacy.epsilon, trained, name, tuning))
    return points


def combined_epsilon(points: Sequence[Point]) -> dict[str, float]:
    """The composed epsilon of all runs, at the budget's delta, or without a budget at their largest delta. Writes nothing.

    Raises:
        BudgetExceeded: The budget does not cover all runs.
        Refused: A guard refuses one of the runs.
    """
    config = points[0].config
    with ledger.open_ledger(config.privacy.ledger, create=False) or contextlib.nullcontext() as book:
        subject = read_subject(config)
        plans = plans_of(points, subject, book)
        account = book.account(book.records.charged_to(subject.dataset, config.privacy.derived_from)) if book else None
        requests = [RunRequest.of(plan, name, flaw, final=config.privacy.final) for name, (plan, flaw) in plans.items()]
        if account and (reason := admission.refusal(account, requests)):
            raise BudgetExceeded(reason, dataset=account.dataset, reason="over_budget")
    delta = account.budget.delta if account and account.budget else max(request.delta for request in requests)
    composed = accounting.compose([request.event for request in requests])
    return {"epsilon": accounting.epsilon(composed, delta, requests[0].relation), "delta": delta}


def train_group(points: Sequence[Point], *, resume: bool = False, console: Console) -> list[str]:
    """Reserves runs as one group, then trains and audits each run and writes its card.

    Args:
        points: The runs, the first with differential privacy.
        resume: Continue the group in its directory; finished runs are kept.
        console: Shows the progress.

    Returns:
        A sentence for each run whose promise its audit contradicts.

    Raises:
        ConfigError: The directory holds something else.
        Refused: A guard refuses one of the runs, or the budget does not cover all of them; then nothing is reserved.
        DpllmError: A run was interrupted.

    Guarantee:
        All runs with differential privacy are reserved in one transaction before the first gradient of any of them.
        Together they have the epsilon that the ledger states for the group.
    """
    root = points[0].run.root.parent
    with RunDir(root).locked():
        state = _state_of(points, root, resume)
        points, entries = _reserve(points, root, state)
        resume_hint = "Where one of them stops, all keep their places in the ledger: type --resume to go on."
        names_of_all = ", ".join(point.name for point in points)
        console.print(f"Group {state['group']}: {names_of_all} in {root}. {resume_hint}", soft_wrap=True)
        for point in points:
            _train(point, entries.get(point.name), console)
        return _audit(points, console)


def _state_of(points: Sequence[Point], root: Path, resume: bool) -> dict[str, Any]:
    """The state of the group in this directory; a new group gets a name."""
    path = root / STATE
    if not resume:
        if path.exists():
            raise ConfigError(
                f"{root}: already holds a sweep. Type --resume to go on with it, or another --output_dir."
            )
        for point in points:
            check_directory(point.config, point.run, resume=False, overwrite=False)
        group = f"{root.name}-{secrets.token_hex(4)}"
        return {"group": group, "asked": _digest_of(points, group)}
    if not path.exists():
        raise ConfigError(f"{root}: holds no sweep to resume (no {STATE}). Leave --resume out.")
    state = read_json(path)
    if state.get("asked") != _digest_of(points, state.get("group")):
        raise ConfigError(
            f"{root}: its sweep has another recipe or other epsilons (or {STATE} was edited), and its runs were fixed before the "
            "first one. Type the same again, or another --output_dir for a new sweep."
        )
    return state


def _digest_of(points: Sequence[Point], group: str | None) -> str:
    return digest({"group": group, **{point.name: names.of_training(point.config) for point in points}})


def _reserve(points: Sequence[Point], root: Path, state: dict[str, Any]) -> tuple[list[Point], dict[str, str]]:
    """Reserves every run, unless an earlier call did. Returns the runs, and the ledger entry of each by name."""
    config, group = points[0].config, state["group"]
    book = ledger.open_ledger(config.privacy.ledger, create=False)
    with book or contextlib.nullcontext(), book.counting() if book else contextlib.nullcontext():
        subject = read_subject(config)
        if book is not None and (entries := _entries(book, subject, group, points)):
            return _as_fixed(points, state), entries
        plans = plans_of(points, subject, book)
        _check_model(config)
    write_json(root / STATE, state)
    final = config.privacy.final
    requests = [RunRequest.of(plan, f"{group}/{name}", flaw, final=final) for name, (plan, flaw) in plans.items()]
    book = ledger.open_ledger(config.privacy.ledger)
    assert book is not None
    try:
        with book, book.counting():
            reread = read_subject(config)  # only a ledger can identify the data, and it may be new
            policy = reread.policy
            assert policy is not None
            if reread.digest != subject.digest:
                raise Refused(
                    f"data.train ({config.data.train}) changed while the sweep was planned, so its runs would be reserved for "
                    "other records than were counted. Start again, and do not change the file meanwhile."
                )
            reserve_all(
                book, policy.dataset, requests, group=group, records=policy.records, derived_from=policy.derived_from
            )
            return _as_fixed(points, state), _entries(book, reread, group, points)
    except Refused:  # nothing was reserved, so there is no sweep to resume
        (root / STATE).unlink(missing_ok=True)
        raise


def plans_of(
    points: Sequence[Point], subject: Subject, book: ledger.Ledger | None
) -> dict[str, tuple[Plan, str | None]]:
    """The Plan of each run with differential privacy, and why the run gives no guarantee, if so."""
    if points[0].config.privacy.fit_budget:
        raise ConfigError(
            "privacy.fit_budget lowers the epsilon of one run, and a group has the epsilons that were typed. Leave it out."
        )
    terms = dataset_policy.terms(book, subject.dataset, points[0].config.privacy.derived_from)
    plans = {}
    for point in points:
        # Whether a run without differential privacy may use the data is not decided here.
        subject_of_point = subject if point.config.privacy.enabled else None
        decision = decide(point.config, subject=subject_of_point, terms=terms, fetch=True).obeyed()
        if decision.plan is not None:
            plans[point.name] = decision.plan, decision.flaw
    return plans


def _check_model(config: RunConfig) -> None:
    """Checks for the most frequent reasons why training cannot start, before anything is reserved."""
    import torch

    from dpllm.model.loading import check_length, load_tokenizer
    from dpllm.run.footprint import skeleton

    load_tokenizer(config.model)
    net = skeleton(config, torch.float32)
    guards.check_model(net)
    check_length(config, net)


def _entries(book: ledger.Ledger, subject: Subject, group: str, points: Sequence[Point]) -> dict[str, str]:
    account = book.records.charged_to(subject.dataset, points[0].config.privacy.derived_from)
    entries = {run.reservation.run: run.reservation.entry for run in book.account(account).groups().get(group, [])}
    return {point.name: entries[f"{group}/{point.name}"] for point in points if f"{group}/{point.name}" in entries}


def _as_fixed(points: Sequence[Point], state: dict[str, Any]) -> list[Point]:
    """The runs, each with the card's sentence about the group that it was fixed with."""
    fixed = []
    for point in points:
        tuning = f"{point.tuning}, fixed together before the first as tuning group {state['group']} of the ledger."
        written = point.config.card.tuning
        if written and point.name == "twin":  # keep the sentence that says how the twin differs
            tuning = f"{written} {tuning}"
        elif written:
            tuning = written
        fixed.append(replace(point, config=point.config.changed({"card.tuning": tuning})))
    return fixed


def _train(point: Point, entry: str | None, console: Console) -> None:
    """Trains one run or resumes it; a finished run is kept."""
    from dpllm.run.loop import train

    if read_status(point.run) == "completed":
        console.print(f"{point.name}: finished before")
        return
    console.print(point.name)
    goes_on = bool(point.run.checkpoints())
    start = Start(resume=True) if goes_on else Start(overwrite=True, entry=entry)
    record = train(point.config, start, console=console)
    if record.status != "completed":
        raise DpllmError(f"{point.name} was interrupted after {record.steps_taken} steps. Type --resume to go on.")


def _audit(points: Sequence[Point], console: Console) -> list[str]:
    """Audits every run with canaries, the one without privacy first, and writes all cards. Returns contradicted promises."""
    from dpllm.card.card import write_card
    from dpllm.verification.verify import undone_unless_verified

    control = next((point.run for point in points if math.isinf(point.epsilon)), None)
    contradictions = []
    for point in sorted(points, key=lambda point: -point.epsilon):
        if point.config.audit.plants:
            report = _audit_one(point, control if point.config.privacy.enabled else None)
            console.print(f"{point.name} audited: {report.verdict}")
            if report.verdict == "falsified":
                contradictions.append(f"{point.name}: {report.verdict_reason}")
        with undone_unless_verified(point.run.root):
            write_card(point.run)
    return contradictions


def _audit_one(point: Point, control: RunDir | None) -> AuditRecord:
    from dpllm.auditing.run import audit
    from dpllm.statement.audit import read_audit

    path = point.run.audit_dir(point.config.privacy.enabled) / "audit.json"
    if path.exists():  # from an earlier call; a second audit would count as one more
        return read_audit(path)
    with contextlib.suppress(ConfigError):  # the positive control may itself show no leakage
        if control is not None:
            return audit(point.run, positive_control=control)
    return audit(point.run)
