"""A run to be published and its audit twin: one recipe without and with canaries of text, charged as one group.

Comes in: a recipe. Goes out: the recipes of both, which ``sweep.trained`` trains, and what they promise together. The twin trains
on the same people again, so it is paid for, and its weights hold the canaries' text, so that nobody needs to publish it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpllm.comparison.sweep import Point, plans_of
from dpllm.errors import BudgetExceeded, ConfigError
from dpllm.ledger import RunRequest, admission, open_ledger
from dpllm.privacy.accounting import compose, stated
from dpllm.recipe.audit import CanaryConfig
from dpllm.recipe.config import load_config
from dpllm.run.promise import read_subject


def twins(recipe: str | Path, overrides: Mapping[str, Any]) -> tuple[list[Point], Path]:
    """The recipe without canaries of text, then with its own, or where it has none the usual ones; and the directory of both."""
    config = load_config(recipe, overrides)
    if not config.privacy.enabled:
        raise ConfigError(f"{recipe}: privacy.enabled is false, so a twin has no guarantee to test. Leave --twin out.")
    root, most, usual = Path(config.output_dir), config.data.max_examples_per_unit or 32, CanaryConfig()
    groups = {copies: number for copies, number in usual.groups.items() if copies <= most}
    texts = config.audit.canaries or usual.model_copy(update={"groups": groups})
    points = []
    for name, said, canaries in (
        ("production", "Trained beside an audit twin with canaries of text, which is not published", None),
        ("twin", "The audit twin of a run without canaries of text, and not to be published", texts),
    ):
        audit = config.audit.model_copy(update={"canaries": canaries})
        one = config.model_copy(update={"audit": audit, "output_dir": str(root / name)})
        points.append(Point(config.privacy.epsilon, one, name, said))
    return points, root


def together(points: Sequence[Point]) -> dict[str, float]:
    """What both promise together, at the budget's delta or else the largest that one of them states. Writes nothing.

    Raises:
        BudgetExceeded: The budget does not hold both.
        Refused: A guard refuses one of them.
    """
    config = points[0].config
    with open_ledger(config.privacy.ledger, create=False) or contextlib.nullcontext() as book:
        subject = read_subject(config)
        plans = plans_of(points, subject, book)
        account = book.account(book.records.charged_to(subject.dataset, config.privacy.derived_from)) if book else None
        asked = [RunRequest.of(plan, name, final=config.privacy.final) for name, plan in plans.items()]
        if account and (why := admission.refusal(account, asked)):
            raise BudgetExceeded(why, dataset=account.dataset, reason="over_budget")
    delta = account.budget.delta if account and account.budget else max(one.delta for one in asked)
    return {"epsilon": stated(compose([one.event for one in asked]), delta, asked[0].relation)[0], "delta": delta}
