"""Whether runs fit a budget: the two gates, and what is left.

Comes in: one dataset as the chain has it, and events. Goes out: a refusal in words, or nothing. Must not write.

planned: a list of runs is sealed before the first of them starts, and composed by PLD. A run is admitted if the list
has it and it has not run yet. Without a list, the first run seals a list of one.

adaptive: a Renyi filter at one order, which follows from the budget (``renyi.filter_order``). A run is admitted while the
Renyi divergences at that order of everything reserved add up to at most the allowance, which is the budget's epsilon less
the price of the conversion at its delta.

References:
    Feldman and Zrnic 2021, "Individual Privacy Accounting via a Renyi Filter" (arXiv 2008.11193), theorem 4.3: the
    adaptive gate. Haney et al. 2023, "Concurrent Composition for Interactive Differential Privacy with Adaptive
    Privacy-Loss Parameters" (arXiv 2309.05901): runs may overlap in time. Why PLD may not stop an adaptive sequence:
    arXiv 2602.06756.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from dpllm.errors import Refused
from dpllm.ledger.values import Account, Budget, RunRequest, Sealed
from dpllm.privacy import accounting, renyi
from dpllm.privacy.accounting import accountants, compose
from dpllm.privacy.events import (
    CyclicPoisson,
    Event,
    PoissonSampled,
    PureDP,
    SelfComposed,
    mechanism_of,
)
from dpllm.privacy.parts import imported_delta, without_delta

LESS = "Ask for a smaller epsilon, more noise where the recipe sets it, or fewer steps; or use other data."


def conversion_delta(budget: Budget) -> float:
    """The delta at which the filter's divergence becomes an epsilon."""
    return budget.delta - budget.import_delta


def filter_allowance(budget: Budget) -> float:
    """The Renyi divergence that an adaptive budget allows in all; below 0 where it allows none."""
    assert budget.order is not None
    return renyi.allowance(budget.epsilon, conversion_delta(budget), budget.order)


def filter_spent(account: Account, order: float) -> float:
    """The Renyi divergence at ``order`` of everything that counts; infinite where an event has none."""
    counted = [*account.imports, *(run.kept for run in account.runs)]
    return math.fsum(divergence(event, order) for event in counted)


@lru_cache(maxsize=65_536)
def divergence(event: Event, order: float) -> float:
    """The Renyi divergence of one run as the filter counts it; infinite where none is known."""
    # The delta of imported runs does not enter it: it is set aside from the budget's.
    pure = without_delta(event)
    return renyi.rdp(pure, order) if "rdp" in accountants(pure) else math.inf


def delta_imported(account: Account, *wanted: Event) -> float:
    """The deltas of imported runs, wherever they stand."""
    return math.fsum(map(imported_delta, (*account.imports, *wanted, *(run.event for run in account.runs))))


def filter_left(account: Account) -> renyi.Fit | None:
    """What is left of an adaptive budget; None under another gate. An allowance of 0 or less admits nothing."""
    budget = account.budget
    if budget is None or budget.gate != "adaptive" or budget.order is None:
        return None
    left = filter_allowance(budget) - filter_spent(account, budget.order)
    return renyi.Fit(budget.order, left if delta_imported(account) <= budget.import_delta else -math.inf)


def filter_epsilon(account: Account, *wanted: Event) -> float | None:
    """The epsilon that the filter states for what is reserved, with ``wanted`` if given; None under another gate."""
    budget = account.budget
    if budget is None or budget.gate != "adaptive" or budget.order is None:
        return None
    if delta_imported(account, *wanted) > budget.import_delta:
        return math.inf
    rho = filter_spent(account, budget.order) + math.fsum(divergence(event, budget.order) for event in wanted)
    return renyi.to_epsilon(rho, conversion_delta(budget), budget.order)


