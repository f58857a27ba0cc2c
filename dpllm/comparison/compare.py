"""Runs side by side: what privacy cost in utility, and what it bought.

Comes in: two or more run directories, in any order: at most one without differential privacy, and any number with it. Goes out:
a table, and JSON, Markdown and pictures. They are private, because the audit and the held-out figures of a run without
differential privacy are un-noised, unless a public comparison was asked for, which leaves out whatever may not be published.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.comparison import compared_runs, rows, values
from dpllm.comparison.rows import Row
from dpllm.errors import ConfigError
from dpllm.files import resolved, write_json, write_whole
from dpllm.run.directory import RunDir
from dpllm.statement.fields import Json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FILES = ("comparison.json", "comparison.md", "comparison.png", "utility.png", "leakage.png")


@dataclass(frozen=True)
class Comparison:
    """Runs that differ in privacy, adapter or training alone.

    Attributes:
        figures: Every figure.
        output: Where the files lie.
        files: What was written there.
    """

    figures: values.Figures
    output: Path
    files: tuple[Path, ...]

    def __repr__(self) -> str:
        return f"Comparison in {self.output}: {', '.join(path.name for path in self.files)}"

    @property
    def rows(self) -> tuple[Row, ...]:
        """The figures as text, in the order of the table."""
        return rows.rows(self.figures)

    @property
    def values(self) -> Json:
        """Every figure, as comparison.json holds it."""
        return self.figures.to_json()

    @property
    def differences(self) -> dict[str, dict[str, Any]]:
        """What else differs: dotted key -> run -> value."""
        return dict(self.values["differences"])

    def table(self) -> Table:
        """The measures as a table for the terminal."""
        return rows.table(self.figures)


def compare(
    runs: Sequence[RunDir],
    output: Path | None = None,
    *,
    public: bool = False,
    tasks: int = 0,
    losses: bool = False,
    console: Console | None = None,
) -> Comparison:
    """Compares runs and writes ``comparison.json``, ``comparison.md``, up to three pictures, and metrics where a recipe asks.

    Args:
        runs: Two or more, on the same model, data, evaluation and canaries: at most one with ``privacy.enabled: false``.
        output: Directory to write to; None: ``private/compare`` of the first run with differential privacy, or, of a public
            comparison, ``comparison`` in its run directory.
        public: Write what may be published: figures of public evaluation data and released weights, audits of runs with
            differential privacy, and of the run without only what was trained on public data. What is left out is said.
        tasks: Evaluation prompts for scores of what is written, see ``tasks.measure``; 0: as they were measured before.
        losses: Compute the losses by example that intervals rest on, where they are not known; likewise.
        console: Where to say what is computed.

    Raises:
        ConfigError: The runs cannot be compared, see ``compared_runs.read`` and ``compared_runs.differences``; or ``output``
            lies in a directory that is published as it was verified.
    """
    if tasks or losses:
        from dpllm.comparison.tasks import measure

        with _readable(runs):
            _checked(runs, output, public)  # refused before anything long is computed
        measure(runs, rows=tasks, losses=losses, console=console)
    with _readable(runs):
        sides, differences, target = _checked(runs, output, public)
        found = values.figures(sides, differences, public=public)
        return Comparison(found, target, _write(found, target))


def public_comparison(runs: Sequence[RunDir]) -> tuple[Json, Table]:
    """Figures and table of a public comparison, without writing one: for standard output, which goes into job logs.

    Raises:
        ConfigError: See ``compare``.
    """
    with _readable(runs):
        sides, differences, _ = _checked(runs, None, True)
        found = values.figures(sides, differences, public=True)
        return found.to_json(), rows.table(found)


class DPComparison:
    """Runs with differential privacy beside the one without, for notebooks and scripts.

    Args:
        baseline_dir: Run directory without differential privacy; None: there is none.
        dp_dir: Run directory with differential privacy, or several.
        public: Leave out what may not be published.
    """

    def __init__(
        self,
        baseline_dir: str | os.PathLike[str] | None = None,
        dp_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        *,
        public: bool = False,
    ) -> None:
        """Nothing is read yet."""
        several = [dp_dir] if isinstance(dp_dir, str | os.PathLike) else list(dp_dir)
        first = [] if baseline_dir is None else [baseline_dir]
        self.runs = [RunDir(Path(path)) for path in (*first, *several)]
        self.public = public

    def compare(self, output: str | os.PathLike[str] | None = None) -> Comparison:
        """The comparison; see ``compare``."""
        return compare(self.runs, None if output is None else Path(output), public=self.public)

    def generate_report(self, output: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
        """Writes JSON, Markdown and pictures, and returns the files; see ``compare``."""
        return self.compare(output).files


@contextlib.contextmanager
def _readable(runs: Sequence[RunDir]) -> Iterator[None]:
    """Files that lack a key, or hold another kind of value than dpllm writes, are somebody else's."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{', '.join(str(run.root) for run in runs)}: a file of one of them does not have the form that this version writes "
            f"({type(error).__name__}: {error}), so they cannot be compared. It is damaged, or of another version: train or "
            "audit that run again."
        ) from error


def _checked(
    runs: Sequence[RunDir], output: Path | None, public: bool
) -> tuple[list[compared_runs.Side], dict[str, list[Any]], Path]:
    """The runs, what else differs between them, and where the result goes."""
    sides = compared_runs.read(runs, public=public)
    run = sides[0].run  # the one without differential privacy comes last
    target = output or (run.root / "comparison" if public else run.private / "compare")
    for folder in (resolved(target), *resolved(target).parents):
        if folder.name == "export" and (folder.parent / "config.yaml").exists():
            raise ConfigError(
                f"{target}: lies in export/, which is published as verified, while a comparison shows other runs too. Choose a "
                "directory outside export/."
            )
    return sides, compared_runs.differences(sides, public=public), target


def _write(found: values.Figures, target: Path) -> tuple[Path, ...]:
    from dpllm.comparison import figures

    shown = [{**vars(row), "cells": [cell.line() for cell in row.cells]} for row in rows.rows(found)]
    whole = {**found.to_json(), "columns": rows.headings(found.sides), "rows": shown}
    try:
        target.mkdir(mode=0o755 if found.public else 0o700, parents=True, exist_ok=True)
        for name in FILES:  # of an earlier comparison
            (target / name).unlink(missing_ok=True)
        write_json(target / "comparison.json", whole)
        pictures = figures.draw(found, target)
        write_whole(target / "comparison.md", rows.markdown(found, pictures))
        files = tuple(target / name for name in FILES if (target / name).exists())
        for path in files:
            path.chmod(0o644 if found.public else 0o600)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written to ({error.strerror}). Type another --output.") from None
    return files
