"""Canaries: random secrets that are planted in the training data, or not, by coins nobody knows in advance.

Comes in: the canary section of the recipe, and for some kinds the base model. Goes out: a ``CanaryPlan`` made before
training, the slots it takes in the training set, a commitment that binds the plan without revealing it, and a canary as
tokens. This module must never see data, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.canaries import kinds
from dpllm.errors import ConfigError, DataError
from dpllm.files import read_json, write_json
from dpllm.privacy.releases import flipped
from dpllm.recipe.audit import AuditConfig, CanaryConfig
from dpllm.recipe.config import DataConfig
from dpllm.recipe.derived import slots_each
from dpllm.text.data import TokenSequence, encode
from dpllm.text.layouts import Format

if TYPE_CHECKING:
    from dpllm.canaries.source import ModelSource  # which loads torch


@dataclass(frozen=True)
class Canary:
    """One random secret behind a sentence that no other canary shares."""

    canary_id: str
    """Position in the plan; says nothing about the coin."""
    group: int
    """How many times it is repeated where its coin says in; 0 for a reference."""
    carrier: str = field(repr=False)
    """The sentence before the secret."""
    secret: str = field(repr=False)
    """What is to be found: digits, the text of some tokens, or a personal detail, as the kind says."""
    inserted: bool
    """The coin."""
    rejected: str = field(default="", repr=False)
    """Of a preference pair: another secret, drawn as the first was. The first is preferred. Empty: this is no pair."""
    flipped: bool = field(default=False, repr=False)
    """Where the coin is a label: whether it was flipped before training, as all labels are. Drawn once."""
    completion: str = ""
    """What is learned behind the secret, which then stands in the prompt. Empty: the secret is learned."""

    @property
    def text(self) -> str:
        """Carrier and secrets as one text; a stranger's canary may have no carrier."""
        return f"{self.carrier} {self.secret} {self.rejected}".strip()

    @property
    def answers(self) -> tuple[Canary, ...]:
        """Itself; of a pair, each answer as a canary of its own."""
        if not self.rejected:
            return (self,)
        other = replace(self, canary_id=self.canary_id + kinds.REJECTED, secret=self.rejected, rejected="")
        return replace(self, rejected=""), other

    def example(self, fmt: Format) -> dict[str, Any]:
        """The raw training row that this canary makes.

        Raises:
            ConfigError: The secret stands in the prompt, and rows of this format have none or are pairs.
        """
        if self.completion:
            check_place("prompt", fmt)
        if fmt == "text":
            return {"text": f"{self.carrier} {self.secret}"}
        if fmt == "preference":
            first, second = (self.secret, self.rejected)[:: 1 if self.inserted != self.flipped else -1]
            return {"prompt": self.carrier, "chosen": first, "rejected": second}
        prompt, completion = self.carrier, self.secret
        if self.completion:
            prompt, completion = f"{self.carrier} {self.secret}", self.completion
        if fmt == "prompt_completion":
            return {"prompt": prompt, "completion": completion}
        turns = (("user", prompt), ("assistant", completion))
        return {"messages": [{"role": role, "content": content} for role, content in turns]}


@dataclass(frozen=True)
class CanaryPlan:
    """Every candidate with its coin, the references, how they were drawn, and a commitment to all of it."""

    canaries: tuple[Canary, ...]
    """The candidates, by group."""
    references: tuple[Canary, ...]
    """Never inserted, from the very same generator."""
    commitment: str
    """SHA-256 over the salt and the canonical JSON of the plan: public before training, checkable afterwards."""
    salt: str = field(repr=False)
    """32 random bytes in hexadecimal: secret, since the coins could otherwise be searched for."""
    kind: str
    """audit.canaries.kind."""
    log2_secrets: float
    """log2 |R|, in bits: what the exposure of a secret cannot exceed. ``kinds.draw`` says what it is for each kind."""
    settings: dict[str, Any]
    """The other keys of audit.canaries that the texts follow from."""
    gradient_key: str = field(default="", repr=False)
    """16 random bytes in hexadecimal, from which the vectors of gradient canaries are drawn: secret, as the salt is."""
    gradient_coins: tuple[bool, ...] = field(default=(), repr=False)
    """Of each gradient canary."""

    label_epsilon: float | None = None
    """Of one label, where coins are labels, each flipped with probability 1 / (1 + e^epsilon). None: a coin plants, or not."""

    @property
    def pairs(self) -> bool:
        """Whether the canaries are preference pairs."""
        return any(canary.rejected for canary in self.canaries)


