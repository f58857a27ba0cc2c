"""Canaries: random secrets that are planted in the training data, or not, by coins nobody knows in advance.

Comes in: the canary section of the recipe, and for some kinds the base model. Goes out: a ``CanaryPlan`` made before
training, the slots it takes in the training set, and a commitment that binds the plan without revealing it. This module
must never see data, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.canaries import kinds
from dpllm.errors import ConfigError
from dpllm.files import read_json, write_json
from dpllm.privacy.plan import _slots_each
from dpllm.recipe.config import CanaryConfig, DataConfig

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

    @property
    def text(self) -> str:
        """Carrier and secret as one text; a stranger's canary may have no carrier."""
        return f"{self.carrier} {self.secret}".strip()

    def example(self, fmt: str) -> dict[str, Any]:
        """The raw training row that this canary makes.

        Args:
            fmt: text, prompt_completion or messages.

        Raises:
            ConfigError: Another format.
        """
        return kinds.example(self.carrier, self.secret, fmt)


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
    kind: str = "digits"
    """audit.canaries.kind."""
    log2_secrets: float | None = None
    """log2 |R|, in bits: what the exposure of a secret cannot exceed. For each kind it says what ``kinds.draw`` says."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The other keys of audit.canaries that the texts follow from."""


def plan_canaries(
    config: CanaryConfig, *, source: ModelSource | None = None, generator: random.Random | None = None
) -> CanaryPlan:
    """Draws carriers, secrets and coins.

    Guarantee:
        The coins are independent and fair, and independent of carriers, secrets, ids and order. Candidates and
        references are exchangeable: all texts are drawn first, put into a random order, and then given out. No two share
        a carrier or a secret, and no carrier contains a secret. Holds with the default generator, the operating
        system's, for every kind.

    Args:
        config: Kind, groups and number of references.
        source: The base model and how rows are encoded; digits and pii need none.
        generator: For tests only; the default is the operating system's entropy.

    Raises:
        ConfigError: More canaries than distinct secrets or distinct carriers, or a kind that this model cannot have.
    """
    generator = generator or secrets.SystemRandom()
    groups = [group for group, candidates in sorted(config.groups.items()) for _ in range(candidates)]
    drawn = kinds.draw(config, len(groups) + config.references, generator, source)
    texts = list(drawn.texts)
    generator.shuffle(texts)  # whatever the order says of how a text was found, it says the same of all
    canaries = [Canary(f"c{index:05d}", group, *texts[index], inserted=False) for index, group in enumerate(groups)]
    references = tuple(
        Canary(f"r{index:05d}", 0, *text, inserted=False) for index, text in enumerate(texts[len(groups) :])
    )
    plan = CanaryPlan((), references, "", "", config.kind, drawn.log2_secrets, _settings(config))
    return _toss(plan, canaries, generator)


def redraw_coins(plan: CanaryPlan, *, generator: random.Random | None = None) -> CanaryPlan:
    """The same texts for another run: fresh coins, a fresh salt, and so another commitment.

    Guarantee:
        The coins are independent and fair, and independent of the texts and of the plan's own coins.

    Args:
        plan: Of which texts, ids, groups and settings are kept.
        generator: For tests only; the default is the operating system's entropy.
    """
    return _toss(plan, plan.canaries, generator or secrets.SystemRandom())


def check_fits(plan: CanaryPlan, config: CanaryConfig, path: Path) -> CanaryPlan:
    """Makes sure that canaries planned earlier are those that the recipe asks for.

    Args:
        plan: What was planned.
        config: The canary section of the recipe that is about to train.
        path: Where the plan lies.

    Returns:
        The plan.

    Raises:
        ConfigError: Another kind, other groups, or another key that the texts follow from.
    """
    planned, wanted = {"kind": plan.kind, **plan.settings}, {"kind": config.kind, **_settings(config)}
    different = [key for key in wanted if planned.get(key) != wanted[key]]
    if different:
        keys = ", ".join(f"audit.canaries.{key}" for key in different)
        raise ConfigError(
            f"{path}: these canaries were planned with another {keys} than the recipe's, and the audit would read the recipe. "
            "Plan them again with dpllm canaries plan RECIPE --overwrite, or delete the file to have new ones drawn."
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
    """What stands in each slot: an inserted canary as often as one draw brings it; nothing where the coin said out."""
    filled = []
    for canary in plan.canaries:
        held = _slots_each(canary.group, data)
        filled += [(canary,) * (canary.group // held if canary.inserted else 0)] * held
    return filled


def save(plan: CanaryPlan, path: Path) -> None:
    """Writes texts, coins and salt for the owner's eyes alone (mode 0600), atomically."""
    write_json(path, {**_content(plan), "commitment": plan.commitment, "salt": plan.salt}, mode=0o600)


def load(path: Path) -> CanaryPlan:
    """Reads a saved plan and checks it against its commitment.

    Raises:
        ConfigError: Missing, damaged or altered file.
    """
    value = read_json(path)
    try:
        canaries = tuple(Canary(**entry) for entry in value["canaries"])
        references = tuple(Canary(**entry) for entry in value["references"])
        how = (value["kind"], value["log2_secrets"], dict(value["settings"]))
        plan = CanaryPlan(canaries, references, value["commitment"], value["salt"], *how)
        commitment = _commit(plan)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path}: is no plan of canaries; the file is damaged.") from None
    if commitment != plan.commitment:
        raise ConfigError(
            f"{path}: does not match its own commitment, so canaries or coins were changed after the plan was made and "
            "an audit with them would prove nothing; restore the file, or train again."
        )
    return plan


def _toss(plan: CanaryPlan, canaries: Sequence[Canary], generator: random.Random) -> CanaryPlan:
    tossed = tuple(replace(canary, inserted=bool(generator.getrandbits(1))) for canary in canaries)
    plan = replace(plan, canaries=tossed, salt=generator.randbytes(32).hex())
    return replace(plan, commitment=_commit(plan))


def _settings(config: CanaryConfig) -> dict[str, Any]:
    """As JSON reads it back."""
    keys = ("groups", "references", *kinds.KEYS[config.kind])
    return dict(json.loads(json.dumps({key: getattr(config, key) for key in keys})))


def _content(plan: CanaryPlan) -> dict[str, Any]:
    return {key: value for key, value in asdict(plan).items() if key not in ("commitment", "salt")}


def _commit(plan: CanaryPlan) -> str:
    text = json.dumps(_content(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(bytes.fromhex(plan.salt) + text.encode()).hexdigest()
