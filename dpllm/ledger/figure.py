"""The burn-down of each dataset: what is left of its budget after every entry, as a picture.

Comes in: a ledger. Goes out: a PNG. Must not decide anything.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dpllm.errors import ConfigError
from dpllm.ledger import gates
from dpllm.ledger.book import Ledger
from dpllm.ledger.values import Account
from dpllm.privacy.accounting import compose, stated

INK, PAPER, PLD, FILTER = "#333333", "#ffffff", "#3b6fb6", "#c05a2b"
MOST_POINTS = 40


def burn_down(book: Ledger, datasets: list[str], path: Path) -> Path:
    """Draws one panel for each dataset: epsilon spent after each run, by each rule, and the budget.

    Args:
        book: The ledger.
        datasets: Their names.
        path: Where the PNG goes.

    Raises:
        ConfigError: None of the datasets has a run, or the picture cannot be written.
    """
    accounts = [account for account in (book.account(name) for name in datasets) if account.runs]
    if not accounts:
        raise ConfigError(
            f"{book.location}: no run is reserved for {', '.join(datasets) or 'any dataset'}, so nothing burnt."
        )
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (7.5, 2.9 * len(accounts) + 0.3)
    figure, axes = pyplot.subplots(len(accounts), 1, figsize=size, squeeze=False, layout="constrained", facecolor=PAPER)
    for axis, account in zip(axes[:, 0], accounts, strict=True):
        numbers, planned, filtered = _spent(account)
        axis.step(numbers, planned, where="post", color=PLD, marker="o", markersize=4, label="all runs by PLD")
        if filtered:
            axis.step(numbers, filtered, where="post", color=FILTER, marker="s", markersize=4, label="Renyi filter")
        budget = account.budget
        if budget:
            axis.axhline(budget.epsilon, color=INK, linestyle="--", linewidth=1)
            gate = "the filter gates" if filtered else "PLD gates"
            axis.annotate(f"budget {budget.epsilon:g}, {gate}", (0.01, budget.epsilon), xytext=(0, -4), va="top",
                          xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=9, color=INK)  # fmt: skip
        axis.set_title(account.dataset.replace("$", r"\$"), loc="left", fontsize=10, color=INK)
        axis.set_xlabel("runs reserved", color=INK)
        delta = budget.delta if budget else max(run.reservation.delta for run in account.runs)
        axis.set_ylabel(f"epsilon spent\nat delta {delta:g}", color=INK)
        axis.set_xlim(left=0)
        axis.set_ylim(0, 1.12 * max([*planned, *filtered, budget.epsilon if budget else 0]))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9, loc="lower right")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the figure cannot be written there ({error}). Type another --output.") from None
    finally:
        pyplot.close(figure)
    return path


def _spent(account: Account) -> tuple[list[int], list[float], list[float]]:
    """Runs so far, and epsilon by PLD and by the filter; at most MOST_POINTS of them."""
    total = len(account.runs)
    numbers = sorted({round(total * point / MOST_POINTS) for point in range(MOST_POINTS + 1)} if total > MOST_POINTS
                     else range(total + 1))  # fmt: skip
    budget, first = account.budget, account.runs[0].reservation
    delta = budget.delta if budget else max(run.reservation.delta for run in account.runs)
    planned, filtered = [], []
    for number in numbers:
        upto = replace(account, runs=account.runs[:number])
        events = upto.events()
        planned.append(stated(compose(events), delta, first.relation)[0] if events else 0.0)
        stated_by_filter = gates.filter_epsilon(upto)
        if stated_by_filter is not None:
            filtered.append(stated_by_filter)
    return numbers, planned, filtered
