"""Requests for private inference, and their quotes: batch, clip and epsilon.

Comes in: a request, the public number of units. Goes out: a ``ReleaseQuote``, or a refusal. Must not read data or a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from dpllm.errors import ConfigError
from dpllm.privacy.accounting import Relation, epsilon
from dpllm.privacy.clipped_logits import Ballot
from dpllm.privacy.events import BoundedRange, number

FIELD = "{text}"
PROMPT = f"Here is one text of a collection:\n\n{FIELD}\n\nWrite another text of this collection. Answer with the text alone."
DELTA = 1e-5
MOST_CLIP = 4.0  # maximum of clip / temperature; larger votes are rare


@dataclass(frozen=True)
class InferenceRequest:
    """A request for private inference.

    Attributes:
        rows: Maximum number of rows; there are fewer if filters drop texts and no batch is left.
        epsilon: Total of all rows, > 0.
        delta: See ``releases.describe.opened``.
        max_new_tokens: T, the maximum number of draws for one text.
        batch: B; None: the smallest that allows C to be ``MOST_CLIP`` tau, but at most N / rows.
        temperature: tau.
        top_k: Number of candidates by the public logits; 0: all tokens.
        prompt: Prompt that holds the record at {text}; the public prompt has nothing there.
        describe: File of ``dpllm describe`` with the shares of data.control.
        keep_unfinished: See ``draft.filters``, also for min_words.
    """

    rows: int
    epsilon: float
    delta: float | str | None = None
    max_new_tokens: int = 96
    batch: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    prompt: str = PROMPT
    describe: Path | None = None
    keep_unfinished: bool = False
    min_words: int = 0


@dataclass(frozen=True)
class ReleaseQuote:
    """The terms of a request: the ballot, epsilon at delta for N units, and the maximum number of texts."""

    ballot: Ballot
    event: BoundedRange
    epsilon: float
    delta: float
    relation: Relation
    units: int
    texts: int


def quote(request: InferenceRequest, units: int, delta: float, relation: Relation) -> ReleaseQuote:
    """The quote of a request, with the largest clip within epsilon, but at most ``MOST_CLIP`` tau.

    Args:
        request: The request.
        units: N, counted or declared.
        delta: Resolved delta, in (0, 1).
        relation: The neighbouring relation.

    Raises:
        ConfigError: A setting is out of range, epsilon is too small for any vote, or N units make too few batches.
    """
    number("--epsilon", request.epsilon, 0.0, 1000.0)
    number("--temperature", request.temperature, 1e-6, 1e6, including=True)
    if min(request.rows, request.max_new_tokens) < 1 or request.rows > units:
        raise ConfigError(
            f"--rows {request.rows} and --max-new-tokens {request.max_new_tokens} of {units:,} units: each unit votes for one "
            "text. Type 1 or more of both, and no more rows than there are units."
        )
    eta = _largest_range(request, delta, relation)
    size = request.batch
    if size is None:
        size = max(1, min(math.ceil(2 * MOST_CLIP / eta), units // request.rows))
    clip = min(MOST_CLIP, eta * size / 2 * (1 - 1e-9)) * request.temperature
    ballot = Ballot(size, clip, request.temperature, request.top_k)
    event, texts = ballot.event(request.max_new_tokens), units // size
    spent = epsilon(event, delta, relation)
    if spent > request.epsilon or texts < request.rows:
        fit = f"the smallest votes cost epsilon {spent:.4g}" if spent > request.epsilon else f"{texts} texts fit"
        raise ConfigError(
            f"{request.rows} rows by batches of {size} of {units:,} units at epsilon {request.epsilon:g} and delta {delta:g}: "
            f"{fit}. Ask for fewer --rows or --max-new-tokens, raise --epsilon, or leave --batch out."
        )
    return ReleaseQuote(ballot, event, spent, delta, relation, units, texts)


def _largest_range(request: InferenceRequest, delta: float, relation: Relation) -> float:
    def cost(eta: float, accountant: str) -> float:
        return epsilon(BoundedRange(eta, request.max_new_tokens), delta, relation, accountant)

    low, high = 1e-6, 100.0  # with the fast accountant, which overstates epsilon
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle, "rdp") <= request.epsilon else (low, middle)
    for _ in range(6):  # epsilon grows at most with the square of eta, so this approaches from below
        further = low * math.sqrt(request.epsilon / max(cost(low, "pld"), 1e-9))
        if further > 100 or cost(further, "pld") > request.epsilon:
            break
        low = further
    return low
