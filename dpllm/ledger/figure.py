"""The burn-down of each dataset: what is left of its budget after every run, as a picture.

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
    """Draws one panel for each dataset: the share of its budget that is left after each run, by the rule that gates.

    Without a budget nothing burns down: epsilon by PLD is drawn instead, as it grows.

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
        budget, name = account.budget, account.dataset.replace("$", r"\$")
        numbers, values = _burnt(account)
        adaptive = budget is not None and budget.gate == "adaptive"
        axis.step(numbers, values, where="post", color=FILTER if adaptive else PLD, marker="o", markersize=4)
        axis.set_xlabel("runs reserved", color=INK)
        axis.set_xlim(left=0)
        if budget is None:
            delta = max(run.reservation.delta for run in account.runs)
            title, unit, top = f"{name}: no budget, so no limit", f"epsilon by PLD\nat delta {delta:g}", max(values)
        else:
            rule = "of the Renyi filter's allowance" if adaptive else "by PLD"
            title = f"{name}: {values[-1]:.0f}% left of epsilon {budget.epsilon:g} at delta {budget.delta:g}, {rule}"
            unit, top = "left of the budget\n(percent)", 100.0
        axis.set_title(title, loc="left", fontsize=10, color=INK)
        axis.set_ylabel(unit, color=INK)
        axis.set_ylim(0, 1.05 * top)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the figure cannot be written there ({error}). Type another --output.") from None
    finally:
        pyplot.close(figure)
    return path


def _burnt(account: Account) -> tuple[list[int], list[float]]:
    """Runs so far, at most MOST_POINTS of them, and what is left of the budget in percent; without one, epsilon."""
    total = len(account.runs)
    numbers = sorted({round(total * point / MOST_POINTS) for point in range(MOST_POINTS + 1)} if total > MOST_POINTS
                     else range(total + 1))  # fmt: skip
    budget, first = account.budget, account.runs[0].reservation
    values = []
    for number in numbers:
        upto = replace(account, runs=account.runs[:number])
        filtered = gates.filter_left(upto)
        if budget is not None and filtered is not None:
            whole = gates.filter_allowance(budget)
            values.append(100 * max(0.0, filtered.allowance / whole) if whole > 0 else 0.0)
            continue
        delta = budget.delta if budget else max(run.reservation.delta for run in account.runs)
        spent = stated(compose(upto.events()), delta, first.relation)[0] if upto.events() else 0.0
        values.append(100 * max(0.0, 1 - spent / budget.epsilon) if budget else spent)
    return numbers, values
