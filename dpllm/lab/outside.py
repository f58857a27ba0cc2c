"""The audit of a model that was trained elsewhere: a PEFT adapter, or a whole model.

Comes in: its directory, the name of its base, and what it may have learned: a manifest of canaries, or rows of both kinds.
Goes out: a report as an audited run has it. What no file can show is listed in the report as assumed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dpllm.auditing.members import audit_members
from dpllm.auditing.scores import score_encoded
from dpllm.auditing.table import CanaryScores, TokenTable
from dpllm.auditing.verdict import Claim
from dpllm.canaries.canaries import count_groups, encode_secret
from dpllm.errors import ConfigError, DataError
from dpllm.files import write_json
from dpllm.lab.manifest import Manifest, read_manifest
from dpllm.lab.manifest_summary import summarise_manifest
from dpllm.lab.outside_model import load_outside, positions
from dpllm.recipe.config import AuditConfig, DataConfig
from dpllm.run import checkpoint
from dpllm.text import data
from dpllm.text.data import Format, TokenSequence

if TYPE_CHECKING:
    from dpllm.canaries.canaries import Canary
    from dpllm.model.loading import ScoringModels

MAX_LENGTH = 512
"""Tokens of a member's row that are scored, where the model can read as many."""
ASSUMED_CANARIES = (
    "that each canary trained as often as its group says where it was inserted, and never where it was not",
    "that nobody chose this model, or these canaries, by what was inserted",
)
ASSUMED_MEMBERS = (
    "that all members trained and no non-member did",
    "that rows read in training as they are read here",
)
_ALL_ROWS = 10**9


