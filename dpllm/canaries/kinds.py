"""Kinds of secrets, and the carriers behind which they stand: how the text of canaries is drawn.

Comes in: the canary section of the recipe, a source of random numbers, and for some kinds the base model. Goes out: pairs
of carrier and secret. Knows no coins, sees no data, and imports no torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpllm.errors import ConfigError
from dpllm.recipe.sections import CanaryConfig

if TYPE_CHECKING:
    from dpllm.canaries.source import ModelSource  # which loads torch

KEYS: dict[str, tuple[str, ...]] = {
    "digits": ("digits",),
    "random_tokens": ("tokens",),
    "new_tokens": (),
}
"""For each kind the keys of audit.canaries, beside groups and references, that its texts follow from."""
COMPLETION = "Thank you, noted."
"""What a row learns whose secret stands in the prompt; public."""
REJECTED = "-"
"""Ends the name of a pair's rejected answer, where answers are canaries of their own."""
NEED_MODEL = frozenset({"random_tokens", "new_tokens"})
"""Kinds that are made of the base model's tokens, and so need it."""
RAREST = 1 / 8
"""Share of the vocabulary from which new_tokens are drawn, if so many tokens can stand alone."""
SENTENCES_ASKED = 64
"""After so many carriers the base model is asked what it expects; they are public and the same for every plan."""
TRIES = 400
"""Draws for one secret before a kind is given up."""

# A carrier is one choice from each column; no word holds a digit, so a secret is found in one place only.
_OBJECTS = (
    *("locker", "gate", "archive", "alarm", "voucher", "freezer", "cabinet", "parking", "courier", "pantry"),
    *("studio", "garage", "cellar", "workshop", "elevator", "boathouse", "vault", "mailbox", "pharmacy", "annex"),
)
_KINDS = ("code", "number", "key", "passcode", "entry", "combination", "reference", "sequence")
_SIDES = (
    *("north", "south", "east", "west", "upper", "lower", "old", "new", "inner", "outer"),
    *("left", "right", "central", "rear", "riverside", "harbour"),
)
_PLACES = (
    *("store", "clinic", "library", "depot", "office", "school", "bakery", "station", "museum", "hotel"),
    *("nursery", "brewery", "chapel", "theatre", "foundry", "orchard", "dairy", "market", "printworks", "observatory"),
)
_NAME_HEADS = (
    *("Halv", "Bren", "Corr", "Dall", "Ester", "Farn", "Gren", "Hjort", "Ingel", "Jarv"),
    *("Kest", "Lund", "Marl", "Norr", "Oster", "Pell", "Quill", "Roth", "Sand", "Tarn"),
    *("Ulv", "Vest", "Wick", "Yarr", "Zell"),
)
_NAME_TAILS = (
    *("orsen", "ano", "berg", "croft", "dale", "ek", "field", "gard", "holm", "ington"),
    *("jord", "kowski", "ley", "mann", "nova", "oux", "quist", "rup", "stad", "well"),
)
_VERBS = ("is", "was set to", "reads", "remains")
COLUMNS = (_OBJECTS, _KINDS, _SIDES, _PLACES, _NAME_HEADS, _NAME_TAILS, _VERBS)
NUM_CARRIERS = math.prod(map(len, COLUMNS))
"""How many sentences there are."""


class Drawn(NamedTuple):
    """Texts of canaries, in no particular order."""

    texts: tuple[tuple[str, str], ...]
    """Carrier and secret; all carriers differ, and all secrets do."""
    log2_secrets: float
    """See ``draw``."""


def carrier(index: int) -> str:
    """The index-th sentence of the grammar, of NUM_CARRIERS; distinct indices give distinct sentences."""
    words = []
    for column in COLUMNS:
        index, choice = divmod(index, len(column))
        words.append(column[choice])
    item, kind, side, place, head, tail, verb = words
    return f"The {item} {kind} for the {side} {place} of {head}{tail} {verb}"


def draw(config: CanaryConfig, total: int, generator: random.Random, source: ModelSource | None = None) -> Drawn:
    """Draws the texts of candidates and references together, ``total`` of them; their order may depend on how they were found.

    ``log2_secrets`` of the result is log2 |R|, the size in bits of the space that a secret was drawn from:

    - digits: exact.
    - random_tokens: an upper bound, since tokens that their own text is not encoded as are not counted out.
    - new_tokens: exact, the pool from which one was given to each canary.

    Raises:
        ConfigError: Fewer distinct texts than asked for, or a kind that this model and recipe cannot have.
    """
    if total > NUM_CARRIERS:
        raise ConfigError(
            f"audit.canaries: {total} canaries and references need as many distinct sentences, and there are "
            f"{NUM_CARRIERS}; lower audit.canaries.groups and references."
        )
    sentences = [carrier(index) for index in generator.sample(range(NUM_CARRIERS), total)]
    if config.kind == "digits":
        return _digits(config, sentences, generator)
    if source is None:
        raise ConfigError(
            f"audit.canaries.kind {config.kind} is made of the base model's tokens, but no model was given. Plan with a recipe, "
            "or use kind digits."
        )
    if config.kind == "new_tokens":
        return _new_tokens(sentences, generator, source)
    return _random_tokens(config.tokens, sentences, generator, source)


