"""Decides whether runs fit a budget; writes nothing.

Comes in: an account, and the events of runs that have not started. Goes out: the reason why they do not fit, or the rest.

A Renyi filter at one order, which follows from the budget (``renyi.filter_order``), limits every account. Runs are admitted while
the Renyi divergences at that order of everything reserved add up to at most the allowance: the budget's epsilon minus the cost of
the conversion at its delta. A group costs the sum of its runs. Each run may be chosen after seeing all earlier results. Choosing
among the runs of a group costs nothing beyond their total if the choice uses only what they released. A choice by an exact
figure of private evaluation data is not covered.

The one exception is ``final``: the first reservation on an account, of a run or a group, is admitted by its exact total by PLD,
and closes the account for good. So everything that this total covers was fixed before the first result.

References:
    Feldman and Zrnic 2021, "Individual Privacy Accounting via a Renyi Filter" (arXiv 2008.11193), theorem 4.3: the filter.
    Haney et al. 2023, "Concurrent Composition for Interactive Differential Privacy with Adaptive Privacy-Loss Parameters"
    (arXiv 2309.05901): runs may overlap in time. Why PLD may not stop an adaptive sequence: arXiv 2602.06756.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from dpllm.ledger.values import Account, Budget, RunRequest, percent, used_in_words
from dpllm.privacy import renyi
from dpllm.privacy.accounting import accountants, compose, epsilon, finite
from dpllm.privacy.events import Event
from dpllm.privacy.parts import imported_delta, parts_of


def order_of(budget: Budget) -> float:
    """The order of a budget's filter; no result can influence it."""
    if budget.relation == "label_changed":  # pure epsilons of labels add up
        return renyi.SUM
    return renyi.filter_order(budget.epsilon, budget.delta - budget.import_delta)


def filter_allowance(budget: Budget) -> float:
    """The total Renyi divergence that a budget allows; 0 or less if its filter admits nothing."""
    assert budget.order is not None
    return renyi.allowance(budget.epsilon, budget.delta - budget.import_delta, budget.order)


def filter_spent(account: Account, order: float) -> float:
    """The Renyi divergence at ``order`` of all counted events; infinite if an event has none."""
    counted = [*account.imports, *(run.counted_event for run in account.runs)]
    return math.fsum(divergence(event, order) for event in counted)


@lru_cache(maxsize=65_536)
def divergence(event: Event, order: float) -> float:
    """The Renyi divergence of one run for the filter; infinite if none is known."""
    # The delta of imported runs is not part of it: it is set aside from the budget's delta.
    return renyi.divergence(parts_of(event), order) if "rdp" in accountants(event) else math.inf


def delta_imported(account: Account, *events: Event) -> float:
    """The total delta of imported runs in the account and in ``events``."""
    return math.fsum(map(imported_delta, (*account.imports, *events, *(run.event for run in account.runs))))


def filter_left(account: Account) -> renyi.Fit | None:
    """The rest of a budget; None without a budget. An allowance of 0 or less admits nothing."""
    budget = account.budget
    if budget is None or budget.order is None:
        return None
    exhausted = account.final or delta_imported(account) > budget.import_delta
    allowance = -math.inf if exhausted else filter_allowance(budget) - filter_spent(account, budget.order)
    return renyi.Fit(budget.order, allowance)


def used(account: Account, *events: Event) -> float | None:
    """The share of a budget that is used, with ``events`` if given; only imports can raise it above 1.

    None without a budget, and if a final reservation closed the account, since its exact total replaces the share.
    """
    budget = account.budget
    if budget is None or budget.order is None or account.final:
        return None
    if delta_imported(account, *events) > budget.import_delta:
        return math.inf
    spent = math.fsum([filter_spent(account, budget.order), *(divergence(event, budget.order) for event in events)])
    allowance = filter_allowance(budget)
    if allowance <= 0:
        return math.inf if spent else 0.0
    return spent / allowance


def refusal(account: Account, requests: Sequence[RunRequest]) -> str | None:
    """The reason why these runs, reserved together, do not fit; None if they do."""
    if account.final:
        return (
            f"dataset {account.dataset!r} was closed for good by run {account.runs[0].reservation.run!r}, which was final: "
            "its exact total holds only if nothing follows. Use other data."
        )
    if any(request.final for request in requests):
        return _over_exact(account, requests)
    return _over_filter(account, account.budget, requests) if account.budget else None


def _exact(budget: Budget, requests: Sequence[RunRequest]) -> float:
    return epsilon(compose([request.event for request in requests]), budget.delta, budget.relation)