def _over_filter(account: Account, budget: Budget, runs: Sequence[RunRequest]) -> str | None:
    left, whole = filter_left(account), filter_allowance(budget)
    assert left is not None
    whose, order = f"dataset {account.dataset!r}", left.order
    if delta_imported(account, *(run.event for run in runs)) > budget.import_delta:
        return (
            f"{whose}: imported runs spent more delta than the {budget.import_delta:g} that was set aside "
            "for them, so the filter admits nothing more. Use other data."
        )
    costs = [divergence(run.event, order) for run in runs]
    together = math.fsum(costs)
    if together <= left.allowance:
        return None
    if order == renyi.SUM:
        return (
            f"{whose}: this costs epsilon {together:g}; {whole - left.allowance:g} is spent and {left.allowance:g} remains of "
            f"{whole:g}. Ask for a smaller epsilon or fewer labels of one {budget.unit}."
        )
    if math.isinf(left.allowance):
        return (
            f"{whose}: what was spent before its budget became adaptive has no Renyi divergence at order "
            f"{order:g}, so the filter admits nothing more. Use other data."
        )
    largest = runs[costs.index(max(costs))]
    which = f"run {largest.run!r} ({_described(largest)})" if len(runs) > 1 else "this run"
    if math.isinf(together):
        planned = (
            f"dpllm ledger init {account.dataset} --planned RECIPE, with the --epsilon, --delta and --unit of before"
        )
        if account.runs or account.imports:
            planned = "dpllm ledger init NAME --planned RECIPE, of other data"
        return (
            f"{whose} has an adaptive budget, which adds up Renyi divergences at order {order:g}, and {which} has none "
            "(dp-accounting knows no RDP of mixtures of Gaussians, or its noise is too small). Set data.sampling: unit, raise "
            f"privacy.noise_multiplier, or seal the runs in a planned budget: {planned}."
        )
    remains = f"{max(0.0, left.allowance):.4f} remains of the {max(0.0, whole):.4f}"
    limit = f"{remains} that a budget of epsilon {budget.epsilon:g} allows"
    if len(runs) > 1:
        alone = f" Already {which} is too large on its own." if max(costs) > left.allowance else ""
        return (
            f"{whose}: these {len(runs)} runs request {together:.4f} of Renyi divergence at order {order:g} together, and "
            f"{limit}.{alone} Ask for fewer runs or smaller epsilons, or use other data."
        )
    return (
        f"{whose}: this run requests epsilon {_epsilon([runs[0].event], budget):.4f} at delta {budget.delta:g}, which is "
        f"{together:.4f} of Renyi divergence at order {order:g}; {whole - left.allowance:.4f} is spent and {limit}. {LESS}"
    )


def pending(account: Account) -> list[Sealed]:
    """The sealed runs that were not reserved yet."""
    used = Counter(Sealed(run.event, run.reservation.num_steps) for run in account.runs)
    waiting = []
    for run in account.sealed or ():
        if used[run] > 0:
            used[run] -= 1
        else:
            waiting.append(run)
    return waiting


def planned_epsilon(account: Account, budget: Budget, runs: Sequence[Sealed]) -> float:
    """Epsilon of a list of runs and of what was imported, composed by PLD at the budget's delta."""
    return _epsilon([*account.imports, *(run.event for run in runs)], budget)


def _epsilon(parts: Sequence[Event], budget: Budget) -> float:
    return accounting.stated(compose(parts), budget.delta, budget.relation)[0] if parts else 0.0


def over_plan(account: Account, budget: Budget, runs: Sequence[Sealed]) -> str | None:
    """Why a list of runs cannot be sealed; None if it fits together with what was imported."""
    together = planned_epsilon(account, budget, runs)
    if together <= budget.epsilon:
        return None
    requested, spent = _epsilon([run.event for run in runs], budget), _epsilon(account.imports, budget)
    return (
        f"dataset {account.dataset!r}: {f'these {len(runs)} runs request' if len(runs) > 1 else 'this run requests'} epsilon "
        f"{requested:.4f}; {spent:.4f} is spent and {max(0.0, budget.epsilon - spent):.4f} remains of {budget.epsilon:.4f} at "
        f"delta {budget.delta:g}; together they come to {together:.4f}. {LESS}"
    )


