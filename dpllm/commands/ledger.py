"""``dpllm ledger``: the privacy budget of each dataset, across all runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Actions and what they take."""
    parser.add_argument("action", choices=["show", "init"], help="show: a table; init: set a dataset's budget, once")
    parser.add_argument("dataset", nargs="?", help="name of the dataset")
    parser.add_argument("--ledger", help="path of the ledger (default: in the user's data directory)")
    parser.add_argument("--epsilon", type=float, help="init: budget")
    parser.add_argument("--delta", type=float, help="init: delta of the budget")
    parser.add_argument("--unit", default="example", help="init: privacy unit (default: example)")
    parser.add_argument(
        "--relation", default="zero_out", choices=["zero_out", "add_or_remove_one"], help="init: neighbouring relation"
    )


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Does one action."""
    from rich.console import Console
    from rich.table import Table

    from dpllm import ledger

    path = Path(known.ledger) if known.ledger else ledger.default_path()
    if known.action == "init":
        if known.dataset is None or known.epsilon is None or known.delta is None:
            raise ConfigError("name dataset and budget: dpllm ledger init NAME --epsilon 8 --delta 1e-5")
        with ledger.Ledger(path) as book:
            book.set_budget(known.dataset, known.epsilon, known.delta, known.unit, known.relation)
        print(f"{known.dataset}: budget epsilon {known.epsilon:g} at delta {known.delta:g} per {known.unit}, in {path}")
        return 0
    if not path.exists():
        raise ConfigError(f"{path}: no ledger there yet; the first private run makes one. Name another with --ledger.")
    with ledger.Ledger(path) as book:
        table = Table(
            "dataset",
            "run",
            "steps",
            "status",
            "epsilon",
            "delta",
            title=f"Ledger {path}",
            caption=_ledger_caption(book),
        )
        for name in [known.dataset] if known.dataset else book.datasets():
            for run, steps, status in book.runs(name):
                cost = (f"{run.epsilon:.3f}", f"{run.delta:g}")
                table.add_row(name, run.run, f"{steps}/{run.num_steps}", status, *cost)
            budget = book.budget(name)
            limit = f"of {budget.epsilon:g}" if budget else "no budget set"
            delta = f"{budget.delta:g}" if budget else ""
            table.add_row(
                name, "[bold]all runs, composed[/]", "", limit, f"{book.spent(name):.3f}", delta, end_section=True
            )
        Console().print(table)
    return 0


def _ledger_caption(book: Any) -> str:
    problems = book.verify()
    head = book.head()
    return problems[0] if problems else f"{head['count']} entries, chain unbroken, head {head['hash'][:12]}"
