"""``dpllm sweep``: several epsilons as one tuning group."""

from __future__ import annotations

import argparse

from dpllm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm sweep``."""
    parser.usage = "dpllm sweep RECIPE --privacy.epsilon 1,3,8,inf [options] [--SECTION.KEY VALUE ...]"
    parser.add_argument("recipe", nargs="?", help="YAML file; its output_dir gets one directory for each epsilon")
    parser.add_argument("--config", help="the same as RECIPE")
    parser.add_argument("--resume", action="store_true", help="go on with the sweep in output_dir; finished runs stay")
    parser.add_argument("--by", help="who answers for the list of runs in the ledger (default: this user)")
    parser.add_argument(
        "--tasks", type=int, default=0, metavar="N", help="BLEU and ROUGE-L on N evaluation rows (extra: tasks)"
    )


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command; returns its exit code."""
    from rich.console import Console

    from dpllm.cli.recipes import load_recipe
    from dpllm.comparison.compare import public_table
    from dpllm.comparison.sweep import sweep
    from dpllm.recipe.section import parse_overrides
    from dpllm.run.directory import RunDir

    path = known.config or known.recipe
    if path is None or (known.config and known.recipe):
        load_recipe(known, rest)  # says what is wrong
    if known.tasks < 0:
        raise ConfigError(f"--tasks {known.tasks}: nothing can be generated for fewer than no rows. Type 1 or more.")
    console = Console()
    comparison = sweep(
        path,
        parse_overrides(rest),
        by=known.by or _user(),
        resume=known.resume,
        tasks=known.tasks,
        console=console,
    )
    root = comparison.output.parent
    console.print(public_table([RunDir(root / run["name"]) for run in comparison.values["runs"]]))
    console.print(
        f"With what is private: written to {comparison.output}", markup=False, highlight=False, soft_wrap=True
    )
    return 0


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise ConfigError("this user has no name, and the list of runs needs one who answers: --by NAME") from None