def plan_canaries(
    config: CanaryConfig,
    *,
    source: ModelSource | None = None,
    pairs: bool = False,
    label_epsilon: float | None = None,
    gradient: int = 0,
    generator: random.Random | None = None,
) -> CanaryPlan:
    """Draws carriers, secrets and coins.

    Guarantee:
        The coins are independent and fair, and independent of carriers, secrets, ids and order. Candidates and
        references are exchangeable: all texts are drawn first, put into a random order, and then given out; so are the two
        answers of a pair. No two share a carrier or a secret, and no carrier contains a secret. Holds with the default
        generator, the operating system's, for every kind. With ``label_epsilon`` all pairs are planted; the coin says which
        answer is preferred, and what trains is that label after randomised response, so that it is under the guarantee of a
        label, and under no other.

    Args:
        config: Kind, groups and number of references.
        source: The base model and how rows are encoded; digits need none.
        pairs: Draw preference pairs, which have two secrets each.
        label_epsilon: See ``CanaryPlan``; there are no references then, which no label could ever have touched.
        gradient: How many gradient canaries.
        generator: For tests only; the default is the operating system's entropy.

    Raises:
        ConfigError: More canaries than distinct secrets or distinct carriers, a kind that this model cannot have, or pairs whose
            secrets should stand in prompts.
    """
    if pairs and config.place == "prompt":
        raise ConfigError(
            "audit.canaries.place: prompt, but the secrets of preference pairs are answers. Leave place out."
        )
    generator = generator or secrets.SystemRandom()
    groups = [group for group, candidates in sorted(config.groups.items()) for _ in range(candidates)]
    references = 0 if label_epsilon else config.references
    number = len(groups) + references
    drawn = kinds.draw(config, number * (1 + pairs), generator, source)
    texts = list(drawn.texts)
    generator.shuffle(texts)  # whatever the order says of how a text was found, it says the same of all
    others = [secret for _, secret in texts[number:]] or [""] * number
    texts = texts[:number]
    names = [f"c{index:05d}" for index in range(len(groups))] + [f"r{index:05d}" for index in range(references)]
    completion = kinds.COMPLETION if config.place == "prompt" else ""
    every = [
        Canary(name, group, *text, inserted=False, rejected=other, completion=completion)
        for name, group, text, other in zip(names, [*groups, *[0] * references], texts, others, strict=True)
    ]
    canaries, held = every[: len(groups)], tuple(every[len(groups) :])
    kept: dict[str, Any] = {
        "settings": _settings(config),
        "label_epsilon": label_epsilon,
        "gradient_coins": (False,) * gradient,
    }
    return _toss(CanaryPlan((), held, "", "", config.kind, drawn.log2_secrets, **kept), canaries, generator)


def check_place(place: str, fmt: str) -> None:
    """Refuses secrets in prompts, with a ConfigError, where rows have no prompt with one completion."""
    if place == "prompt" and fmt in ("text", "preference"):
        raise ConfigError(
            f"audit.canaries.place: prompt, but rows of format {fmt} have no prompt with one completion. Set "
            "audit.canaries.place: target, or data.format if the rows have another."
        )


def redraw_coins(plan: CanaryPlan, *, generator: random.Random | None = None) -> CanaryPlan:
    """The same texts for another run: fresh coins and flips, a fresh salt, another commitment; ``generator`` is for tests only.

    Guarantee:
        The coins are independent and fair, and independent of the texts and of the plan's own coins.
    """
    return _toss(plan, plan.canaries, generator or secrets.SystemRandom())


def check_fits(
    plan: CanaryPlan, audit: AuditConfig, path: Path, *, pairs: bool = False, label_epsilon: float | None = None
) -> CanaryPlan:
    """Makes sure that canaries planned earlier, in ``path``, are those that the recipe asks for, and returns them.

    Raises:
        ConfigError: Another kind, other groups, another key that the texts follow from, or pairs where texts are wanted.
    """
    planned, wanted = {"kind": plan.kind, **plan.settings}, {"kind": audit.texts.kind, **_settings(audit.texts)}
    different = [f"audit.canaries.{key}" for key in {**planned, **wanted} if planned.get(key) != wanted.get(key)]
    if len(plan.gradient_coins) != audit.gradient_canaries:
        different.append("audit.gradient_canaries")
    if plan.canaries and plan.pairs != pairs:
        different.append("train.objective")
    if plan.canaries and plan.label_epsilon != label_epsilon:
        different.append("data.label_record")
    if different:
        keys = ", ".join(different)
        raise ConfigError(
            f"{path}: these canaries were planned with another {keys} than the recipe has, and the audit reads the recipe. Plan "
            "them again with dpllm canaries plan RECIPE --overwrite, or delete the file to have new ones drawn."
        )
    return plan


