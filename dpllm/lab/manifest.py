"""Canary manifests: which texts were planted in a model by somebody else, and which were not; and what follows from scores.

Comes in: a file, in dpllm's own form or a stranger's; then score and token tables. Goes out: a ``Manifest``; then what an
audited run's report says, without what this manifest cannot carry: references that are not there, and a theorem about coins
that were none. Whether coins carry a theorem is read from what the file says itself, never guessed. Errors name lines and
keys and quote no text. It must not know a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from dpllm.auditing.blind import words_control
from dpllm.auditing.bounds import Claim, epsilon_lower_bound
from dpllm.auditing.record import Bound, Summary
from dpllm.auditing.summary import Beside, summarise
from dpllm.auditing.table import CanaryScores, TokenTable
from dpllm.canaries import canaries
from dpllm.canaries.canaries import Canary
from dpllm.errors import ConfigError
from dpllm.recipe.audit import AuditConfig, default_ways
from dpllm.statement.run_files import AuditSettings

FEWEST_OUT = 20  # texts that were never planted: with fewer there is nothing to compare with
INDEPENDENT = "independent"
_MOST_REPEATED = 1_000_000
_HALVES = re.compile("[\ud800-\udfff]")  # of characters: no tokenizer takes them
_LIKELIEST_LIE = 1e-6  # fair coins look less fair than this once in a million manifests
_FORM = (
    'A manifest is canaries.json of a dpllm run, or one JSON object a line: first {"coins": "independent"} where each '
    'canary was planted by a fair coin of its own, then {"carrier": ..., "secret": ..., "inserted": true, "group": 1} '
    "for each canary (group: how often it was repeated, 0 for a reference, which is not inserted; of a whole text, the last "
    "words are the secret)."
)
_NO_COINS = (
    "The manifest does not say that each canary was inserted by a fair coin of its own, so no lower bound on epsilon follows "
    'from it and no claim is tested. If they were, put {"coins": "independent"} into its first line.'
)
_SHIFT = " The words alone, or the base model, already tell planted texts from the others, so no score shows what was learned."


@dataclass(frozen=True)
class Manifest:
    """Every canary with its coin, the references, and how far the coins can be trusted."""

    canaries: tuple[Canary, ...]
    references: tuple[Canary, ...]
    independent_coins: bool  # each was planted by its own fair coin: without it no lower bound on epsilon follows
    coins: str  # how the file says that the canaries to plant were chosen
    commitment: str | None = None  # of dpllm's own manifest, checked against its content
    log2_secrets: float | None = None


def read_manifest(path: Path) -> Manifest:
    """Reads dpllm's own manifest, or one JSON object a line.

    A foreign manifest is taken at its word: nothing in a file can show that these texts trained, and how often.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such manifest. {_FORM}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a manifest ({type(error).__name__}). {_FORM}") from None
    whole = _parsed(text)
    if isinstance(whole, dict) and "canaries" in whole:
        own, drawn = canaries.load(path), "independent, as dpllm draws them"
        found = Manifest(own.canaries, own.references, True, drawn, own.commitment, own.log2_secrets)
    else:
        found = _foreign(path, text)
    _check(path, found)
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _foreign(path: Path, text: str) -> Manifest:
    values = [(number, _parsed(line)) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if wrong := [number for number, value in values if not isinstance(value, dict)]:
        raise ConfigError(f"{path}: line {wrong[0]} is not a JSON object. {_FORM}")
    coins = "not stated"
    if values and "coins" in values[0][1]:
        number, header = values.pop(0)
        if set(header) != {"coins"} or not isinstance(header["coins"], str):
            raise ConfigError(f"{path}: line {number} should say how coins were drawn, and nothing else. {_FORM}")
        coins = INDEPENDENT if header["coins"] == INDEPENDENT else "stated, and not as independent"
    if not values:
        raise ConfigError(f"{path}: names no canary. {_FORM}")
    entries = [_entry(path, place, number, value) for place, (number, value) in enumerate(values)]
    candidates, references = (tuple(one for one in entries if bool(one.group) == coin) for coin in (True, False))
    return Manifest(candidates, references, coins == INDEPENDENT, coins)


def _entry(path: Path, place: int, number: int, value: dict[str, Any]) -> Canary:
    group: Any = value.get("group", 1)
    inserted: Any = value.get("inserted", False if group == 0 else None)
    texts = [value.get("carrier"), value.get("secret")]
    good = (
        set(value) <= {"carrier", "secret", "inserted", "group"}
        and all(isinstance(text, str) and text.strip() and not _HALVES.search(text) for text in texts)
        and isinstance(inserted, bool)
        and type(group) is int
        and inserted <= group <= _MOST_REPEATED  # 0, a reference, is not inserted
    )
    if not good:
        raise ConfigError(f"{path}: line {number} is not a canary. {_FORM}")
    return Canary(f"{'c' if group else 'r'}{place:05d}", group, value["carrier"], value["secret"], inserted)


def _check(path: Path, found: Manifest) -> None:
    everyone = (*found.canaries, *found.references)
    planted = sum(canary.inserted for canary in found.canaries)
    if not planted:
        raise ConfigError(
            f"{path}: no canary was ever inserted, so the model could not have learned any. Plant canaries and train again."
        )
    if len(everyone) - planted < FEWEST_OUT:
        raise ConfigError(
            f"{path}: {len(everyone) - planted} texts that were never inserted are too few to compare {planted} inserted ones "
            f"with; {FEWEST_OUT} are needed, as inserted: false or as references (group: 0)."
        )
    if repeated := len(everyone) - len({(canary.carrier, canary.secret) for canary in everyone}):
        raise ConfigError(
            f"{path}: {repeated} canaries have the same text as another one, so it is unclear whether they were inserted. Keep "
            "one line for each text."
        )
    chance = stats.binomtest(planted, len(found.canaries)).pvalue
    if found.independent_coins and chance < _LIKELIEST_LIE:
        raise ConfigError(
            f"{path}: {planted} of {len(found.canaries)} canaries were inserted, which fair coins do once in "
            f"{1 / max(chance, 1e-300):.0e} manifests; without fair coins there is no lower bound. Leave the line about coins "
            "out, or plant by fair coins."
        )


def summarise_manifest(
    rows: Sequence[CanaryScores], tokens: TokenTable, planned: Manifest, claim: Claim | None
) -> Summary:
    """What ``dpllm.auditing.summary.summarise`` concludes, from the scores of a manifest's canaries and a stranger's claim.

    Without references the canaries that were left out stand in for them; without independent coins the bound is 0, for want of
    a theorem, and the verdict inconclusive or no_claim.
    """
    ways = default_ways(sum(one.group == 1 for one in planned.canaries))
    settings = AuditSettings.pick({**AuditConfig().fixed(), **ways})  # nobody fixed them before, so nobody chooses them
    beside = Beside(words=words_control(planned.canaries), stand_ins=not planned.references)
    report = summarise(rows, claim, settings, tokens=tokens, beside=beside)
    if planned.independent_coins:
        return report
    nothing = epsilon_lower_bound([], [], delta=report.epsilon_lower_bound.delta, alpha=settings.alpha)
    method = "none: the canaries were not planted by independent fair coins"
    shift = report.controls.base_separates or bool(report.controls.words and report.controls.words.succeeds)
    changes = {
        "epsilon_lower_bound": Bound.pick(nothing.to_json(), method=method),
        "repeated": {group: seen.model_copy(update={"test": None}) for group, seen in report.repeated.items()},
        "verdict": "inconclusive" if report.claim else "no_claim",
        "verdict_reason": _NO_COINS + (_SHIFT if shift else ""),
    }
    return report.model_copy(update=changes)
