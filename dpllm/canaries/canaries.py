"""Canaries: random secrets that secret fair coins plant in the training data or leave out.

Comes in: the canary section of the recipe, and for some kinds the base model. Goes out: a ``CanaryPlan`` made before
training, its number of slots in the training set, and a commitment that binds the plan without revealing it. Must not see
data or import torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dpllm.canaries.texts import COMPLETION, NUM_CARRIERS, Canary, ModelSource, carrier
from dpllm.errors import ConfigError
from dpllm.files import read_json, write_json
from dpllm.privacy.releases import flipped
from dpllm.recipe.config import DataConfig
from dpllm.recipe.sections import AuditConfig, CanaryConfig

KEYS: dict[str, tuple[str, ...]] = {"digits": ("digits",), "random_tokens": ("tokens",), "new_tokens": ()}
"""For each kind, the keys of audit.canaries besides groups and references that determine its texts."""
RAREST = 1 / 8
"""Share of the vocabulary from which new_tokens are drawn, if it has enough tokens that can stand alone."""
PROBED_CARRIERS = 64
"""Number of carriers after which the base model predicts the next token; public and the same for every plan."""
TRIES = 400
"""Draws for one secret before the kind is refused."""
MOST_CANARIES, MOST_TOKENS = 25_000, 400_000
"""Candidates and references, and their tokens to be scored, that ``dpllm verify`` reads of one audit."""
Drawn = tuple[list[tuple[str, str]], float]


@dataclass(frozen=True)
class CanaryPlan:
    """All candidates with their coins, the references, how both were drawn, and a commitment to all of this."""

    canaries: tuple[Canary, ...]
    """The candidates, by group."""
    references: tuple[Canary, ...]
    """Never inserted; drawn by the same generator as the candidates."""
    commitment: str
    """SHA-256 over the salt and the canonical JSON of the plan: public before training, checkable afterwards."""
    salt: str = field(repr=False)
    """32 random bytes in hexadecimal: secret, since the coins could otherwise be searched for."""
    kind: str
    """audit.canaries.kind."""
    log2_secrets: float
    """log2 |R|, in bits: an upper bound on the exposure of a secret. ``draw`` gives it for each kind."""
    settings: dict[str, Any]
    """The other keys of audit.canaries that determine the texts."""
    gradient_key: str = field(default="", repr=False)
    """16 random bytes in hexadecimal, from which the vectors of gradient canaries are drawn: secret, like the salt."""
    gradient_coins: tuple[bool, ...] = field(default=(), repr=False)
    """The coin of each gradient canary."""

    label_epsilon: float | None = None
    """Epsilon of one label if coins are labels, each flipped with probability 1 / (1 + e^epsilon). None: coins plant rows."""

    @property
    def answers(self) -> int:
        """Number of secrets of each candidate."""
        return max((len(canary.answers) for canary in self.canaries), default=1)


def plan_canaries(
    config: CanaryConfig,
    *,
    source: ModelSource | None = None,
    answers: int = 1,
    label_epsilon: float | None = None,
    gradient: int = 0,
    generator: random.Random | None = None,
) -> CanaryPlan:
    """Draws carriers, secrets and coins.

    Guarantee:
        The coins are independent and fair, and independent of carriers, secrets, ids and order. Candidates and
        references are exchangeable: all texts are drawn first, shuffled, and then assigned; so are the two answers
        of a pair. No two share a carrier or a secret, and no carrier contains a secret. Holds with the default
        generator, the operating system's, for every kind. With ``label_epsilon`` all are planted; the coin is the preferred
        answer, and training sees that label after randomised response, so it has the guarantee of a label and no other.

    Args:
        config: Kind, groups and number of references.
        source: The base model and the encoding of rows; digits need none.
        answers: Number of secrets of each, as ``Objective.rows_each`` says.
        label_epsilon: See ``CanaryPlan``; there are no references then, because they have no label.
        gradient: Number of gradient canaries.
        generator: For tests only; the default is the operating system's entropy.

    Raises:
        ConfigError: More canaries than distinct secrets or distinct carriers, or a kind that this model does not support.
    """
    generator = generator or secrets.SystemRandom()
    groups = [group for group, candidates in sorted(config.groups.items()) for _ in range(candidates)]
    num_references = 0 if label_epsilon else config.references
    total = len(groups) + num_references
    texts, log2_secrets = draw(config, total * answers, generator, source)
    generator.shuffle(texts)  # the order may depend on how a text was found
    rejected = [secret for _, secret in texts[total:]] or [""] * total
    texts = texts[:total]
    names = [f"c{index:05d}" for index in range(len(groups))] + [f"r{index:05d}" for index in range(num_references)]
    completion = COMPLETION if config.place == "prompt" else ""
    drawn = [
        Canary(name, group, *text, inserted=False, rejected=other, completion=completion)
        for name, group, text, other in zip(names, [*groups, *[0] * num_references], texts, rejected, strict=True)
    ]
    canaries, references = drawn[: len(groups)], tuple(drawn[len(groups) :])
    plan = CanaryPlan((), references, "", "", config.kind, log2_secrets, _settings(config), label_epsilon=label_epsilon)
    return _draw_coins(replace(plan, gradient_coins=(False,) * gradient), canaries, generator)


def redraw_coins(plan: CanaryPlan, *, generator: random.Random | None = None) -> CanaryPlan:
    """Draws fresh coins, flips and salt for the same texts and commits to them; ``generator`` is for tests only.

    Guarantee:
        The coins are independent and fair, and independent of the texts and of the plan's own coins.
    """
    return _draw_coins(plan, plan.canaries, generator or secrets.SystemRandom())


def check_fits(
    plan: CanaryPlan, audit: AuditConfig, path: Path, *, answers: int = 1, label_epsilon: float | None = None
) -> CanaryPlan:
    """Checks that canaries planned earlier, in ``path``, are those that the recipe configures, and returns them.

    Raises:
        ConfigError: Another kind, other groups, another key that determines the texts, or another number of answers.
    """
    planned = plan.kind, plan.settings, len(plan.gradient_coins)
    configured = audit.texts.kind, _settings(audit.texts), audit.gradient_canaries
    if planned != configured or (plan.canaries and (plan.answers, plan.label_epsilon) != (answers, label_epsilon)):
        raise ConfigError(
            f"{path}: these canaries were planned for another recipe, with other kinds or numbers. Delete the file to draw new "
            "ones."
        )
    return plan


def count_groups(canaries: Sequence[Canary]) -> dict[str, dict[str, int]]:
    """Repetitions -> number of candidates, and how many of them were planted."""
    candidates = Counter(canary.group for canary in canaries)
    inserted = Counter(canary.group for canary in canaries if canary.inserted)
    return {str(group): {"candidates": candidates[group], "inserted": inserted[group]} for group in sorted(candidates)}


def slots(plan: CanaryPlan, data: DataConfig) -> list[tuple[Canary, ...]]:
    """The content of each slot: an inserted canary, repeated as often as one draw brings it, or nothing if it was left out.

    If coins are labels, every slot is filled.
    """
    filled = []
    for canary in plan.canaries:
        num_slots = data.slots_each(canary.group)
        filled += [(canary,) * (canary.group // num_slots if canary.inserted or plan.label_epsilon else 0)] * num_slots
    return filled


def save(plan: CanaryPlan, path: Path) -> None:
    """Writes texts, coins and salt atomically, readable only by the owner (mode 0600)."""
    write_json(path, asdict(plan), mode=0o600)


def load(path: Path) -> CanaryPlan:
    """Reads a saved plan and checks it against its commitment.

    Raises:
        ConfigError: Missing, damaged or altered file.
    """
    value = read_json(path)
    try:
        values = {field.name: value[field.name] for field in fields(CanaryPlan) if field.name in value}
        for part in ("canaries", "references"):
            values[part] = tuple(Canary(**entry) for entry in value[part])
        plan = CanaryPlan(**{**values, "gradient_coins": tuple(value["gradient_coins"])})
        commitment = _commit(plan)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{path}: is not a canary plan; the file is damaged, or of an earlier version. Restore it, or train again."
        ) from None
    if commitment != plan.commitment:
        raise ConfigError(
            f"{path}: does not match its own commitment, so canaries or coins were changed after the plan was made and "
            "an audit with them would prove nothing; restore the file, or train again."
        )
    return plan


def _draw_coins(plan: CanaryPlan, canaries: Sequence[Canary], generator: random.Random) -> CanaryPlan:
    below, epsilon = generator.randrange, plan.label_epsilon
    tossed = tuple(
        replace(
            canary, inserted=bool(generator.getrandbits(1)), flipped=epsilon is not None and flipped(epsilon, below)
        )
        for canary in canaries
    )
    plan = replace(plan, canaries=tossed, salt=generator.randbytes(32).hex())
    if plan.gradient_coins:
        coins = tuple(bool(generator.getrandbits(1)) for _ in plan.gradient_coins)
        plan = replace(plan, gradient_key=generator.randbytes(16).hex(), gradient_coins=coins)
    return replace(plan, commitment=_commit(plan))


def _settings(config: CanaryConfig) -> dict[str, Any]:
    keys = config.model_dump(mode="json")
    settings = {key: keys[key] for key in ("groups", "references", *KEYS[config.kind])}
    return settings if config.place == "target" else {**settings, "place": config.place}


def _commit(plan: CanaryPlan) -> str:
    def nonempty(items: list[tuple[str, Any]]) -> dict[str, Any]:
        rare = ("rejected", "flipped", "label_epsilon", "completion")
        return {key: value for key, value in items if value or key not in rare}

    content = asdict(plan, dict_factory=nonempty)
    content = {key: value for key, value in content.items() if key not in ("commitment", "salt")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(bytes.fromhex(plan.salt) + text.encode()).hexdigest()


# Drawing texts.


def draw(config: CanaryConfig, total: int, generator: random.Random, source: ModelSource | None = None) -> Drawn:
    """Draws ``total`` texts for candidates and references together; their order may depend on how they were found.

    Returns:
        Carriers with their secrets, all distinct; and log2 |R|, the size in bits of the space from which a secret was drawn:
        exact for digits and for new_tokens, where it is the pool of tokens; an upper bound for random_tokens, because
        secrets that do not encode to their own tokens are included.

    Raises:
        ConfigError: Too few distinct texts, or a kind that this model and recipe do not support.
    """
    if total > NUM_CARRIERS:
        raise _too_few(total, f"there are {NUM_CARRIERS} distinct sentences")
    sentences = [carrier(index) for index in generator.sample(range(NUM_CARRIERS), total)]
    if config.kind == "digits":
        if total > 10**config.digits:
            raise _too_few(
                total, f"{config.digits} digits make {10**config.digits}", "raise audit.canaries.digits, or "
            )
        secrets = [f"{number:0{config.digits}d}" for number in generator.sample(range(10**config.digits), total)]
        return list(zip(sentences, secrets, strict=True)), config.digits * math.log2(10)
    if source is None:
        raise ConfigError(
            f"audit.canaries.kind {config.kind} is made of the base model's tokens, but no model was given. Plan with a recipe, "
            "or use kind digits."
        )
    source.check_room(sentences, config.tokens if config.kind == "random_tokens" else 1)
    if config.kind == "new_tokens":
        return _new_tokens(sentences, generator, source)
    return _random_tokens(config.tokens, sentences, generator, source)


def _random_tokens(tokens: int, sentences: Sequence[str], generator: random.Random, source: ModelSource) -> Drawn:
    """Draws tokens uniformly and independently; redraws secrets that do not round-trip, repeat or occur in a sentence."""
    first, later, total = source.first_ids, source.ordinary_ids, len(sentences)
    if not first or not later:
        raise _unreadable("random_tokens")
    log2_secrets = math.log2(len(first)) + (tokens - 1) * math.log2(len(later))
    longer = "raise audit.canaries.tokens, or "
    if log2_secrets < math.log2(total):
        raise _too_few(total, f"{tokens} tokens make {2**log2_secrets:.0f}", longer)
    everything, secrets = "\n".join(sentences), dict[str, str]()
    open_sentences = sentences
    for tries in range(TRIES):
        unfinished = []
        for sentence in open_sentences:
            drawn = (generator.choice(first), *generator.choices(later, k=tokens - 1))
            secret = source.text(drawn)
            usable = secret and secret == secret.strip() and secret not in secrets and secret not in everything
            if usable and source.reads(sentence, secret, drawn):
                secrets[secret] = sentence
            else:
                unfinished.append(sentence)
        if not unfinished:
            return [(sentence, secret) for secret, sentence in secrets.items()], log2_secrets
        if not secrets and tries * total >= TRIES:
            raise _unreadable("random_tokens")
        open_sentences = unfinished
    raise _too_few(total, f"{len(secrets)} of {tokens} tokens were found", longer)


def _new_tokens(sentences: Sequence[str], generator: random.Random, source: ModelSource) -> Drawn:
    """Gives each canary one of the tokens that the base model expects least."""
    everything, total = "\n".join(sentences), len(sentences)
    pool_size = max(2 * total, int(RAREST * len(source.first_ids)))
    pool: dict[str, int] = {}
    # The mean over carriers gives all canaries the same order, so their secrets stay exchangeable.
    carriers = [carrier(index) for index in random.Random(0).sample(range(NUM_CARRIERS), PROBED_CARRIERS)]
    expected_V = source.expected(carriers)
    for token in sorted(source.first_ids, key=lambda token: (expected_V[token], token)):
        secret = source.text((token,))
        if secret not in everything and source.reads(sentences[0], secret, (token,)):
            pool.setdefault(secret, token)
        if len(pool) == pool_size:
            break
    if len(pool) < total:
        raise _too_few(
            total, f"the vocabulary has {len(pool)} new tokens", "use audit.canaries.kind random_tokens, or "
        )
    chosen = generator.sample(sorted(pool), total)
    if not all(source.reads(*pair, (pool[pair[1]],)) for pair in zip(sentences, chosen, strict=True)):
        raise _unreadable("new_tokens")
    return list(zip(sentences, chosen, strict=True)), math.log2(len(pool))


def _too_few(total: int, available: str, advice: str = "") -> ConfigError:
    return ConfigError(
        f"audit.canaries: {total} canaries and references need a distinct text each, and {available}; {advice}lower "
        "audit.canaries.groups and references."
    )


def _unreadable(kind: str) -> ConfigError:
    return ConfigError(
        f"audit.canaries.kind {kind}: every secret would be cut off or share a token with its carrier; raise data.max_length, "
        "lower audit.canaries.tokens, or use kind digits."
    )