def _off_list(account: Account, runs: Sequence[Sealed]) -> str | None:
    """Why not all of these runs are on the list that was sealed, or are it by now."""
    waiting = pending(account)
    missing = Counter(runs) - Counter(waiting)
    if not missing:
        return None
    used, sealed = len(account.runs), len(account.sealed or ())
    strangers = {run: _described(run) for run in runs if run in missing}.values()
    what = "does not hold this run"
    if used >= sealed:
        what = "is spent"
    elif len(runs) > 1:
        what = f"does not hold {len(strangers)} of these {len(runs)} runs, or not as often ({'; '.join(strangers)})"
    way_on = (
        "Use other data, with a longer list, or with an adaptive budget, which dpllm ledger init NAME sets without --planned "
        "before the first run."
    )
    if waiting:
        way_on = (
            f"Of the list, {len(waiting)} have not run: {'; '.join(map(_described, waiting))}. A run must have the "
            "noise, its bands, the sampling rate and the steps of one of them."
        )
    return (
        f"dataset {account.dataset!r} has a planned budget, and its list of {sealed} sealed runs ({used} "
        f"reserved) {what}: a run chosen after seeing results needs another rule than PLD. {way_on}"
    )


def _described(run: Sealed | RunRequest) -> str:
    """A run of a list in a few words."""
    match run.event:
        case PureDP(epsilon):
            return f"a statistic of epsilon {epsilon:g}"
        case CyclicPoisson(bands, _, probability):
            rate = f"q' {probability:.4g} in {bands} bands, "
        case SelfComposed(_, PoissonSampled(probability)):
            rate = f"q {probability:.4g}, "
        case _:
            rate = ""
    mechanism = mechanism_of(run.event)
    sigma = f"{rate}sigma {mechanism.noise_multiplier:.4g}, " if mechanism else ""
    return f"{sigma}{run.num_steps} steps"


def refusal(account: Account, requests: Sequence[RunRequest], *, extends: bool = False) -> str | None:
    """Why not all of these runs, one or a tuning group's, fit together; None if they do, or if there is no budget."""
    budget = account.budget
    if budget is None:
        return None
    if budget.gate == "adaptive":
        return _over_filter(account, budget, requests)
    if extends:
        return (
            f"dataset {account.dataset!r} has a planned budget, whose runs were sealed: lost steps cannot be made up. "
            "Resume without them."
        )
    runs = [Sealed(run.event, run.num_steps) for run in requests]
    if account.sealed is None and not account.runs:
        return over_plan(account, budget, runs)
    # What was imported after the list was sealed counts too.
    return _off_list(account, runs) or (over_plan(account, budget, account.sealed or ()) if account.imports else None)


def remaining(account: Account) -> float | None:
    """The epsilon that further runs may add, by the figure that gates; None without a budget. A spent list leaves none."""
    budget = account.budget
    if budget is None:
        return None
    try:
        if left := filter_left(account):  # what its conversion costs is paid once, whoever comes first
            return max(0.0, left.allowance)
        whole = budget.epsilon
        if account.sealed is not None or account.runs:
            total = planned_epsilon(account, budget, account.sealed or ())
            whole = total if pending(account) and total <= budget.epsilon else 0.0
        return max(0.0, whole - _epsilon(account.events(), budget)) if whole else 0.0
    except Refused:  # no accountant knows everything that was entered, so that nothing more is admitted
        return 0.0


def could_follow(account: Account, request: RunRequest) -> int | None:
    """How many runs could follow those that there are: such ones of an adaptive budget, those that wait of a sealed list."""
    if account.budget is None:
        return None
    left = filter_left(account)
    if left is None:
        return len(pending(account)) if remaining(account) else 0
    cost = divergence(request.event, left.order)
    return math.floor(max(0.0, left.allowance) / cost) if cost > 0 else 0
