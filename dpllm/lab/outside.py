"""The audit of a model that was trained elsewhere, a PEFT adapter or a whole model, by the canaries that its owner planted.

Comes in: its directory, the name of its base, and a manifest: which texts were planted and which were not, in dpllm's own form
or a stranger's. Goes out: the summary of an audited run, beside what no file can show. Whether coins carry a theorem is read
from what the file says itself, never guessed. Errors name lines and keys and quote no text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from dpllm.auditing.blind import words_control
from dpllm.auditing.bounds import epsilon_lower_bound
from dpllm.auditing.scores import score_encoded
from dpllm.auditing.summary import Beside, summarise
from dpllm.canaries import canaries
from dpllm.canaries.canaries import count_groups
from dpllm.canaries.texts import Canary, encode_secret
from dpllm.errors import ConfigError
from dpllm.model import elsewhere
from dpllm.model.loading import ScoringModels, positions
from dpllm.privacy.plan import AuditSettings
from dpllm.recipe import names
from dpllm.recipe.audit import AuditConfig, default_ways
from dpllm.recipe.config import DataConfig
from dpllm.run import checkpoint
from dpllm.statement.audit import Bound, Summary
from dpllm.statement.audit_bounds import Claim
from dpllm.text.data import TokenSequence
from dpllm.text.layouts import Format

FEWEST_OUT = 20  # texts that were never planted: with fewer there is nothing to compare with
COINS = {"coins": "independent"}
MAX_LENGTH = 512  # tokens of a row, where the model has no last position
ASSUMED = (
    "that each canary trained as often as its group says where it was inserted, and never where it was not",
    "that nobody chose this model, or these canaries, by what was inserted",
    "that the base is the one that the model was trained from",
)
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
    'from it. If they were, put {"coins": "independent"} into its first line.'
)


@dataclass(frozen=True)
class Manifest:
    """Every canary with its coin, the references, and whether the coins can be trusted."""

    canaries: tuple[Canary, ...]
    references: tuple[Canary, ...]
    independent_coins: bool  # each was planted by its own fair coin: without it no lower bound on epsilon follows
    commitment: str | None = None  # of dpllm's own manifest, checked against its content


class OutsideAudit(Summary):
    """What canaries show of a model that was trained elsewhere."""

    model: dict[str, Any]
    canaries: dict[str, Any]
    assumed: tuple[str, ...]


def outside_claim(epsilon: float | None, delta: float | None, unit: str = "example") -> Claim | None:
    """The claim that somebody else makes for the model, epsilon > 0 and delta in [0, 1); None without one.

    Raises:
        ConfigError: One of the two is missing, or out of range.
    """
    if epsilon is None and delta is None:
        return None
    if epsilon is None or delta is None:
        missing = "--epsilon" if epsilon is None else "--delta"
        raise ConfigError(f"a claim is an epsilon with its delta, and {missing} is missing. Type both, or none.")
    if not 0 < epsilon < float("inf") or not 0 <= delta < 1:
        raise ConfigError(
            f"--epsilon {epsilon:g} --delta {delta:g} is not a claim: epsilon lies above 0 and delta in [0, 1). Type others."
        )
    return Claim(epsilon, delta, unit)


def audit_outside(
    path: Path, manifest: Path, *, base: str | None = None, claim: Claim | None = None, fmt: Format = "text"
) -> OutsideAudit:
    """Looks for canaries in a model that was trained elsewhere.

    Guarantee:
        A true claim is called falsified with probability at most the default of ``audit.alpha``, if the manifest says the
        truth: fair, independent coins, each canary trained as often as its group says. Without independent coins no bound
        is given and no claim is tested.

    Args:
        path: PEFT adapter or model directory.
        manifest: private/canaries.json of a run, or a stranger's: see ``read_manifest``.
        base: Name or directory of the base model; None: what adapter_config.json names.
        claim: Of ``outside_claim``.
        fmt: How a canary read in training.

    Raises:
        ConfigError: See ``dpllm.model.elsewhere``; no manifest, a claim without coins, a canary that the model cannot read
            whole, or infinite scores.
    """
    planned = read_manifest(manifest)
    if any(canary.rejected for canary in planned.canaries):
        raise ConfigError(
            f"{manifest}: its canaries are preference pairs, which the audit of their own run compares. Type: dpllm audit RUN"
        )
    if claim and not planned.independent_coins:
        raise ConfigError(
            f"{manifest}: a claim cannot be tested. {_NO_COINS} Otherwise leave --epsilon and --delta out."
        )
    models, kind, name = elsewhere.load(path, base, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return OutsideAudit.pick(
        _summary(models, planned, claim, fmt).to_json(),
        model={
            "kind": kind,
            "name": path.resolve().name,
            "base": names.public_name(name),
            "weights": checkpoint.weight_hashes(path),
        },
        canaries={
            "groups": count_groups(planned.canaries),
            "references": len(planned.references),
            "independent_coins": planned.independent_coins,
            "commitment": planned.commitment,
        },
        assumed=list(ASSUMED),
    )


def _summary(models: ScoringModels, planned: Manifest, claim: Claim | None, fmt: Format) -> Summary:
    """What the audit of a run concludes from such scores; without independent coins the bound is 0, for want of a theorem."""
    everyone, longest = (*planned.canaries, *planned.references), positions(models.tuned) or MAX_LENGTH
    rows, tokens = score_encoded(models, everyone, [_encode(one, fmt, models.tokenizer, longest) for one in everyone])
    ways = default_ways(sum(one.group == 1 for one in planned.canaries))
    settings = AuditSettings.pick(
        {**AuditConfig().fixed().to_json(), **ways}
    )  # nobody fixed them before, so nobody chooses them
    beside = Beside(words=words_control(planned.canaries), own_references=not planned.references)
    report = summarise(rows, claim, settings, tokens=tokens, beside=beside)
    if planned.independent_coins:
        return report
    nothing = epsilon_lower_bound([], [], delta=report.epsilon_lower_bound.delta, alpha=settings.alpha)
    method = "none: the canaries were not planted by independent fair coins"
    changes = {"epsilon_lower_bound": Bound.pick(nothing.to_json(), method=method), "verdict_reason": _NO_COINS}
    return report.model_copy(update=changes)


def _encode(canary: Canary, fmt: Format, tokenizer: Any, longest: int) -> tuple[TokenSequence, tuple[bool, ...]]:
    data = DataConfig(train="elsewhere", max_length=longest, long_examples="refuse")
    if canary.completion and fmt == "text":
        raise ConfigError(
            f"canary {canary.canary_id}: its secret stands in a prompt, and rows of format text have none. Type the --format of "
            "training."
        )
    try:
        return encode_secret(canary, fmt, tokenizer, data)
    except ConfigError:
        raise ConfigError(
            f"canary {canary.canary_id}: in format {fmt} its secret shares tokens with other text, or lies beyond the {longest} "
            "tokens that the model reads, so it could not be learned. Type the --format of training, or leave the canary out."
        ) from None


def read_manifest(path: Path) -> Manifest:
    """Reads dpllm's own manifest, or one JSON object a line.

    A foreign manifest is taken at its word: nothing in a file can show that these texts trained, and how often.

    Raises:
        ConfigError: No manifest, or one that cannot be audited.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such manifest. {_FORM}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a manifest ({type(error).__name__}). {_FORM}") from None
    whole = _parsed(text)
    if isinstance(whole, dict) and "canaries" in whole:
        own = canaries.load(path)
        found = Manifest(own.canaries, own.references, True, own.commitment)
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
    independent = bool(values) and values[0][1] == COINS
    if independent:
        del values[0]
    if not values:
        raise ConfigError(f"{path}: names no canary. {_FORM}")
    entries = [_entry(path, place, number, value) for place, (number, value) in enumerate(values)]
    candidates = tuple(one for one in entries if one.group)
    references = tuple(one for one in entries if not one.group)
    return Manifest(candidates, references, independent)


def _entry(path: Path, place: int, number: int, value: Any) -> Canary:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: line {number} is not a JSON object. {_FORM}")
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
