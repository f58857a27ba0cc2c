"""The audit of a model that was trained elsewhere: a PEFT adapter, or a whole model.

Comes in: its directory, the name of its base, and what it may have learned: a manifest of canaries, or rows of both kinds.
Goes out: a report as an audited run has it. What no file can show is listed in the report as assumed. ``dpllm.model.elsewhere``
refuses what would make a comparison of model and base meaningless.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dpllm.auditing.bounds import Claim
from dpllm.auditing.members import audit_members
from dpllm.auditing.record import Summary
from dpllm.auditing.scores import score_encoded
from dpllm.canaries.canaries import Canary, count_groups, encode_secret
from dpllm.errors import ConfigError, DataError
from dpllm.files import scratch, write_json
from dpllm.lab.manifest import read_manifest, summarise_manifest
from dpllm.model import elsewhere
from dpllm.model.elsewhere import ADAPTER_CONFIG
from dpllm.model.loading import ScoringModels, positions
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig
from dpllm.run import checkpoint
from dpllm.text import data
from dpllm.text.data import TokenSequence
from dpllm.text.layouts import Format

MAX_LENGTH = 512  # tokens of a member's row that are scored, where the model can read as many
ASSUMED_CANARIES = (
    "that each canary trained as often as its group says where it was inserted, and never where it was not",
    "that nobody chose this model, or these canaries, by what was inserted",
)
ASSUMED_MEMBERS = ("that all members trained and no non-member did", "that rows read in training as they are read here")


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


def audit_outside_canaries(
    path: Path, manifest: Path, *, base: str | None = None, claim: Claim | None = None, fmt: Format = "text"
) -> OutsideAudit:
    """Looks for canaries in a model that was trained elsewhere.

    Guarantee:
        A true claim is called falsified with probability at most the default of ``audit.alpha``, if the manifest says the
        truth: fair, independent coins, each canary trained as often as its group says. Without independent coins no bound
        is given.

    Args:
        path: PEFT adapter or model directory.
        manifest: private/canaries.json of a run, or a stranger's, see ``dpllm.lab.manifest``.
        base: Name or directory of the base model; None: what adapter_config.json names.
        claim: Of ``outside_claim``.
        fmt: How a canary read in training.

    Raises:
        ConfigError: See ``dpllm.model.elsewhere``; no manifest, a canary that the model cannot read whole, or infinite scores.
    """
    planned = read_manifest(manifest)
    if any(canary.rejected for canary in planned.canaries):
        raise ConfigError(
            f"{manifest}: its canaries are preference pairs, which the audit of their own run compares. Type: dpllm audit RUN"
        )
    models, described = load_outside(path, base)
    everyone, longest = (*planned.canaries, *planned.references), positions(models.tuned) or MAX_LENGTH
    rows, tokens = score_encoded(models, everyone, [_encode(one, fmt, models.tokenizer, longest) for one in everyone])
    report = summarise_manifest(rows, tokens, planned, claim)
    return OutsideAudit.pick(
        report.to_json(),
        model=described,
        canaries={
            "groups": count_groups(planned.canaries),
            "references": len(planned.references),
            "coins": planned.coins,
            "commitment": planned.commitment,
            "log2_secrets": planned.log2_secrets,
        },
        assumed=list(ASSUMED_CANARIES),
    )


def audit_outside_members(
    path: Path, members: str, non_members: str, *, base: str | None = None, unit: str = "example"
) -> dict[str, Any]:
    """Membership inference on a model that was trained elsewhere; it says nothing about epsilon.

    Args:
        path: PEFT adapter or model directory.
        members: File of rows that trained: jsonl, csv, parquet, or txt with one row a line; or a directory of datasets.
        non_members: The same of rows that did not.
        base: As for ``audit_outside_canaries``.
        unit: "example": a row is one unit. Otherwise a column: everything of one of its values is.

    Raises:
        ConfigError: See ``audit_outside_canaries`` and ``audit_members``, or files of different formats.
        DataError: A file that cannot be read.
    """
    models, described = load_outside(path, base)
    whole = None if unit == "example" else 10**9  # all rows
    longest = min(MAX_LENGTH, positions(models.tuned) or MAX_LENGTH)
    chosen = DataConfig(train=members, unit=unit, max_examples_per_unit=whole, max_length=longest)
    one, other = (_load(source, chosen) for source in (members, non_members))
    if one.format != other.format:
        raise ConfigError(
            f"{members} is read as {one.format} and {non_members} as {other.format}, so any difference could come from the "
            "format. Give both the same columns."
        )
    groups = [data.group_rows(table, chosen) for table in (one, other)]
    report = audit_members(models, groups[0], groups[1], one.format, chosen, end_tokens=False)
    return {**report.to_json(), "model": described, "assumed": list(ASSUMED_MEMBERS)}


def write_outside(report: dict[str, Any], folder: Path, path: Path) -> Path:
    """Writes a report on the model in ``path`` for its owner's eyes alone: audit.json, or audit_members.json.

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


def _encode(canary: Canary, fmt: Format, tokenizer: Any, longest: int) -> tuple[TokenSequence, tuple[bool, ...]]:
    try:
        return encode_secret(
            canary, fmt, tokenizer, DataConfig(train="elsewhere", max_length=longest, long_examples="refuse")
        )
    except ConfigError:
        raise ConfigError(
            f"canary {canary.canary_id}: in format {fmt} its secret shares tokens with other text, or lies beyond the {longest} "
            "tokens that the model reads, so it could not be learned. Type the --format of training, or leave the canary out."
        ) from None


def _load(source: str, settings: DataConfig) -> data.Table:
    path = Path(source)
    if not path.exists() and not source.startswith("builtin:"):
        raise ConfigError(f"{source}: no such file. Type the path of a file with rows.")
    if path.is_file() and path.suffix.lower() == ".txt":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as text ({type(error).__name__}).") from None
        return data.Table(name=source, rows=[{"text": line} for line in lines if line.strip()], format="text")
    with scratch() as cache:
        return data.load_table(source, settings, settings.train_split, cache)


def load_outside(path: Path, base: str | None) -> tuple[ScoringModels, dict[str, Any]]:
    """Loads an adapter on its base, or a whole model beside it, and says for the report what they are.

    The tokenizer is the one in ``path``, or the base's where there is none. A base that differs from the true one in its
    weights alone cannot be told from it: ``base_matches_name`` says whether the adapter names the same.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (path / ADAPTER_CONFIG).is_file():
        models, kind, base, matches = elsewhere.adapter_on_base(path, base, device)
    elif (path / "config.json").is_file():
        models, kind, base, matches = elsewhere.whole_beside_base(path, base, device)
    else:
        what = f"holds neither {ADAPTER_CONFIG} nor config.json" if path.is_dir() else "is not a directory"
        raise ConfigError(
            f"{path}: {what}, so there is no model to audit. Type the directory of a PEFT adapter or of a model, or of a run."
        )
    return models, {
        "kind": kind,
        "name": path.resolve().name,
        "base": names.public_name(base),
        "base_matches_name": matches,
        "weights": checkpoint.weight_hashes(path),
    }
