"""``dpllm compare`` and ``sweep``: compares existing runs, or trains runs to compare them."""

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
    """Adds the commands and their options."""
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


def compare(args: argparse.Namespace, overrides: list[str]) -> int:
    """Compares runs and prints the table."""
    from dpllm.comparison.compare import compare as side_by_side
    from dpllm.run.directory import RunDir

    _check_tasks(args)
    output, runs = Path(args.output) if args.output else None, [RunDir(Path(path)) for path in args.runs]
    _measure(args, runs, plain_console(stderr=True), public=args.public)
    comparison = side_by_side(runs, output, public=args.public)
    figures = comparison.values if args.json else comparison.table()
    return show(args, figures, f"Written to {comparison.output}")


def sweep(args: argparse.Namespace, overrides: list[str]) -> int:
    """Trains a group of runs and prints only figures that may be published, since a job's log is often shared."""
    from dpllm.comparison import shown
    from dpllm.comparison.compare import collect_figures
    from dpllm.comparison.compare import compare as side_by_side
    from dpllm.comparison.sweep import at_epsilons, train_group, twins
    from dpllm.statement.run_files import read_run

    _check_tasks(args)
    console = plain_console(stderr=args.json)
    check_rate(args)
    if args.choose:
        return _choose(args, overrides, console)
    recipe = parse_recipe(args, overrides)
    points = twins(*recipe, constant_rate=args.constant_rate) if args.twin else at_epsilons(*recipe)
    contradictions = train_group(points, resume=args.resume, console=console)
    runs = [point.run for point in points]
    if args.twin:  # a run and its twin have different canaries, so they cannot be compared
        charged = read_run(runs[0]).ledger
        assert charged is not None
        assert charged.group is not None
        total = f"Together epsilon {charged.group.epsilon:.4f} at delta {charged.group.delta:g}."
        figures = {"runs": [str(run.root) for run in runs], "together": charged.group.to_json()}
        show(args, figures if args.json else total, f"Publish {runs[0].export}; keep {runs[1].root}.")
    else:
        _measure(args, runs, console)
        comparison = side_by_side(runs, runs[0].root.parent / "compare")
        public, _ = collect_figures(runs, public=True)
        show(
            args, public if args.json else shown.table(public), f"With private figures: written to {comparison.output}"
        )
    if contradictions:
        raise AuditContradiction("; ".join(contradictions))
    return 0


def _choose(args: argparse.Namespace, overrides: list[str], console: Console) -> int:
    """Trains a secret number of runs, keeps the best and writes its card."""
    from dpllm.card.card import write_card
    from dpllm.comparison.choose import choose
    from dpllm.verification.verify import undone_unless_verified

    if args.twin or args.tasks:
        raise ConfigError(
            "--choose releases one run, which has no twin and is not compared. Leave --twin and --tasks out."
        )
    choice = parse_choice(args, overrides)
    run = choose(choice, resume=args.resume, console=console)
    with undone_unless_verified(run.root):
        write_card(run)
    return show(
        args,
        choice.to_json() | {"run": str(run.root)} if args.json else "The best run is in its place, with a card.",
        f"Publish {run.export} at a time that was fixed beforehand: how long the choice took tells how many runs there were.",
    )


def _check_tasks(args: argparse.Namespace) -> None:
    if args.tasks < 0:
        raise ConfigError(f"--tasks {args.tasks}: cannot be negative. Type 1 or more.")
    if args.tasks and args.command == "sweep" and args.twin:
        raise ConfigError("--tasks compares runs, but a run and its twin are not compared. Leave it out.")


def _measure(args: argparse.Namespace, runs: list[RunDir], console: Console, *, public: bool = False) -> None:
    """With --tasks, scores the texts of the runs, after checking that they can be compared."""
    if args.tasks:
        from dpllm.comparison.compare import collect_figures
        from dpllm.comparison.tasks import measure

        collect_figures(runs, public=public)
        measure(runs, args.tasks, console)
