"""A run directory: where each value of a run is written, and the only way it is written.

Comes in: a path. Goes out: paths and JSON values. ``export/`` is the only part that may ever be uploaded; ``private/``
is readable by its owner alone.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from dpllm.errors import ConfigError, Refused
from dpllm.files import RunPaths, alone, read_json, resolved
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig, load_config
from dpllm.statement.formatting import html_table
from dpllm.statement.run_files import RunRecord, read_status


@dataclass(frozen=True)
class RunDir(RunPaths):
    """One run directory."""

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other processes from training here, whose files would then speak of two runs; a ConfigError where one does."""
        return alone(self.root, self.root / ".lock", "--output_dir")

    def make(self) -> None:
        """Creates the directories; private/ for its owner alone."""
        self.export.mkdir(parents=True, exist_ok=True)
        self.private.mkdir(parents=True, exist_ok=True)
        self.private.chmod(0o700)

    def clear(self, keep: Path | None = None) -> None:
        """Removes what a run writes and nothing else: the ledger, say, may lie in the same directory.

        The canaries go first: where no config.yaml stands beside them, they count as planned for a run that is to come.
        ``keep`` is a directory in private/ that the run that is to come reads already.
        """
        for path in (self.canaries, self.config, self.plan, self.run):
            path.unlink(missing_ok=True)
        for directory in (self.export, self.private):
            _remove(directory, keep)

    def outside(self, output: Path) -> None:
        """Refuses, with a ConfigError, a place in export/ or private/ for what is made of a run."""
        if any(resolved(output).is_relative_to(resolved(part)) for part in (self.export, self.private)):
            raise ConfigError(
                f"--output {output}: lies in a part of the run directory that is reserved for the run. Type another directory."
            )

    def load_config(self) -> RunConfig:
        """The resolved recipe of an existing run, as it trained; a record of an earlier version does not say how that was.

        Raises:
            ConfigError: The directory holds no run.
            Refused: The recipe was edited since, and would decide what is published of a run that had another.
        """
        if not self.config.exists():
            raise ConfigError(f"{self.root}: holds no run (no config.yaml). Type the output_dir of a run.")
        trained = read_json(self.run).get("training_digest") if self.run.exists() else None
        if trained not in (None, names.of_training(config := load_config(self.config))):
            raise Refused(
                f"{self.config}: was changed after the run, whose guarantee and record are about the original recipe. Restore "
                "it (after a run only the section card may change), or train again."
            )
        return config


@dataclass(frozen=True)
class Run:
    """A run that ended, or was stopped."""

    directory: RunDir
    record: RunRecord

    @property
    def status(self) -> str:
        """Completed or interrupted."""
        return self.record.status

    @property
    def epsilon(self) -> float | None:
        """What the run guarantees at ``delta``; None where it guarantees nothing."""
        return self.record.epsilon_spent if self.record.guarantee.holds else None

    @property
    def delta(self) -> float | None:
        """Of the guarantee."""
        return self.record.delta if self.record.guarantee.holds else None

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


def _remove(directory: Path, keep: Path | None) -> None:
    """Removes a directory and all in it, but what is kept and the way there."""
    if keep is None or not keep.is_relative_to(directory):
        shutil.rmtree(directory, ignore_errors=True)
    elif directory != keep:
        for part in directory.iterdir():
            if part.is_dir() and not part.is_symlink():
                _remove(part, keep)
            else:
                part.unlink()


def check_directory(config: RunConfig, run: RunDir, *, resume: bool, overwrite: bool) -> None:
    """Refuses, with a ConfigError, to lose a run, or the ledger; checkpoints that a complete run left behind go on resume."""
    status = read_status(run)
    # What a run that was refused and ``dpllm canaries plan`` leave behind may go.
    known = {run.private / "cache", run.export / "cache"} | ({run.canaries} if config.audit.plants else set())
    found = {part for folder in (run.export, run.private) if folder.is_dir() for part in folder.iterdir()}
    ledger = resolved(config.privacy.ledger) if config.privacy.ledger else None
    if ledger and any(ledger.is_relative_to(resolved(part)) for part in (run.private, run.export)):
        raise ConfigError(
            f"privacy.ledger {config.privacy.ledger} lies in a part of the run directory that a new run replaces, so the budget "
            "would be lost. Keep it elsewhere; directly in the run directory is fine."
        )
    if resume:
        if status == "completed":
            # Of a process that was killed after run.json and before it had removed them.
            shutil.rmtree(run.resume, ignore_errors=True)
            raise ConfigError(f"{run.root}: the run is complete, so there is nothing to resume.")
        if not run.checkpoints():
            raise ConfigError(
                f"{run.root}: holds no checkpoint to resume from. Start anew, with --overwrite if need be."
            )
    elif not overwrite and (run.config.exists() or status not in (None, "refused")):
        raise ConfigError(
            f"{run.root}: already holds a run, which would be lost. Type --resume to go on with it, --overwrite to replace it, "
            "or another --output_dir."
        )
    elif not overwrite and status is None and found - known:
        raise ConfigError(
            f"{run.root}: is not a run, but holds {run.export.name}/ or {run.private.name}/ of something else, which a run "
            "would replace. Type another --output_dir, or --overwrite to delete them."
        )
