"""Releases the best of a secret number of runs: a run directory as of ``dpllm train``, whose epsilon covers the choice.

Comes in: a ``Choice``. Goes out: the run with the lowest loss on public rows. Each run records its steps in a ledger in private/,
which is deleted with the other runs. The dataset's ledger holds one reservation, which is closed before the number of runs is
drawn. run/loop.py trains the runs.

Guarantee:
    The released run is (epsilon, delta)-differentially private, at the epsilon of its Plan, against anyone who does not know the
    number of runs (``dpllm.privacy.selection``). This requires that the rows of the score are public, and that nothing else of
    the runs is revealed: no file in private/, no log, and no time that tells how long the choice took.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm import ledger
from dpllm.comparison.choice import DISTRIBUTION, Choice, Setting
from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.files import digest, write_json, write_whole
from dpllm.ledger.budgets import Reservation, reserve_all
from dpllm.privacy import accounting, selection
from dpllm.privacy.plan import Plan
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig, dump_config, load_config
from dpllm.recipe.sections import TelemetryConfig
from dpllm.run.directory import RunDir, check_directory, manifest_of
from dpllm.run.promise import Start
from dpllm.run.subject import read_subject
from dpllm.statement.run_files import COST, LedgerRecord, read_plan, read_run, read_status

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Draws:
    """The settings, tie-breakers and scores of the drawn number of runs. Stored only in private/."""

    settings: list[int]  # for each run, the index of its setting
    ties: list[int]  # for each run, a secret random number; the smaller one breaks a tie of scores
    scores: list[float | None]  # of the runs that ended, in order; None for a run that failed

    @classmethod
    def drawn(cls, settings: int, mean: float) -> Draws:
        """Draws the runs with the operating system's entropy. ``mean``: the expected number of runs."""
        runs = selection.draw(mean, DISTRIBUTION, secrets.randbits(53) / 2**53)
        return cls([secrets.randbelow(settings) for _ in range(runs)], [secrets.randbits(128) for _ in range(runs)], [])

    @property
    def best(self) -> int:
        """The number of the run with the lowest score so far; failed runs rank last."""
        return min(range(len(self.scores)), key=self._place)

    def _place(self, run: int) -> tuple[bool, float, int]:
        score = self.scores[run]
        return score is None, score or 0.0, self.ties[run]


class _ChoiceFiles:
    """Files in private/ that exist only until the choice is made."""

    def __init__(self, root: RunDir) -> None:
        """Creates no files."""
        self.folder = root.private / "choice"
        self.request = self.folder / "request.json"  # digest of the settings, name in the ledger, day
        self.ledger_record = self.folder / "ledger_record.json"  # the ledger's answer to the reservation
        self.draws = self.folder / "draws.json"
        self.ready = self.folder / "ready"  # exists once the best run has its final record and only has to be moved
        self.canaries = self.folder / "canaries.json"
        self.ledger = self.folder / "ledger.sqlite"  # records the steps of each run
        self.rehearsal = RunDir(self.folder / "rehearsal")

    def run(self, number: int) -> RunDir:
        """The directory in which a run trains."""
        return RunDir(self.folder / "runs" / str(number))

    def read_draws(self) -> Draws | None:
        """The draws; None before they are made."""
        return Draws(**_read(self.draws)) if self.draws.exists() else None

    def write_draws(self, draws: Draws) -> None:
        """Writes the draws atomically."""
        write_whole(self.draws, json.dumps(vars(draws)))


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return value


def choose(choice: Choice, *, resume: bool = False, console: Console) -> RunDir:
    """Reserves a choice, draws the number of runs, trains them, and leaves the best run in the recipe's output_dir.

    Args:
        choice: From ``plan_choice``.
        resume: Continue the choice in output_dir, with the same number of runs.
        console: Shows how to resume; shows nothing about the runs.

    Raises:
        ConfigError: The directory holds other files.
        Refused: A guard, the self-check of a setting or the budget refuses; then nothing is reserved.
        DpllmError: The choice was interrupted, or every run diverged.

    Guarantee:
        The reservation is written and closed before the number of runs is drawn, and nothing is written to the ledger after it.
        A run that diverges, or that crashes without a checkpoint, is never repeated: it gets the worst score.
    """
    root = RunDir(Path(choice.config.output_dir))
    files = _ChoiceFiles(root)
    with root.locked():
        tidied = not files.request.exists() and root.run.exists()
        if resume and tidied and files.folder.exists():  # an earlier call was killed during the removal
            shutil.rmtree(files.folder)
            return root
        request = _request(choice, root, files, resume)
        if not files.ledger_record.exists():
            _start(choice, files, request["name"])
        console.print(
            f"Reserved as {request['name']}. The runs print nothing, since their number is secret; an interrupted choice goes on "
            "with --resume.",
            soft_wrap=True,
        )
        draws = files.read_draws() or Draws.drawn(len(choice.settings), choice.mean)
        files.write_draws(draws)
        for number in range(len(draws.scores), len(draws.settings)):
            score = _score(choice, choice.settings[draws.settings[number]], files, number)
            draws = replace(draws, scores=[*draws.scores, score])
            files.write_draws(draws)
            for loser in set(range(number + 1)) - {draws.best}:
                shutil.rmtree(files.run(loser).root, ignore_errors=True)
        if draws.scores[draws.best] is None:
            raise DpllmError(
                f"{root.root}: every run diverged, so there is nothing to release; the reservation stays spent. Lower "
                "train.learning_rate in a new choice, with another --output_dir."
            )
        _release(choice, root, files, files.run(draws.best))
        files.request.unlink()  # first: a request without draws could be resumed with a second draw
        shutil.rmtree(files.folder)
    return root


