"""A run directory: where each value of a run is written, and whether its files are still as the run wrote them.

Comes in: a path. Goes out: paths, the manifest of a run's files, and a ``Run`` whose files ``open_run`` has compared with the
manifest. Only ``export/`` may ever be uploaded; only the owner can read ``private/``.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryPlan
from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.files import RunPaths, alone, digest, of_model, sha256, write_whole
from dpllm.ledger import open_ledger
from dpllm.privacy.plan import Plan
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig, load_config
from dpllm.statement.audit import AuditRecord, read_audit
from dpllm.statement.formatting import html_table
from dpllm.statement.run_files import RunRecord, read_plan, read_run, read_status


@dataclass(frozen=True)
class RunDir(RunPaths):
    """One run directory."""

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other processes from training here, which would mix the files of two runs; a ConfigError if one already does."""
        return alone(self.root, self.root / ".lock", "--output_dir")

    def make(self) -> None:
        """Creates the directories; only the owner can read private/."""
        self.export.mkdir(parents=True, exist_ok=True)
        self.private.mkdir(parents=True, exist_ok=True)
        self.private.chmod(0o700)

    def clear(self, keep: Path | None = None) -> None:
        """Removes what a run writes and nothing else: the same directory may hold the ledger, for example.

        The canaries go first: without a config.yaml they would count as planned for the next run. ``keep`` is a directory in
        private/ that the next run already reads.
        """
        for path in (self.canaries, self.config, self.plan, self.run, self.registry):
            path.unlink(missing_ok=True)
        for directory in (self.export, self.private):
            _remove(directory, keep)

    def outside(self, output: Path) -> None:
        """Refuses, with a ConfigError, an output in export/ or private/."""
        if self.replaces(output):
            raise ConfigError(
                f"--output {output}: lies in a part of the run directory that is reserved for the run. Type another directory."
            )

    def load_config(self) -> RunConfig:
        """The resolved recipe of an existing run, as it trained.

        Raises:
            ConfigError: The directory holds no run.
            Refused: The recipe was edited since, so what is published of the run would follow another recipe.
        """
        if not self.config.exists():
            raise ConfigError(f"{self.root}: holds no run (no config.yaml). Type the output_dir of a run.")
        config = load_config(self.config)
        if self.run.exists() and read_run(self).manifest.get(self.config.name) != names.of_training(config):
            raise Refused(
                f"{self.config}: was changed after the run, whose guarantee and record are about the original recipe. Restore "
                "it (after a run only the section card may change), or train again."
            )
        return config


@dataclass(frozen=True)
class Run:
    """A run that ended or was stopped."""

    directory: RunDir
    record: RunRecord
    config: RunConfig

    @cached_property
    def plan(self) -> Plan | None:
        """The promise; None without differential privacy."""
        return read_plan(self.directory) if self.config.privacy.enabled else None

    @cached_property
    def canaries(self) -> CanaryPlan | None:
        """The planted and unplanted canaries with every coin; None if none were planned, or without private/."""
        path = self.directory.canaries
        return canaries.load(path) if path.exists() else None

    @property
    def audit(self) -> AuditRecord | None:
        """The audit that the card shows, or that is in private/ if the run has no differential privacy; None without an audit."""
        path = self.directory.audit_dir(self.config.privacy.enabled) / "audit.json"
        return read_audit(path) if path.exists() else None

    @property
    def status(self) -> str:
        """Completed or interrupted."""
        return self.record.status

    @property
    def epsilon(self) -> float | None:
        """Epsilon of the guarantee at ``delta``; None if the run guarantees nothing."""
        return self.plan.epsilon if self.plan and self.record.guarantee.holds else None

    @property
    def delta(self) -> float | None:
        """Delta of the guarantee; None if the run guarantees nothing."""
        return self.plan.delta if self.plan and self.record.guarantee.holds else None

    @property
    def export_dir(self) -> Path:
        """The only directory to publish."""
        return self.directory.export

    def _in_words(self) -> dict[str, str]:
        record, holds = self.record, self.record.guarantee.holds
        return {
            "status": record.status,
            "guarantee": f"epsilon {self.epsilon:.3f} at delta {self.delta:g}"
            if holds
            else f"none: {record.guarantee.reason}",
            "steps": f"{record.steps_taken} of {record.steps_planned}",
            "to publish": str(self.export_dir),
        }

    def __repr__(self) -> str:
        return "Run: " + ", ".join(f"{name} {words}" for name, words in self._in_words().items())

    def _repr_html_(self) -> str:
        return html_table(f"Run {self.directory.root}", self._in_words())


def manifest_of(run: RunDir, config: RunConfig, *, ended: bool) -> dict[str, str]:
    """The manifest in run.json of the files that a run wrote: path in the run directory -> digest.

    The digest of config.yaml covers only what trained, since the card's words may change; that of plan.json covers its content.
    Files of private/ have a keyed digest: with a plain one, anybody who guesses the private rows could confirm the guess.

    Args:
        run: Its directory.
        config: Its recipe.
        ended: Whether to list all files, or only those that exist before the first step.
    """
    if not run.key.exists():
        write_whole(run.key, secrets.token_hex(32), mode=0o600)
    before = [run.config, run.plan, run.canaries]
    private = [run.rows, run.groups, run.projections, run.along, run.references, run.layers, run.metrics, run.summary]
    export = sorted(path for path in run.export.rglob("*") if path.is_file())
    written = [path for path in (before + private + export if ended else before) if path.exists()]
    return {path.relative_to(run.root).as_posix(): _digest(run, path, config) for path in written}


