"""``dpllm compare`` and ``sweep``: runs side by side, and runs made to be."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dpllm.cli.plan import AddCommand, by_this_user, parse_recipe, plain_console, show, take_recipe
from dpllm.errors import ConfigError


def add_commands(add: AddCommand) -> None:
    """The commands and their arguments."""
    compared = add("compare", compare, "two or more runs side by side: utility, leakage, cost, privacy")
    compared.add_argument("runs", nargs="+", metavar="RUN", help="run directories, at most one without privacy")
    compared.add_argument("--output", help="where the report goes (default: RUN/private/compare, or RUN/comparison)")
    compared.add_argument("--public", action="store_true", help="only what may be published; says what is left out")
    swept = add("sweep", sweep, "train a recipe at several epsilons as one tuning group, and compare")
    text = "; its output_dir gets one directory for each epsilon"
    take_recipe(swept, "sweep RECIPE --privacy.epsilon 1,3,8,inf", text)
    text = "instead: train it without canaries of text, to be published, and an audit twin with them, as one group"
    swept.add_argument("--twin", action="store_true", help=text)
    swept.add_argument("--resume", action="store_true", help="go on with the sweep in output_dir; finished runs stay")
    swept.add_argument("--by", help="who is responsible for the list of runs in the ledger (default: this user)")
    for parser in (compared, swept):
        text = "BLEU on N evaluation prompts (extra: tasks)"
        parser.add_argument("--tasks", type=int, default=0, metavar="N", help=text)
    compared.add_argument("--no-intervals", action="store_true", help="load no model: held-out figures as recorded")


def _check_tasks(known: argparse.Namespace) -> None:
    if known.tasks < 0:
        raise ConfigError(f"--tasks {known.tasks}: cannot be negative. Type 1 or more.")


def compare(known: argparse.Namespace, rest: list[str]) -> int:
    """Compares runs and prints the table."""
    from dpllm.comparison.compare import compare as side_by_side
    from dpllm.run.directory import RunDir

    _check_tasks(known)
    comparison = side_by_side(
        [RunDir(Path(path)) for path in known.runs],
        Path(known.output) if known.output else None,
        public=known.public,
        tasks=known.tasks,
        losses=not known.no_intervals,
        console=plain_console(stderr=True),
    )
    found = comparison.values if known.json else comparison.table()
    return show(known, found, f"Written to {comparison.output}")


def sweep(known: argparse.Namespace, rest: list[str]) -> int:
    """Trains a recipe at several epsilons and prints what may stand in a job's log."""
    from dpllm.comparison.compare import public_comparison
    from dpllm.comparison.sweep import sweep as train_all
    from dpllm.run.directory import RunDir

    path, overrides = parse_recipe(known, rest)
    _check_tasks(known)
    by = known.by or by_this_user("the list of runs needs one who answers")
    console = plain_console(stderr=known.json)
    if known.twin:
        return _twins(known, path, overrides, by)
    comparison = train_all(path, overrides, by=by, resume=known.resume, tasks=known.tasks, console=console)
    root = comparison.output.parent
    values, table = public_comparison([RunDir(root / run["name"]) for run in comparison.values["runs"]])
    return show(known, values if known.json else table, f"With private figures: written to {comparison.output}")


def _twins(known: argparse.Namespace, path: str, overrides: dict[str, Any], by: str) -> int:
    from dpllm.comparison.sweep import trained
    from dpllm.comparison.twin import twins
    from dpllm.statement.run_files import read_run

    if known.tasks:
        raise ConfigError("--tasks compares runs, but a run and its twin are not compared. Leave it out.")
    points, root = twins(path, overrides)
    with trained(points, root, by=by, resume=known.resume, console=plain_console(stderr=known.json)) as runs:
        record = read_run(runs[0])
    assert record.ledger is not None
    group = record.ledger.group
    assert group is not None
    told = (
        f"Together epsilon {group.epsilon:.4f} at delta {group.delta:g}. Publish {runs[0].export}; keep {runs[1].root}."
    )
    return show(known, {"runs": [str(run.root) for run in runs], "together": group.to_json()} if known.json else told)