def _request(choice: Choice, root: RunDir, files: _ChoiceFiles, resume: bool) -> dict[str, Any]:
    """The request of the choice; a resumed choice has to make the same request."""
    settings = {str(number): names.of_training(setting.config) for number, setting in enumerate(choice.settings)}
    digested = digest({**settings, "mean": choice.mean, "data": choice.subject.digest})
    if resume:
        if not files.request.exists():
            raise ConfigError(f"{root.root}: holds no choice to resume. Leave --resume out.")
        request = _read(files.request)
        if request["digest"] != digested:
            raise ConfigError(
                f"{root.root}: its choice has another recipe, other settings, other data or another mean, and they were fixed "
                "before the first run. Type the same again, or another --output_dir for a new choice."
            )
        return request
    if files.request.exists():
        raise ConfigError(
            f"{root.root}: already holds a choice. Type --resume to go on with it, or another --output_dir."
        )
    check_directory(choice.config, root, resume=False, overwrite=False)
    day = datetime.now(UTC).date().isoformat()
    request = {"digest": digested, "name": f"{root.root.name}-{secrets.token_hex(4)}", "day": day}
    files.folder.mkdir(parents=True, mode=0o700)
    root.private.chmod(0o700)
    write_whole(files.request, json.dumps(request))
    return request


def _start(choice: Choice, files: _ChoiceFiles, name: str) -> None:
    """Charges the choice after a rehearsal of every setting; removes all its files if it is refused."""
    try:
        if _reserved(choice, name) is None:
            for setting in choice.settings:
                _rehearse(choice, setting, files)
        write_whole(files.ledger_record, json.dumps(_charge(choice, name)))
    except (ConfigError, Refused):
        if _reserved(choice, name) is None:
            shutil.rmtree(files.folder)
        raise


def _reserved(choice: Choice, name: str) -> str | None:
    """The ledger entry of this name; None if nothing is reserved yet."""
    with ledger.open_ledger(choice.config.privacy.ledger, create=False) or contextlib.nullcontext() as book:
        if book is None:
            return None
        account = book.account(book.records.charged_to(choice.subject.dataset, choice.config.privacy.derived_from))
        return next((run.reservation.entry for run in account.runs if run.reservation.run == name), None)


def _charge(choice: Choice, name: str) -> dict[str, Any]:
    """Charges the choice as one release and closes it, before anything is drawn. Returns fields of run.json on the ledger."""
    entry = _reserved(choice, name)
    book = ledger.open_ledger(choice.config.privacy.ledger)
    assert book is not None
    with book, book.counting():
        subject = read_subject(choice.config)  # only a ledger can identify the data, and it may be new
        policy = subject.policy
        assert policy is not None
        if subject.digest != choice.subject.digest:
            raise Refused(
                f"data.train ({choice.config.data.train}) changed while the settings were tried, so the choice would be reserved "
                "for other records than were counted. Start again, and do not change the file meanwhile."
            )
        if entry is None:
            request, parent = replace(choice.request, run=name), policy.derived_from
            [claim] = reserve_all(book, policy.dataset, [request], records=policy.records, derived_from=parent)
            entry = claim.entry
        if not book.run(entry).steps:
            book.charge(entry, 1)
        book.finish(entry, "completed")
        ledger_record = Reservation(entry, book).to_json(choice.plan.delta)
        assert ledger_record is not None
        return {"ledger": ledger_record, "deviations": list(policy.deviations)}