def outside_claim(epsilon: float | None, delta: float | None, unit: str = "example") -> Claim | None:
    """The claim that somebody else makes for the model; None without one.

    Args:
        epsilon: Above 0.
        delta: In [0, 1).
        unit: Whose it is; for "example" a canary with k repetitions holds k units, else one.

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
            f"--epsilon {epsilon:g} --delta {delta:g} is no claim: epsilon lies above 0 and delta in [0, 1). Type others."
        )
    return Claim(epsilon, delta, unit)


def audit_outside_canaries(
    path: Path,
    manifest: Path,
    *,
    base: str | None = None,
    claim: Claim | None = None,
    fmt: Format = "text",
) -> dict[str, Any]:
    """Looks for canaries in a model that was trained elsewhere.

    Guarantee:
        A true claim is called falsified with probability at most the default of ``audit.alpha``, if the manifest says the
        truth: fair, independent coins, each canary trained as often as its group says. Without independent coins no bound
        is given.

    Args:
        path: PEFT adapter or model directory.
        manifest: See ``dpllm.lab.manifest.read_manifest``.
        base: Name or directory of the base model; None: what adapter_config.json names.
        claim: Of ``outside_claim``.
        fmt: How a canary read in training, where carrier and secret are known.

    Returns:
        What ``dpllm.auditing.summary.summarise`` returns, with model, canaries and assumed. Without independent coins the bound
        is 0, and the verdict inconclusive or no_claim.

    Raises:
        ConfigError: See ``load_outside`` and ``read_manifest``, a canary that the model cannot read as a whole, or
            scores that are not finite.
    """
    planned = read_manifest(manifest)
    if planned.whole_texts and fmt != "text":
        raise ConfigError(f"{manifest}: whole texts have no {fmt} form. Give carrier and secret, or the format text.")
    models, described = load_outside(path, base, _device())
    rows, tokens = _score(models, planned, fmt)
    # Nobody fixed alpha and the numbers of guesses before the training; so nobody chooses them now.
    report = summarise_manifest(rows, tokens, planned, claim, AuditConfig())
    return {
        **report,
        "model": {**described, "weights": checkpoint.weight_hashes(path)},
        "canaries": _describe(planned),
        "assumed": list(ASSUMED_CANARIES),
    }


def audit_outside_members(
    path: Path,
    members: str,
    non_members: str,
    *,
    base: str | None = None,
    unit: str = "example",
) -> dict[str, Any]:
    """Membership inference on a model that was trained elsewhere; it says nothing about epsilon.

    Args:
        path: PEFT adapter or model directory.
        members: File of rows that trained: jsonl, csv, parquet, or txt with one row a line; or a directory of datasets.
        non_members: The same of rows that did not.
        base: As for ``audit_outside_canaries``.
        unit: "example": a row is one unit. Otherwise a column: everything of one of its values is. Of a row ``MAX_LENGTH``
            tokens are scored, and never more than the model reads.

    Returns:
        The fields of ``dpllm.auditing.members.MembersReport``, with model and assumed. Private.

    Raises:
        ConfigError: See ``load_outside`` and ``audit_members``, or files of different formats; or scores that are not finite.
        DataError: A file that cannot be read.
    """
    models, described = load_outside(path, base, _device())
    whole = None if unit == "example" else _ALL_ROWS
    longest = min(MAX_LENGTH, positions(models.tuned) or MAX_LENGTH)
    chosen = DataConfig(train=members, unit=unit, max_examples_per_unit=whole, max_length=longest)
    tables = [_load(source, chosen) for source in (members, non_members)]
    formats = [table.format for table in tables]
    if formats[0] != formats[1]:
        raise ConfigError(
            f"{members} reads as {formats[0]} and {non_members} as {formats[1]}, so any difference would be one of form. Give "
            "both the same columns."
        )
    groups = [data.group_rows(table, chosen) for table in tables]
    report = audit_members(models, groups[0], groups[1], formats[0], chosen, end_tokens=False)
    return {
        **report.to_json(),
        "model": {**described, "weights": checkpoint.weight_hashes(path)},
        "assumed": list(ASSUMED_MEMBERS),
    }


def write_outside(report: dict[str, Any], folder: Path, path: Path) -> Path:
    """Writes a report for its owner's eyes alone: audit.json, or audit_members.json.

    Args:
        report: Of one of the two audits.
        folder: Made where it does not exist.
        path: The audited model, in which nothing is written: its directory may be published.

    Raises:
        ConfigError: The folder lies in the model's directory, or cannot be written to.
    """
    if folder.resolve().is_relative_to(path.resolve()):
        raise ConfigError(
            f"{folder}: lies in the directory of the model, which may be published, and the report is private. Type another "
            "--output."
        )
    target = folder / ("audit_members.json" if "word" in report else "audit.json")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(target, report, mode=0o600)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to ({error.strerror}). Type another --output.") from None
    return target


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _score(models: ScoringModels, planned: Manifest, fmt: Format) -> tuple[tuple[CanaryScores, ...], TokenTable]:
    everyone = (*planned.canaries, *planned.references)
    longest = positions(models.tuned) or MAX_LENGTH
    encoder = _encode_text if planned.whole_texts else _encode_secret
    encoded = [encoder(canary, fmt, models.tokenizer, longest) for canary in everyone]
    return score_encoded(models, everyone, encoded)


def _encode_secret(canary: Canary, fmt: Format, tokenizer: Any, longest: int) -> tuple[TokenSequence, tuple[bool, ...]]:
    try:
        return encode_secret(canary, fmt, tokenizer, longest, "refuse")
    except ConfigError:
        raise ConfigError(
            f"canary {canary.canary_id}: no tokens of its own hold its secret in format {fmt}, within the {longest} that the "
            "model reads, so it could not be learned. Give the format that it trained in, or leave the canary out."
        ) from None


def _encode_text(canary: Canary, fmt: Format, tokenizer: Any, longest: int) -> tuple[TokenSequence, tuple[bool, ...]]:
    """All tokens but the first, which nothing predicts, and the one that ends every text."""
    try:
        (sequence,) = data.encode({"text": canary.secret}, fmt, tokenizer, longest, "refuse")
        last = sequence.input_ids[-1] == tokenizer.eos_token_id
        mask = (*sequence.loss_mask[:-1], False) if last else sequence.loss_mask
        if not any(mask):
            raise ValueError("nothing to score")
    except (DataError, ValueError):
        raise ConfigError(
            f"canary {canary.canary_id}: a text needs two tokens or more, and not more than the {longest} that the model reads. "
            "Leave it out."
        ) from None
    return sequence, mask


def _load(source: str, settings: DataConfig) -> data.Table:
    path = Path(source)
    if not path.exists() and not source.startswith("builtin:"):
        raise ConfigError(f"{source}: no such file, so there are no rows to score. Type the path of a file.")
    if path.is_file() and path.suffix.lower() == ".txt":
        return _lines(path)
    with tempfile.TemporaryDirectory() as cache:  # copies of private rows, which go with it
        return data.load_table(source, settings, settings.train_split, Path(cache))


def _lines(path: Path) -> data.Table:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({type(error).__name__}).") from None
    rows = [{"text": line} for line in lines if line.strip()]
    return data.Table(name=str(path), rows=rows, format="text")


def _describe(planned: Manifest) -> dict[str, Any]:
    return {
        "groups": count_groups(planned.canaries),
        "references": len(planned.references),
        "coins": planned.coins,
        "commitment": planned.commitment,
        "log2_secrets": planned.log2_secrets,
    }
