"""``dpllm compare``: runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpllm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm compare``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, at most one without privacy")
    parser.add_argument("--output", help="where the report goes (default: RUN/private/compare, or RUN/comparison)")
    parser.add_argument("--public", action="store_true", help="only what may be published; says what is left out")
    parser.add_argument(
        "--tasks", type=int, default=0, metavar="N", help="BLEU and ROUGE-L on N evaluation rows (extra: tasks)"
    )
    parser.add_argument("--no-intervals", action="store_true", help="load no model: held-out figures as recorded")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command; returns its exit code."""
    from rich.console import Console

    from dpllm.comparison.compare import compare
    from dpllm.run.directory import RunDir

    if known.tasks < 0:
        raise ConfigError(f"--tasks {known.tasks}: nothing can be generated for fewer than no rows. Type 1 or more.")
    comparison = compare(
        [RunDir(Path(path)) for path in known.runs],
        Path(known.output) if known.output else None,
        public=known.public,
        tasks=known.tasks,
        losses=not known.no_intervals,
        console=Console(stderr=True),
    )
    console = Console()
    console.print(comparison.table())
    console.print(f"Written to {comparison.output}", markup=False, highlight=False, soft_wrap=True)
    return 0