def _over_exact(account: Account, requests: Sequence[RunRequest]) -> str | None:
    subject, budget = f"dataset {account.dataset!r}", account.budget
    if account.used:
        return (
            f"{subject} has runs or imports already, and only the first reservation may be final: an exact total does not cover "
            "a run that was chosen after a result. Leave --final (privacy.final) out."
        )
    if budget is None or (total := _exact(budget, requests)) <= budget.epsilon:
        return None
    return (
        f"{subject}: the exact total would be epsilon {total:.4f} at delta {budget.delta:g}, and the budget is "
        f"{budget.epsilon:g}. Ask for a smaller epsilon, more noise where the recipe sets it, or fewer steps."
    )


def _over_filter(account: Account, budget: Budget, requests: Sequence[RunRequest]) -> str | None:
    remaining, allowance = filter_left(account), filter_allowance(budget)
    assert remaining is not None
    subject, count = f"dataset {account.dataset!r}", len(requests)
    if delta_imported(account, *(request.event for request in requests)) > budget.import_delta:
        return (
            f"{subject}: imported runs spent more delta than the {budget.import_delta:g} that was set aside for them, so nothing "
            "more is admitted. Use other data."
        )
    costs = [divergence(request.event, remaining.order) for request in requests]
    cost = math.fsum(costs)
    if cost <= remaining.allowance:
        return None
    if math.isinf(remaining.allowance):
        return (
            f"{subject}: what was spent before its budget was set has no Renyi divergence at order {remaining.order:g}, so "
            "nothing more is admitted. Use other data."
        )
    runs, pronoun = ("this run", "it") if count == 1 else (f"these {count} runs", "them")
    if math.isinf(cost):
        problem = (
            f"{runs} cannot be added to others: dpllm knows no Renyi divergence of {pronoun} (data.sampling: example, or too "
            "little noise)"
        )
        fix = "Set data.sampling: unit, raise privacy.noise_multiplier, or use other data, where it can be final."
    else:
        share = f"another {percent(cost / allowance)}" if allowance > 0 else "more than all"
        problem = f"{used_in_words(used(account) or 0.0, budget)}, and {runs} would use {share}"
        fix = "Ask for a smaller epsilon, more noise where the recipe sets it, or fewer steps; or use other data."
        if remaining.order == renyi.SUM:
            fix = f"Ask for a smaller epsilon or fewer labels of one {budget.unit}."
        elif remaining.allowance > 0.01 * allowance:
            fix += " For the largest epsilon that fits, set privacy.fit_budget: true in the recipe."
    final_advice = ""
    if remaining.order != renyi.SUM and not account.used and (total := _exact(budget, requests)) <= budget.epsilon:
        final_advice = (
            f" With nothing after {pronoun}, {runs} would fit, at epsilon {total:.4f} exactly: for that, type --final (a "
            "command's; dpllm.Engine has none)."
        )
    return f"{subject}: {problem}. {fix}{final_advice}"


def runs_that_fit(account: Account, *events: Event) -> int | None:
    """How many more reservations with these events fit; None without a budget."""
    remaining = filter_left(account)
    if remaining is None:
        return None
    cost = math.fsum(divergence(event, remaining.order) for event in events)
    return math.floor(max(0.0, remaining.allowance) / cost) if cost > 0 else 0


def group_total(account: Account, name: str) -> dict[str, Any]:
    """The total of all runs of a tuning group, at the budget's delta or else the largest delta that a run states.

    Guarantee:
        The runs were fixed before the first of them started, so their composition by PLD holds for all of them together.
    """
    runs = account.groups()[name]
    delta = account.budget.delta if account.budget else max(run.reservation.delta for run in runs)
    total = epsilon(compose([run.event for run in runs]), delta, runs[0].reservation.relation)
    return {"name": name, "runs": len(runs), "epsilon": total, "delta": delta}


def account_totals(account: Account, spent: float, group: str | None) -> dict[str, Any]:
    """The account for run.json and the card: ``spent`` is the epsilon of its runs by PLD, ``group`` a tuning group."""
    budget, share = account.budget, used(account)
    if account.flaws():
        share, spent = None, math.inf
    return {
        "budget": {"epsilon": budget.epsilon, "delta": budget.delta, "order": budget.order} if budget else None,
        "final": account.final,
        "used": None if share is None else finite(share),
        "spent_epsilon": finite(spent),
        "imported": len(account.imports),
        "group": group_total(account, group) if group is not None else None,
    }