def _digits(config: CanaryConfig, sentences: Sequence[str], generator: random.Random) -> Drawn:
    total, num_secrets = len(sentences), 10**config.digits
    if total > num_secrets:
        raise ConfigError(
            f"audit.canaries: {total} canaries and references need as many distinct secrets, and there are {num_secrets} "
            f"of {config.digits} digits; raise audit.canaries.digits or lower groups and references."
        )
    secrets = [f"{number:0{config.digits}d}" for number in generator.sample(range(num_secrets), total)]
    return Drawn(tuple(zip(sentences, secrets, strict=True)), config.digits * math.log2(10))


def _random_tokens(tokens: int, sentences: Sequence[str], generator: random.Random, source: ModelSource) -> Drawn:
    """Tokens drawn uniformly and independently; again where they are not read back, are taken, or stand in a sentence."""
    source.check_room(sentences, tokens)
    first, later, total = source.first_ids, source.ordinary_ids, len(sentences)
    if not first or not later:
        raise _unreadable("random_tokens")
    log2_secrets = math.log2(len(first)) + (tokens - 1) * math.log2(len(later))
    if log2_secrets < math.log2(total):
        raise _too_few(total, f"there are {2**log2_secrets:.0f} of {tokens} such tokens")
    everything, secrets = "\n".join(sentences), dict[str, str]()
    open_sentences = sentences
    for tries in range(TRIES):
        left = []
        for sentence in open_sentences:
            drawn = (generator.choice(first), *generator.choices(later, k=tokens - 1))
            secret = source.text(drawn)
            usable = secret and secret == secret.strip() and secret not in secrets and secret not in everything
            if usable and source.reads(sentence, secret, drawn):
                secrets[secret] = sentence
            else:
                left.append(sentence)
        if not left:
            return Drawn(tuple((sentence, secret) for secret, sentence in secrets.items()), log2_secrets)
        if not secrets and tries * total >= TRIES:
            raise _unreadable("random_tokens")
        open_sentences = left
    raise _too_few(total, f"{len(secrets)} were found")


def _new_tokens(sentences: Sequence[str], generator: random.Random, source: ModelSource) -> Drawn:
    """For each canary one of the tokens that the base model expects least."""
    source.check_room(sentences, 1)
    everything, total = "\n".join(sentences), len(sentences)
    wanted = max(2 * total, int(RAREST * len(source.first_ids)))
    pool: dict[str, int] = {}
    # The mean over carriers makes one order for all canaries, so that their secrets stay exchangeable.
    asked = [carrier(index) for index in random.Random(0).sample(range(NUM_CARRIERS), SENTENCES_ASKED)]
    expected_V = source.expected(asked)
    for token in sorted(source.first_ids, key=lambda token: (expected_V[token], token)):
        secret = source.text((token,))
        if secret not in everything and source.reads(sentences[0], secret, (token,)):
            pool.setdefault(secret, token)
        if len(pool) == wanted:
            break
    if len(pool) < total:
        raise ConfigError(
            f"audit.canaries: {total} canaries and references of kind new_tokens need a token each, and the vocabulary has "
            f"{len(pool)}; use audit.canaries.kind random_tokens, or lower groups and references."
        )
    chosen = generator.sample(sorted(pool), total)
    for sentence, secret in zip(sentences, chosen, strict=True):
        if not source.reads(sentence, secret, (pool[secret],)):
            raise _unreadable("new_tokens")
    return Drawn(tuple(zip(sentences, chosen, strict=True)), math.log2(len(pool)))


def _too_few(total: int, found: str) -> ConfigError:
    return ConfigError(
        f"audit.canaries: {total} canaries and references of kind random_tokens need as many distinct secrets, and {found}; "
        "raise audit.canaries.tokens, or lower groups and references."
    )


def _unreadable(kind: str) -> ConfigError:
    return ConfigError(
        f"audit.canaries.kind {kind}: every secret would be cut off or share a token with its carrier; raise data.max_length, "
        "lower audit.canaries.tokens, or use kind digits."
    )
