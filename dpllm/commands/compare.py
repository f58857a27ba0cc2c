"""``dpllm compare``: runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm compare``."""
    parser.add_argument("baseline", help="run directory without differential privacy")
    parser.add_argument("run", help="run directory with differential privacy")
    parser.add_argument("--output", help="where table and figure go (default: RUN/private/compare)")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command; returns its exit code."""
    from rich.console import Console

    from dpllm.report.compare import compare
    from dpllm.rundir import RunDir

    output = Path(known.output) if known.output else None
    comparison = compare(RunDir(Path(known.baseline)), RunDir(Path(known.run)), output)
    Console().print(comparison.table())
    return 0
