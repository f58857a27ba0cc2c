"""What private inference is asked for, and what it would promise: batch, clip and epsilon.

Comes in: an order, the public number of units. Goes out: an ``Offer``, or a refusal. Must not read data or a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.errors import ConfigError, Refused
from dpllm.privacy.accounting import Relation, epsilon, stated
from dpllm.privacy.events import BoundedRange, number
from dpllm.privacy.voting import Ballot
from dpllm.recipe.config import RunConfig
from dpllm.statement import lineage
from dpllm.statement.privacy_record import Lineage

if TYPE_CHECKING:
    from dpllm.ledger import Ledger
    from dpllm.ledger.dataset_policy import DatasetPolicy

FIELD = "{text}"
PROMPT = f"Here is one text of a collection:\n\n{FIELD}\n\nWrite another text of this collection. Answer with the text alone."
DELTA = 1e-5
MOST_CLIP = 4.0  # of the temperature: a larger vote is hardly ever cast
FILTERS = {"keep_unfinished": False, "min_words": None, "max_words": None, "no_details": False}


@dataclass(frozen=True)
class Order:
    """What is asked for.

    Attributes:
        rows: At most so many; fewer where filters drop texts and no batch is left.
        epsilon: Of all rows together, > 0.
        delta: See ``run.describe.opened``.
        tokens: T, the most draws for one text.
        batch: B; None: the smallest that allows C to be ``MOST_CLIP`` tau, but at most N over the rows.
        temperature: tau.
        top_k: Of the public candidates; 0: all tokens.
        prompt: What a record stands in, at {text}; the public prompt has nothing there.
        describe: File of ``dpllm describe`` with the shares of data.control.
        filters: Arguments of ``filters.tests``, as in ``FILTERS``.
    """

    rows: int
    epsilon: float
    delta: float | str | None = None
    tokens: int = 96
    batch: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    prompt: str = PROMPT
    describe: Path | None = None
    filters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: int, given: Mapping[str, Any]) -> Order:
        """The order of so many rows with these settings and filters; None is none.

        Raises:
            ConfigError: A name is none of theirs, or epsilon is missing.
        """
        given, own = (
            {name: value for name, value in given.items() if value is not None},
            {one.name for one in fields(cls)},
        )
        if strange := given.keys() - own - FILTERS.keys():
            raise ConfigError(f"{min(strange)}: is of no use by inference. See dpllm synthesize --help.")
        if "epsilon" not in given:
            raise ConfigError("--epsilon is missing: of all rows together. Type --epsilon 3, for example.")
        filters = {name: given.pop(name) for name in FILTERS if name in given}
        return cls(rows=rows, **given, filters=FILTERS | filters)


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
    """The ballot of an order, with the largest clip that keeps to epsilon, but at most ``MOST_CLIP`` tau.

    Args:
        order: What is asked for.
        units: N, or as declared.
        delta: Resolved.
        relation: The neighbouring relation.

    Raises:
        ConfigError: A setting is out of range, epsilon is too small for any vote, or N has not so many batches.
    """
    number("--epsilon", order.epsilon, 0.0, 1000.0)
    number("--temperature", order.temperature, 1e-6, 1e6, including=True)
    if min(order.rows, order.tokens) < 1 or order.rows > units:
        raise ConfigError(
            f"--rows {order.rows} and --tokens {order.tokens} of {units:,} units: each unit votes for one text. Type 1 "
            "or more of both, and no more rows than there are units."
        )
    eta = _largest_range(order, delta, relation)
    wanted = math.ceil(2 * (MOST_CLIP * order.temperature) / (eta * order.temperature))
    size = order.batch if order.batch is not None else max(1, min(wanted, units // order.rows))
    clip = min(MOST_CLIP, eta * size / 2 * (1 - 1e-9)) * order.temperature
    ballot = Ballot(size, clip, order.temperature, order.top_k)
    spent, texts = stated(ballot.event(order.tokens), delta, relation)[0], units // size
    if spent > order.epsilon or texts < order.rows:
        fit = f"the least votes cost epsilon {spent:.4g}" if spent > order.epsilon else f"{texts} texts fit"
        raise ConfigError(
            f"{order.rows} rows by batches of {size} of {units:,} units at epsilon {order.epsilon:g} and delta {delta:g}: {fit}. "
            "Ask for fewer --rows or --tokens, raise --epsilon, or leave --batch out."
        )
    return Offer(ballot, spent, delta, relation, units, texts)


def _largest_range(order: Order, delta: float, relation: Relation) -> float:
    """The largest range of a draw, to a few thousandths, of which T draws keep to epsilon."""

    def cost(eta: float, accountant: str) -> float:
        return epsilon(BoundedRange(eta, order.tokens), delta, relation, accountant)

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


def with_base(
    order: Order, made: Offer, config: RunConfig, policy: DatasetPolicy, ledger: Ledger | None
) -> Lineage | None:
    """What the texts promise together with the models before them: a model that learned these data tells of them by itself.

    Raises:
        Refused: A model learned these data, or says not which, and no total follows.
    """
    found = lineage.compose_with_base(
        lineage.of_base(config),
        config,
        dataset=policy.dataset,
        derived_from=policy.derived_from,
        book=ledger,
        plan=lineage.Own(made.ballot.event(order.tokens), made.delta, config.data.unit, made.relation),
    )
    if found is None:
        return None
    unknown = any(one.dataset is None for one in found.models)
    if unknown or (found.same_dataset and found.composed is None):
        raise Refused(
            f"{config.model.name_or_path}: was tuned on the same data, or says not on which, and what it tells of them cannot "
            f"be added ({found.reason}). Use a base model that never saw these data."
        )
    return found
