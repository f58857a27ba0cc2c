"""What private inference is asked for, and what it would promise: batch, clip and epsilon.

Comes in: an order, the public number of units. Goes out: an ``Offer``, or a refusal. Must not read data, a model or a ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError
from dpllm.privacy.accounting import Relation, epsilon, stated
from dpllm.privacy.events import BoundedRange, number
from dpllm.privacy.voting import Ballot

FIELD = "{text}"
PROMPT = f"Here is one text of a collection:\n\n{FIELD}\n\nWrite another text of this collection. Answer with the text alone."
DELTA = 1e-5
MOST_CLIP = 4.0  # of the temperature: a larger vote is hardly ever cast
TEXTS = "texts by inference cannot stand on one. Set an adaptive budget: dpllm ledger init NAME"


@dataclass(frozen=True)
class Order:
    """What is asked for.

    Attributes:
        rows: At most so many; fewer where filters drop texts and no batch is left.
        epsilon: Of all rows together, > 0.
        delta: See ``run.describe.opened``.
        max_new_tokens: T, the most draws for one text.
        batch_size: B; None: the smallest that allows C to be ``MOST_CLIP`` tau, but at most N over the rows.
        clip: C, in nats; None: the largest that keeps to epsilon, but at most ``MOST_CLIP`` tau.
        temperature: tau.
        top_k: Of the public candidates; 0: all tokens.
        prompt: What a record stands in, at {text}; the public prompt has nothing there.
        statistics: File of ``dpllm describe`` with the shares of data.control.
        filters: Arguments of ``filters.tests``.
    """

    rows: int
    epsilon: float
    delta: float | str | None = None
    max_new_tokens: int = 96
    batch_size: int | None = None
    clip: float | None = None
    temperature: float = 1.0
    top_k: int = 0
    prompt: str = PROMPT
    statistics: Path | None = None
    filters: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Offer:
    """What would be promised: the ballot, epsilon at delta for N units, and how many texts there can be."""

    ballot: Ballot
    epsilon: float
    delta: float
    relation: Relation
    units: int
    texts: int


def offer(order: Order, units: int, delta: float, relation: Relation) -> Offer:
    """The ballot of an order.

    Args:
        order: What is asked for.
        units: N, or as declared.
        delta: Resolved.
        relation: The neighbouring relation.

    Raises:
        ConfigError: Batch and clip that were asked for do not keep to epsilon, or N has not so many batches.
    """
    number("--epsilon", order.epsilon, 0.0, 1000.0)
    for name, value in (("--temperature", order.temperature), ("--clip", order.clip)):
        if value is not None:
            number(name, value, 1e-6, 1e6, including=True)
    if min(order.rows, order.max_new_tokens) < 1 or order.rows > units:
        raise ConfigError(
            f"--rows {order.rows} and --tokens {order.max_new_tokens} of {units:,} units: each unit votes for one text. Type 1 "
            "or more of both, and no more rows than there are units."
        )
    eta = _largest_range(order, delta, relation)
    wanted = math.ceil(2 * (order.clip or MOST_CLIP * order.temperature) / (eta * order.temperature))
    size = order.batch_size if order.batch_size is not None else max(1, min(wanted, units // order.rows))
    clip = order.clip or min(MOST_CLIP, eta * size / 2 * (1 - 1e-9)) * order.temperature
    ballot = Ballot(size, clip, order.temperature, order.top_k)
    spent, texts = stated(ballot.event(order.max_new_tokens), delta, relation)[0], units // size
    if spent > order.epsilon or texts < order.rows:
        fit = f"votes of at most {clip:g} cost epsilon {spent:.4g}" if spent > order.epsilon else f"{texts} texts fit"
        raise ConfigError(
            f"{order.rows} rows by batches of {size} of {units:,} units at epsilon {order.epsilon:g} and delta {delta:g}: {fit}. "
            "Ask for fewer --rows or --tokens, raise --epsilon, or leave --clip and --batch out."
        )
    return Offer(ballot, spent, delta, relation, units, texts)


def _largest_range(order: Order, delta: float, relation: Relation) -> float:
    """The largest range of a draw, to a few thousandths, of which T draws keep to epsilon."""

    def cost(eta: float, accountant: str) -> float:
        return epsilon(BoundedRange(eta, order.max_new_tokens), delta, relation, accountant)

    few, many = 1e-6, 100.0  # by the quick accountant, which overstates
    for _ in range(40):
        middle = math.sqrt(few * many)
        few, many = (middle, many) if cost(middle, "rdp") <= order.epsilon else (few, middle)
    for _ in range(6):  # epsilon grows no faster than the square, so that this approaches from below
        further = few * math.sqrt(order.epsilon / max(cost(few, "pld"), 1e-9))
        if further > 100 or cost(further, "pld") > order.epsilon:
            break
        few = further
    return few
