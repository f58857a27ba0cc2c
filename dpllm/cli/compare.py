"""``dpllm compare`` and ``sweep``: runs side by side, and runs made to be."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dpllm.cli.plan import (
    CONSTANT_RATE,
    AddCommand,
    check_rate,
    parse_choice,
    parse_recipe,
    plain_console,
    show,
    take_choice,
    take_final,
    take_recipe,
)
from dpllm.errors import AuditContradiction, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from dpllm.run.directory import RunDir


def add_commands(add: AddCommand) -> None:
    """The commands and their arguments."""
    compared = add("compare", compare, "two or more runs side by side: utility, leakage, cost, privacy")
    compared.add_argument("runs", nargs="+", metavar="RUN", help="run directories, at most one without privacy")
    compared.add_argument("--output", help="where the report goes (default: RUN/private/compare, or RUN/comparison)")
    compared.add_argument("--public", action="store_true", help="only what may be published; says what is left out")
    swept = add("sweep", sweep, "train a recipe at several epsilons as one tuning group, and compare")
    text = "; its output_dir gets one directory for each epsilon"
    take_recipe(swept, "sweep RECIPE --privacy.epsilon 1,3,8,inf", text)
    take_final(swept)
    text = "instead: train it without canaries of text, to be published, and an audit twin with them, as one group"
    swept.add_argument("--twin", action="store_true", help=text)
    swept.add_argument("--constant-rate", action="store_true", help=CONSTANT_RATE)
    take_choice(swept)
    swept.add_argument("--resume", action="store_true", help="go on with the sweep in output_dir; finished runs stay")
    for parser in (compared, swept):
        text = "BLEU on N evaluation prompts (extra: tasks)"
        parser.add_argument("--tasks", type=int, default=0, metavar="N", help=text)


def compare(known: argparse.Namespace, rest: list[str]) -> int:
    """Compares runs and prints the table."""
    from dpllm.comparison.compare import compare as side_by_side
    from dpllm.run.directory import RunDir

    _check_tasks(known)
    output, runs = Path(known.output) if known.output else None, [RunDir(Path(path)) for path in known.runs]
    _measure(known, runs, plain_console(stderr=True), public=known.public)
    comparison = side_by_side(runs, output, public=known.public)
    figures = comparison.values if known.json else comparison.table()
    return show(known, figures, f"Written to {comparison.output}")


def sweep(known: argparse.Namespace, rest: list[str]) -> int:
    """Trains a group of runs and prints what may stand in a job's log."""
    from dpllm.comparison import shown
    from dpllm.comparison.compare import compare as side_by_side
    from dpllm.comparison.compare import look
    from dpllm.comparison.sweep import at_epsilons, train_group, twins
    from dpllm.statement.run_files import read_run

    _check_tasks(known)
    console = plain_console(stderr=known.json)
    check_rate(known)
    if known.choose:
        return _choose(known, rest, console)
    recipe = parse_recipe(known, rest)
    points = twins(*recipe, constant_rate=known.constant_rate) if known.twin else at_epsilons(*recipe)
    contradictions = train_group(points, resume=known.resume, console=console)
    runs = [point.run for point in points]
    if known.twin:  # whose canaries differ, so that nothing could be compared
        charged = read_run(runs[0]).ledger
        assert charged is not None
        assert charged.group is not None
        total = f"Together epsilon {charged.group.epsilon:.4f} at delta {charged.group.delta:g}."
        both = {"runs": [str(run.root) for run in runs], "together": charged.group.to_json()}
        show(known, both if known.json else total, f"Publish {runs[0].export}; keep {runs[1].root}.")
    else:
        _measure(known, runs, console)
        comparison = side_by_side(runs, runs[0].root.parent / "compare")
        public, _ = look(runs, public=True)
        show(
            known,
            public if known.json else shown.table(public),
            f"With private figures: written to {comparison.output}",
        )
    if contradictions:
        raise AuditContradiction("; ".join(contradictions))
    return 0


def _choose(known: argparse.Namespace, rest: list[str], console: Console) -> int:
    """Trains a secret number of runs, keeps the best and writes its card."""
    from dpllm.card.card import write_card
    from dpllm.comparison.choose import choose
    from dpllm.verification.verify import undone_unless_verified

    if known.twin or known.tasks:
        raise ConfigError(
            "--choose releases one run, which is neither compared nor has a twin. Leave --twin and --tasks out."
        )
    choice = parse_choice(known, rest)
    run = choose(choice, resume=known.resume, console=console)
    with undone_unless_verified(run.root):
        write_card(run)
    return show(
        known,
        choice.to_json() | {"run": str(run.root)} if known.json else "The best run is in its place, with a card.",
        f"Publish {run.export} at a time that was fixed beforehand: how long the choice took tells how many runs there were.",
    )


def _check_tasks(known: argparse.Namespace) -> None:
    if known.tasks < 0:
        raise ConfigError(f"--tasks {known.tasks}: cannot be negative. Type 1 or more.")
    if known.tasks and known.command == "sweep" and known.twin:
        raise ConfigError("--tasks compares runs, but a run and its twin are not compared. Leave it out.")


def _measure(known: argparse.Namespace, runs: list[RunDir], console: Console, *, public: bool = False) -> None:
    """Scores what the runs write, if --tasks asks for it, once it is certain that they can be compared."""
    if known.tasks:
        from dpllm.comparison.compare import look
        from dpllm.comparison.tasks import measure

        look(runs, public=public)
        measure(runs, known.tasks, console)