def _digest(run: RunDir, path: Path, config: RunConfig) -> str:
    if path == run.config:
        return names.of_training(config)
    if path == run.plan:
        return read_plan(run).digest
    if not path.is_relative_to(run.private):
        return sha256(path)
    key = run.key.read_bytes() if run.key.exists() else b""
    return hmac.new(key, sha256(path).encode(), "sha256").hexdigest()


def open_run(run: RunDir, *, goes_on: bool = False, released: bool = False) -> Run:
    """A run whose existing files are all as the run wrote them: nothing derived from it needs another check.

    Files may be missing, such as private/ in a copy. The manifest is compared with the ledger's if this machine has the ledger.
    With ``goes_on``, only files from before the first step are compared: the rest was being written when the run stopped. With
    ``released``, nothing in private/ is read.

    Raises:
        ConfigError: The directory holds no run, a file other than the recipe was changed, or one was added to the weights.
        Refused: The recipe was changed; or the ledger shows that files and manifest were.
    """
    config, record = run.load_config(), read_run(run)
    written = {run.root / name: digest for name, digest in record.manifest.items()}
    added = [run.plan]
    if goes_on:
        written = {path: digest for path, digest in written.items() if path in (run.plan, run.canaries)}
    elif released:
        written = {path: digest for path, digest in written.items() if not path.is_relative_to(run.private)}
    # Without artifacts the run stopped before it exported; files there are from an earlier attempt.
    if record.artifacts and not goes_on:
        listed = [path.relative_to(run.export).as_posix() for path in run.export.rglob("*")]
        added += [run.export / name for name in of_model(listed)]
    changed = [path for path, digest in written.items() if path.exists() and _digest(run, path, config) != digest]
    changed += [path for path in added if path.exists() and path not in written]
    if changed:
        first = ", ".join(sorted(path.relative_to(run.root).as_posix() for path in changed)[:3])
        raise ConfigError(
            f"{run.root}: {first} {'is' if len(changed) == 1 else 'are'} not what the run wrote, so every statement about the "
            "run would be about other files. Restore them, or train again."
        )
    if not goes_on:
        _ask_ledger(run, config, record)
    return Run(run, record, config)


def _ask_ledger(run: RunDir, config: RunConfig, record: RunRecord) -> None:
    """Raises Refused if the run's reservation was closed with another manifest."""
    if record.ledger is None or not record.artifacts:
        return
    closed = None
    with (
        contextlib.suppress(DpllmError),
        open_ledger(config.privacy.ledger, create=False) or contextlib.nullcontext() as ledger,
    ):
        closed = ledger.closed_with(str(record.ledger.entry)) if ledger else None
    if closed not in (None, digest(record.manifest)):
        raise Refused(
            f"{run.run}: its manifest is not the one that the ledger recorded when the run ended, so files of the run and the "
            "manifest were changed together. Restore them, or train again.",
            reason="tampered",
        )


def _remove(directory: Path, keep: Path | None) -> None:
    if keep is None or not keep.is_relative_to(directory):
        shutil.rmtree(directory, ignore_errors=True)
    elif directory != keep:
        for part in directory.iterdir():
            if part.is_dir() and not part.is_symlink():
                _remove(part, keep)
            else:
                part.unlink()


def no_checkpoint(run: RunDir) -> ConfigError:
    """The error of a run without a checkpoint."""
    return ConfigError(
        f"{run.root}: holds no checkpoint to resume from; what the run reserved stays charged, except for steps that dpllm "
        "ledger reconcile gives back. Start anew with --overwrite, which reserves once more."
    )


def check_directory(config: RunConfig, run: RunDir, *, resume: bool, overwrite: bool) -> None:
    """Refuses, with a ConfigError, to overwrite a run or the ledger; resuming a complete run removes its leftover checkpoints."""
    status = read_status(run)
    # What a refused run left behind may be removed, and so may canaries planned for this run.
    expected = {run.private / "cache", run.export / "cache"} | ({run.canaries} if config.audit.plants else set())
    parts = {part for folder in (run.export, run.private) if folder.is_dir() for part in folder.iterdir()}
    if config.privacy.ledger and run.replaces(config.privacy.ledger):
        raise ConfigError(
            f"privacy.ledger {config.privacy.ledger} lies in a part of the run directory that a new run replaces, so the budget "
            "would be lost. Keep it elsewhere; directly in the run directory is fine."
        )
    if resume:
        if status == "completed":
            # The process was killed after it wrote run.json and before it removed them.
            shutil.rmtree(run.resume, ignore_errors=True)
            raise ConfigError(f"{run.root}: the run is complete, so there is nothing to resume.")
        if not run.checkpoints():
            raise no_checkpoint(run)
    elif not overwrite and (run.config.exists() or status not in (None, "refused")):
        raise ConfigError(
            f"{run.root}: already holds a run, which would be lost. Type --resume to continue it, --overwrite to replace it, or "
            "another --output_dir."
        )
    elif not overwrite and status is None and parts - expected:
        raise ConfigError(
            f"{run.root}: is not a run, but holds {run.export.name}/ or {run.private.name}/ of something else, which a run "
            "would replace. Type another --output_dir, or --overwrite to delete them."
        )