def _candidate(choice: Choice, setting: Setting, files: _ChoiceFiles, run: RunDir) -> RunConfig:
    """The recipe of one run, which is charged to the ledger in private/ and sends no telemetry."""
    own_ledger = {
        "output_dir": str(run.root),
        "privacy.ledger": str(files.ledger),
        "privacy.dataset": choice.subject.dataset,
        "privacy.derived_from": None,
        "privacy.final": False,
        "telemetry": TelemetryConfig(),
    }
    if files.canaries.exists():  # all runs share one set of canaries, as they share the rows
        run.private.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copyfile(files.canaries, run.canaries)
    return setting.config.changed(own_ledger)


def _rehearse(choice: Choice, setting: Setting, files: _ChoiceFiles) -> None:
    """Does everything before the first step of a setting's runs, so that refusals come now; draws the canaries of all runs."""
    from rich.console import Console

    from dpllm.model import processes
    from dpllm.run.loop import prepare

    run = files.rehearsal
    shutil.rmtree(run.root, ignore_errors=True)  # left by a killed call
    config = _candidate(choice, setting, files, run)
    prepared = prepare(config, Start(), processes.join(), Console(quiet=True))
    prepared.reservation.close()
    prepared.engine.close()
    if run.canaries.exists() and not files.canaries.exists():
        shutil.copyfile(run.canaries, files.canaries)
    shutil.rmtree(run.root)


def _score(choice: Choice, setting: Setting, files: _ChoiceFiles, number: int) -> float | None:
    """Trains or resumes one run. Returns its loss on public rows in nats per token; None if it failed."""
    from rich.console import Console

    from dpllm.run.loop import train

    run = files.run(number)
    status, checkpoints = read_status(run), run.checkpoints()
    if status == "interrupted" and not checkpoints:  # it may have taken its first step, and no run is repeated
        return None
    if status != "completed":
        start = Start(resume=True) if checkpoints else Start()
        if not checkpoints:  # with the recipe of a killed call there, canaries would be drawn anew
            shutil.rmtree(run.root, ignore_errors=True)
        try:
            record = train(_candidate(choice, setting, files, run), start, console=Console(quiet=True))
        except Refused:
            if read_status(run) == "interrupted" and read_run(run).steps_taken == read_run(run).steps_planned:
                return None  # it diverged: a weight is not finite
            raise
        if record.status != "completed":
            raise DpllmError("The choice was interrupted. Type --resume to go on, with the same number of runs.")
    loss = read_run(run).metrics.public.get("eval_loss_after")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _release(choice: Choice, root: RunDir, files: _ChoiceFiles, run: RunDir) -> None:
    """Makes the best run the run of the recipe: it gets the promise of the choice, and its times are removed."""
    day = str(_read(files.request)["day"])
    if not files.ready.exists():  # otherwise an earlier call may have moved some files
        config = _released_config(choice, run)
        run.config.write_text(dump_config(config), encoding="utf-8")
        plan = Plan.of(read_plan(run), choice.event)
        second = accounting.cross_check(plan.event, plan.delta, plan.neighbouring_relation, plan.epsilon)
        write_json(run.plan, plan.model_copy(update={"cross_check": second}).to_json())
        ledger_record, record = _read(files.ledger_record), read_run(run)
        update = {
            "ledger": LedgerRecord.checked(ledger_record["ledger"]),
            "deviations": list(dict.fromkeys([*ledger_record["deviations"], *record.deviations])),
            "manifest": manifest_of(run, config, ended=True),
            "started_at": f"{day}T00:00:00+00:00",
            **dict.fromkeys(COST),
        }
        write_json(run.run, record.model_copy(update=update).to_json())
        write_whole(files.ready, "")
    _move(run, root)
    midnight = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
    for path in root.export.rglob("*"):  # an archive would keep their times
        os.utime(path, (midnight, midnight))


def _released_config(choice: Choice, run: RunDir) -> RunConfig:
    """The recipe of the best run, with the output directory, ledger and telemetry of the choice."""
    own, settings = choice.config, "; ".join(map(str, choice.settings))
    tuning = f"Each run had one of these settings, which were fixed before the first: {settings}."
    return load_config(run.config).changed(
        {
            "output_dir": own.output_dir,
            **{f"privacy.{key}": getattr(own.privacy, key) for key in ("ledger", "dataset", "derived_from", "final")},
            "telemetry": own.telemetry,
            "card.tuning": f"{own.card.tuning} {tuning}" if own.card.tuning else tuning,
        }
    )


def _move(run: RunDir, root: RunDir) -> None:
    """Moves all files of a run into another directory, run.json last."""
    for part in (run.private, run.export, run.root):
        target = root.root / part.relative_to(run.root)
        target.mkdir(exist_ok=True)
        there = sorted(part.iterdir(), key=lambda path: path == run.run) if part.is_dir() else []
        for path in there:
            if path not in (run.private, run.export) and path.name != ".lock":
                os.replace(path, target / path.name)
