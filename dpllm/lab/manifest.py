"""Canary manifests: which texts were planted in a model, and which were not, in dpllm's own form or a stranger's.

Comes in: a file. Goes out: a ``Manifest``. Whether its coins carry a theorem is read from what it says itself, never guessed.
Errors name lines and keys and quote no text. It must not know a model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from dpllm.canaries import canaries
from dpllm.canaries.canaries import Canary
from dpllm.errors import ConfigError

FEWEST_OUT = 20
"""Texts that were never planted: with fewer there is nothing to compare with."""
INDEPENDENT = "independent"
_KEYS = {"text", "carrier", "secret", "inserted", "group"}
_LARGEST_GROUP = 10**6
_LIKELIEST_LIE = 1e-6  # fair coins look less fair than this once in a million manifests
_FORM = (
    'A manifest is canaries.json of a dpllm run, or one JSON object a line: first {"coins": "independent"} where each '
    'canary was planted by a fair coin of its own, then {"carrier": ..., "secret": ..., "inserted": true, "group": 1} '
    "for each canary (or text instead of carrier and secret; group 0: a reference that had no coin)."
)


@dataclass(frozen=True)
class Manifest:
    """Every canary with its coin, the references, and how far the coins can be trusted."""

    canaries: tuple[Canary, ...]
    references: tuple[Canary, ...]
    independent_coins: bool
    """Each canary was planted by its own fair coin: without it no lower bound on epsilon follows."""
    coins: str
    """How the file says that the canaries to plant were chosen."""
    commitment: str | None = None
    """Of dpllm's own manifest, checked against its content."""
    log2_secrets: float | None = None
    whole_texts: bool = False
    """No carrier is known: the whole text of a canary is its secret."""


def read_manifest(path: Path) -> Manifest:
    """Reads dpllm's own manifest, or one JSON object a line.

    A foreign manifest is taken at its word: nothing in a file can show that these texts trained, and how often.

    Raises:
        ConfigError: Missing or damaged file, no canary that was planted, fewer than 20 texts that were not, two canaries
            of the same text, or coins that are said to be fair and are not.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such manifest, so nobody knows what to look for. {_FORM}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a manifest ({type(error).__name__}). {_FORM}") from None
    found = _own(path) if _is_own(text) else _foreign(path, text)
    _check(path, found)
    return found


def _is_own(text: str) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "canaries" in value


def _own(path: Path) -> Manifest:
    plan = canaries.load(path)
    return Manifest(
        plan.canaries, plan.references, True, "independent, as dpllm draws them", plan.commitment, plan.log2_secrets
    )


def _foreign(path: Path, text: str) -> Manifest:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    values = [(number, _object(path, number, line)) for number, line in lines]
    coins = "not stated"
    if values and "coins" in values[0][1]:
        number, header = values.pop(0)
        if set(header) != {"coins"} or not isinstance(header["coins"], str):
            raise ConfigError(f"{path}: line {number} says how coins were drawn, and nothing else. {_FORM}")
        coins = header["coins"]
    if not values:
        raise ConfigError(f"{path}: names no canary, so there is nothing to look for. {_FORM}")
    entries = [_entry(path, place, number, value) for place, (number, value) in enumerate(values)]
    whole = {not entry.carrier for entry in entries}
    if len(whole) == 2:
        raise ConfigError(
            f"{path}: some canaries are whole texts and some have a carrier, and their scores cannot be compared. Write all "
            "of them in one way."
        )
    return Manifest(
        canaries=tuple(entry for entry in entries if entry.group),
        references=tuple(entry for entry in entries if not entry.group),
        independent_coins=coins == INDEPENDENT,
        coins=coins if coins in (INDEPENDENT, "not stated") else "stated, and not as independent",
        whole_texts=whole == {True},
    )


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: line {number} is not valid JSON. {_FORM}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: line {number} holds no JSON object. {_FORM}")
    return value


def _entry(path: Path, place: int, number: int, value: dict[str, Any]) -> Canary:
    texts = {key: value[key] for key in ("text", "carrier", "secret") if key in value}
    group: Any = value.get("group", 1)
    inserted: Any = value.get("inserted", False if group == 0 else None)
    good = (
        set(value) <= _KEYS
        and set(texts) in ({"text"}, {"carrier", "secret"})
        and all(isinstance(text, str) and text.strip() and _encodable(text) for text in texts.values())
        and isinstance(inserted, bool)
        and type(group) is int
        and 0 <= group <= _LARGEST_GROUP
    )
    if not good:
        raise ConfigError(f"{path}: line {number} is no canary. {_FORM}")
    if group == 0 and inserted:
        raise ConfigError(
            f"{path}: line {number} is of group 0 and was inserted; a reference never is. Give its number of repetitions as "
            "group."
        )
    secret = texts["text"] if "text" in texts else texts["secret"]
    return Canary(f"{'c' if group else 'r'}{place:05d}", group, texts.get("carrier", ""), secret, inserted)


def _encodable(text: str) -> bool:
    """JSON may hold halves of characters, which no tokenizer reads."""
    return text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text)


def _check(path: Path, found: Manifest) -> None:
    everyone = (*found.canaries, *found.references)
    planted = sum(canary.inserted for canary in found.canaries)
    if not planted:
        raise ConfigError(
            f"{path}: no canary was ever inserted, so there is nothing that a model could have learned. Plant canaries and "
            "train again."
        )
    if len(everyone) - planted < FEWEST_OUT:
        raise ConfigError(
            f"{path}: {len(everyone) - planted} texts that were never inserted are too few to compare {planted} inserted ones "
            f"with; {FEWEST_OUT} are needed, as inserted: false or as references (group: 0)."
        )
    if repeated := len(everyone) - len({(canary.carrier, canary.secret) for canary in everyone}):
        raise ConfigError(
            f"{path}: {repeated} canaries have the text of another one, so nobody can say whether they were inserted. Keep one "
            "line for each text."
        )
    chance = stats.binomtest(planted, len(found.canaries)).pvalue
    if found.independent_coins and chance < _LIKELIEST_LIE:
        raise ConfigError(
            f"{path}: {planted} of {len(found.canaries)} canaries were inserted, which fair coins do once in "
            f"{1 / max(chance, 1e-300):.0e} manifests; without fair coins there is no lower bound. Leave the line about coins "
            "out, or plant by fair coins."
        )