def count_groups(canaries: Sequence[Canary]) -> dict[str, dict[str, int]]:
    """Repetitions -> how many candidates there are, and how many of them were planted."""
    groups: dict[str, dict[str, int]] = {}
    for canary in sorted(canaries, key=lambda canary: canary.group):
        counts = groups.setdefault(str(canary.group), {"candidates": 0, "inserted": 0})
        counts["candidates"] += 1
        counts["inserted"] += canary.inserted
    return groups


def slots(plan: CanaryPlan, data: DataConfig) -> list[tuple[Canary, ...]]:
    """What stands in each slot: an inserted canary as often as one draw brings it; nothing where the coin said out.

    Where coins are labels, all stand there.
    """
    filled = []
    for canary in plan.canaries:
        held = slots_each(canary.group, data)
        filled += [(canary,) * (canary.group // held if canary.inserted or plan.label_epsilon else 0)] * held
    return filled


def save(plan: CanaryPlan, path: Path) -> None:
    """Writes texts, coins and salt whole or not at all, for the owner's eyes alone (mode 0600)."""
    write_json(path, asdict(plan), mode=0o600)


def load(path: Path) -> CanaryPlan:
    """Reads a saved plan and checks it against its commitment.

    Raises:
        ConfigError: Missing, damaged or altered file.
    """
    value = read_json(path)
    try:
        given = {field.name: value[field.name] for field in fields(CanaryPlan) if field.name in value}
        for part in ("canaries", "references"):
            given[part] = tuple(Canary(**entry) for entry in value[part])
        plan = CanaryPlan(**{**given, "gradient_coins": tuple(value["gradient_coins"])})
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


def encode_secret(
    canary: Canary, fmt: Format, tokenizer: Any, data: DataConfig
) -> tuple[TokenSequence, tuple[bool, ...]]:
    """Encodes a canary as training does, of a pair the chosen answer, and finds the tokens of its secret.

    They are the shortest run of tokens, as far to the right as possible, whose decoding contains the secret. Where the secret
    stands in the prompt, they are the targets of the sequence instead of those that training has: what is scored is how the model
    completes the beginning of a prompt.

    Returns:
        The sequence, and a mask over its tokens.

    Raises:
        ConfigError: The canary does not fit into max_length, or its secret is not a training target.
    """
    fmt = "prompt_completion" if fmt == "preference" else fmt
    try:
        sequences = encode(canary.example(fmt), fmt, tokenizer, data)
    except DataError as error:
        raise ConfigError(f"canary {canary.canary_id} cannot be encoded: {error}") from None
    span = _find(canary.secret, sequences[0].input_ids, tokenizer) if len(sequences) == 1 else None
    if span is None:
        raise ConfigError(
            f"canary {canary.canary_id} does not fit into data.max_length ({data.max_length} tokens), so its secret would "
            "not be trained on as a whole; raise data.max_length, or lower audit.canaries.digits or audit.canaries.tokens."
        )
    sequence = sequences[0]
    mask = tuple(span[0] <= place < span[1] for place in range(len(sequence.input_ids)))
    learned = sequence.loss_mask[span[0] : span[1]]
    if canary.completion:
        if any(learned):
            raise ConfigError(
                f"canary {canary.canary_id}: its secret is a training target though it stands in the prompt, so the audit would "
                "not measure what prompts give away. Set audit.canaries.place: target."
            )
        return replace(sequence, loss_mask=mask, denominator=sum(mask)), mask
    if not all(learned):
        raise ConfigError(
            f"canary {canary.canary_id}: its secret is not a training target in format {fmt}, so the model would not learn it; "
            "set data.format to text or prompt_completion."
        )
    return sequence, mask


def _find(secret: str, ids: Sequence[int], tokenizer: Any) -> tuple[int, int] | None:
    """First and last-plus-one token of the secret; a chat template may put tokens of its own behind it."""
    for start in range(len(ids) - 1, -1, -1):
        if secret in tokenizer.decode(ids[start:]):
            end = next(end for end in range(start + 1, len(ids) + 1) if secret in tokenizer.decode(ids[start:end]))
            return start, end
    return None


def _toss(plan: CanaryPlan, canaries: Sequence[Canary], generator: random.Random) -> CanaryPlan:
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
    settings = {key: keys[key] for key in ("groups", "references", *kinds.KEYS[config.kind])}
    return settings if config.place == "target" else {**settings, "place": config.place}


def _commit(plan: CanaryPlan) -> str:
    def known(items: list[tuple[str, Any]]) -> dict[str, Any]:
        rare = ("rejected", "flipped", "label_epsilon", "completion")
        return {key: value for key, value in items if value or key not in rare}

    content = asdict(plan, dict_factory=known)
    content = {key: value for key, value in content.items() if key not in ("commitment", "salt")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(bytes.fromhex(plan.salt) + text.encode()).hexdigest()
