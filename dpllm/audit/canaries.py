"""Canaries: random secrets that are planted in the training data, or not, by coins nobody knows in advance.

Comes in: the canary section of the recipe. Goes out: a ``CanaryPlan`` made before training, the slots it takes in the
training set, and a commitment that binds the plan without revealing it. This module must never see data or a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dpllm.config import CanaryConfig
from dpllm.errors import ConfigError
from dpllm.rundir import read_json, write_json

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
_COLUMNS = (_OBJECTS, _KINDS, _SIDES, _PLACES, _NAME_HEADS, _NAME_TAILS, _VERBS)


def _grammar_size() -> int:
    size = 1
    for column in _COLUMNS:
        size *= len(column)
    return size


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
    """Decimal digits."""
    inserted: bool
    """The coin."""

    def example(self, fmt: str) -> dict[str, Any]:
        """The raw training row that this canary makes.

        Args:
            fmt: text, prompt_completion or messages.

        Raises:
            ConfigError: Another format.
        """
        if fmt == "text":
            return {"text": f"{self.carrier} {self.secret}"}
        if fmt == "prompt_completion":
            return {"prompt": self.carrier, "completion": self.secret}
        if fmt == "messages":
            turns = (("user", self.carrier), ("assistant", self.secret))
            return {"messages": [{"role": role, "content": content} for role, content in turns]}
        raise ConfigError(
            f"data.format {fmt!r} has no canary, so nothing would be planted; "
            "set data.format to text, prompt_completion or messages."
        )


@dataclass(frozen=True)
class CanaryPlan:
    """Every candidate with its coin, the references, and a commitment to both."""

    canaries: tuple[Canary, ...]
    """The candidates, by group."""
    references: tuple[Canary, ...]
    """Never inserted, from the very same generator."""
    commitment: str
    """SHA-256 over the salt and the canonical JSON of the plan: public before training, checkable afterwards."""
    salt: str = field(repr=False)
    """32 random bytes in hexadecimal: secret, since the coins could otherwise be searched for."""


def plan_canaries(config: CanaryConfig, *, generator: random.Random | None = None) -> CanaryPlan:
    """Draws carriers, secrets and coins.

    Guarantee:
        The coins are independent and fair, and independent of carriers, secrets, ids and order. Candidates and
        references are exchangeable: one draw without replacement gives the carriers of both, and another one the
        secrets of both. Holds with the default generator, the operating system's.

    Args:
        config: Groups, digits and number of references.
        generator: For tests only; the default is the operating system's entropy.

    Raises:
        ConfigError: More canaries than distinct secrets or distinct carriers.
    """
    source = generator or secrets.SystemRandom()
    groups = [group for group, candidates in sorted(config.groups.items()) for _ in range(candidates)]
    total, num_secrets, num_carriers = len(groups) + config.references, 10**config.digits, _grammar_size()
    if total > min(num_secrets, num_carriers):
        raise ConfigError(
            f"audit.canaries: {total} canaries and references need as many distinct secrets and sentences, and there "
            f"are {num_secrets} and {num_carriers}; raise audit.canaries.digits or lower groups and references."
        )
    carriers = [_carrier(index) for index in source.sample(range(num_carriers), total)]
    digits = [f"{number:0{config.digits}d}" for number in source.sample(range(num_secrets), total)]
    pairs = list(zip(carriers, digits, strict=True))
    canaries = tuple(
        Canary(f"c{index:05d}", group, *pairs[index], inserted=bool(source.getrandbits(1)))
        for index, group in enumerate(groups)
    )
    references = tuple(
        Canary(f"r{index:05d}", 0, *pair, inserted=False) for index, pair in enumerate(pairs[len(groups) :])
    )
    salt = source.randbytes(32).hex()
    return CanaryPlan(canaries, references, _commit(canaries, references, salt), salt)


def num_slots(config: CanaryConfig) -> int:
    """Slots in N: every candidate holds one for each repetition, whatever its coin says."""
    return sum(repetitions * candidates for repetitions, candidates in config.groups.items())


def slots(plan: CanaryPlan) -> list[Canary | None]:
    """What stands in each slot: an inserted canary as often as its group says, None where the coin said out."""
    return [canary if canary.inserted else None for canary in plan.canaries for _ in range(canary.group)]


def save(plan: CanaryPlan, path: Path) -> None:
    """Writes texts, coins and salt for the owner's eyes alone (mode 0600), atomically."""
    mask = os.umask(0o077)
    try:
        write_json(path, {**_content(plan.canaries, plan.references), "commitment": plan.commitment, "salt": plan.salt})
    finally:
        os.umask(mask)


def load(path: Path) -> CanaryPlan:
    """Reads a saved plan and checks it against its commitment.

    Raises:
        ConfigError: Missing, damaged or altered file.
    """
    value = read_json(path)
    try:
        canaries = tuple(Canary(**entry) for entry in value["canaries"])
        references = tuple(Canary(**entry) for entry in value["references"])
        plan = CanaryPlan(canaries, references, value["commitment"], value["salt"])
        commitment = _commit(canaries, references, plan.salt)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path}: is no plan of canaries; the file is damaged.") from None
    if commitment != plan.commitment:
        raise ConfigError(
            f"{path}: does not match its own commitment, so canaries or coins were changed after the plan was made and "
            "an audit with them would prove nothing; restore the file, or train again."
        )
    return plan


def _carrier(index: int) -> str:
    """The index-th sentence of the grammar; distinct indices give distinct sentences."""
    words = []
    for column in _COLUMNS:
        index, choice = divmod(index, len(column))
        words.append(column[choice])
    item, kind, side, place, head, tail, verb = words
    return f"The {item} {kind} for the {side} {place} of {head}{tail} {verb}"


def _content(canaries: tuple[Canary, ...], references: tuple[Canary, ...]) -> dict[str, Any]:
    return {"canaries": [asdict(c) for c in canaries], "references": [asdict(c) for c in references]}


def _commit(canaries: tuple[Canary, ...], references: tuple[Canary, ...], salt: str) -> str:
    text = json.dumps(_content(canaries, references), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(bytes.fromhex(salt) + text.encode()).hexdigest()
