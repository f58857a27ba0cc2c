"""The audit of a model that was trained elsewhere: a PEFT adapter, or a whole model.

Comes in: its directory, the name of its base, and what it may have learned: a manifest of canaries, or rows of both kinds.
Goes out: a report as an audited run has it. What no file can show is listed in the report as assumed. Everything that would
make a comparison of model and base meaningless is refused: a base that does not fit, an adapter that cannot be switched off, a
tokenizer of another model.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from dpllm.auditing.members import audit_members
from dpllm.auditing.record import Summary
from dpllm.auditing.scores import score_encoded
from dpllm.auditing.verdict import Claim
from dpllm.canaries.canaries import Canary, count_groups, encode_secret
from dpllm.errors import ConfigError, DataError
from dpllm.files import scratch, write_json
from dpllm.lab.manifest import read_manifest, summarise_manifest
from dpllm.model import loading
from dpllm.model.loading import ScoringModels
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, ModelConfig
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
ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ALL_ROWS = 10**9
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SHAPE = ("model_type", "hidden_size", "num_hidden_layers")


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
            f"--epsilon {epsilon:g} --delta {delta:g} is no claim: epsilon lies above 0 and delta in [0, 1). Type others."
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
        ConfigError: See the module's docstring; no manifest, a canary that the model cannot read whole, or infinite scores.
    """
    planned = read_manifest(manifest)
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
    whole = None if unit == "example" else _ALL_ROWS
    longest = min(MAX_LENGTH, positions(models.tuned) or MAX_LENGTH)
    chosen = DataConfig(train=members, unit=unit, max_examples_per_unit=whole, max_length=longest)
    tables = [_load(source, chosen) for source in (members, non_members)]
    formats = [table.format for table in tables]
    if formats[0] != formats[1]:
        raise ConfigError(
            f"{members} reads as {formats[0]} and {non_members} as {formats[1]}, so any difference could come from the "
            "format. Give both the same columns."
        )
    groups = [data.group_rows(table, chosen) for table in tables]
    report = audit_members(models, groups[0], groups[1], formats[0], chosen, end_tokens=False)
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
        return encode_secret(canary, fmt, tokenizer, longest, "refuse")
    except ConfigError:
        raise ConfigError(
            f"canary {canary.canary_id}: in format {fmt} its secret shares tokens with other text, or lies beyond the {longest} "
            "tokens that the model reads, so it could not be learned. Type the --format of training, or leave the canary out."
        ) from None


def _load(source: str, settings: DataConfig) -> data.Table:
    path = Path(source)
    if not path.exists() and not source.startswith("builtin:"):
        raise ConfigError(f"{source}: no such file, so there are no rows to score. Type the path of a file.")
    if path.is_file() and path.suffix.lower() == ".txt":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as text ({type(error).__name__}).") from None
        return data.Table(name=source, rows=[{"text": line} for line in lines if line.strip()], format="text")
    with scratch() as cache:
        return data.load_table(source, settings, settings.train_split, cache)


# The model beside its base.


def load_outside(path: Path, base: str | None) -> tuple[ScoringModels, dict[str, Any]]:
    """Loads an adapter on its base, or a whole model beside it, and says for the report what they are.

    The tokenizer is the one in ``path``, or the base's where there is none. A base that differs from the true one in its
    weights alone cannot be told from it: ``base_matches_name`` says whether the adapter names the same.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (path / ADAPTER_CONFIG).is_file():
        models, kind, base, matches = _adapter(path, base, device)
    elif (path / "config.json").is_file():
        models, kind, base, matches = _whole(path, base, device)
    else:
        what = f"holds neither {ADAPTER_CONFIG} nor config.json" if path.is_dir() else "is no directory"
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


def positions(net: Any) -> int | None:
    """How many tokens a model can read at once; None where its configuration does not say."""
    longest = getattr(net.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 1 else None


def _adapter(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, str, str, bool]:
    try:
        config: Any = PeftConfig.from_pretrained(str(path))
    except Exception as error:  # whatever a file that is no configuration makes peft raise
        raise ConfigError(
            f"{path / ADAPTER_CONFIG}: is no configuration of an adapter that this version of peft knows "
            f"({type(error).__name__}). Check the file, or pip install -U peft."
        ) from None
    stated = config.base_model_name_or_path or None
    name = base or stated
    if name is None:
        raise ConfigError(f"{path / ADAPTER_CONFIG}: names no base model, so nothing can be loaded. Type --base NAME.")
    if config.is_prompt_learning:
        raise ConfigError(
            f"{path}: a {config.peft_type.value} adapter puts virtual tokens before a text, so its scores cannot be compared "
            "with the base's token by token. Only adapters inside the layers, such as LoRA, can be audited."
        )
    settings = ModelConfig(name_or_path=name)
    try:
        net = loading.load_base(settings, device)
    except ConfigError:
        raise _no_base(f"--base {name}" if base else f"{ADAPTER_CONFIG} names {name!r}") from None
    tokenizer = _tokenizer(path, settings, int(net.get_input_embeddings().weight.shape[0]))
    if not (path / WEIGHTS).is_file():
        raise ConfigError(
            f"{path}: holds no {WEIGHTS}, so there is nothing to score. Save the adapter in this format (an "
            "adapter_model.bin is no longer read)."
        )
    kind = f"{config.peft_type.value} adapter"
    matches = stated in (None, name) or Path(loading.source(stated)).name == Path(loading.source(name)).name
    return ScoringModels(tokenizer, _tuned(path, net, name), settings, device), kind, name, matches


def _tuned(path: Path, net: Any, name: str) -> Any:
    why = ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error below
            tuned: Any = PeftModel.from_pretrained(net, str(path))
        missing = tuned.load_adapter(str(path), "default").missing_keys  # a second time, to be told what was missing
        with safe_open(path / WEIGHTS, "pt") as file:
            stored = len(file.keys())
        # What is switched off with the adapter: embeddings of the base that are stored beside it are not.
        wanted = len(get_peft_model_state_dict(tuned, save_embedding_layers=False))
        if missing or stored != wanted:
            why = f"{stored} tensors are stored and {wanted} have a place in it"
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        why = type(error).__name__
        if "size mismatch" in str(error):
            why = "its tensors have other shapes"
        if "not found in the base model" in str(error):
            why = "the layers that it changes are not in it"
    if why:
        raise ConfigError(
            f"{path}: the adapter does not match the base model {name} ({why}), so the two together are not the model that was "
            "trained. Type its true base as --base. An adapter that stores whole embeddings has to be merged, and the merged "
            "model audited."
        )
    return tuned.eval()


def _whole(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, str, str, bool]:
    if base is None:
        raise ConfigError(
            f"{path}: is a whole model, and nothing says what it was trained from, with which it has to be compared. Type "
            "--base NAME."
        )
    settings = ModelConfig(name_or_path=base)
    try:
        tuned = loading.load_base(ModelConfig(name_or_path=str(path)), device)
    except ConfigError:
        raise ConfigError(
            f"{path}: no causal language model could be loaded from it, so there is nothing to score. Check its files."
        ) from None
    try:
        other = transformers.AutoConfig.from_pretrained(loading.source(base)).get_text_config()
    except Exception:  # transformers raises OSError, ValueError, KeyError and Hub errors here
        raise _no_base(f"--base {base}") from None
    own = tuned.config.get_text_config()
    if different := [key for key in _SHAPE if getattr(own, key, None) != getattr(other, key, None)]:
        raise ConfigError(
            f"--base {base}: is not what {path} was trained from: they differ in {', '.join(different)}, so a difference "
            "between their scores would say nothing about training. Type the true base."
        )
    size = min(int(tuned.get_input_embeddings().weight.shape[0]), int(other.vocab_size))
    return ScoringModels(_tokenizer(path, settings, size), tuned.eval(), settings, device), "whole model", base, True


def _tokenizer(path: Path, base: ModelConfig, size: int) -> Any:
    """The model's own tokenizer, or the base's, if both models can read what it makes."""
    name = base.name_or_path
    own = any((path / file).is_file() for file in _TOKENIZER_FILES)
    try:
        tokenizer = loading.load_tokenizer(ModelConfig(name_or_path=str(path)) if own else base)
    except ConfigError:
        raise ConfigError(
            f"{path if own else name}: holds no fast tokenizer that could be loaded, so no text can be read as the model reads "
            "it. Put the tokenizer.json of training into it."
        ) from None
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values(), default=0)
    if largest >= size:
        raise ConfigError(
            f"{path}: its tokenizer has tokens up to {largest}, and {name} embeds {size}, so the base cannot read them. Type the "
            "base that was trained from, or the tokenizer that belongs to it."
        )
    try:
        known = loading.load_tokenizer(base).get_vocab()
    except ConfigError:  # a base without a tokenizer says nothing
        known = vocabulary
    if different := sum(vocabulary.get(token) != index for token, index in known.items()):
        raise ConfigError(
            f"{path}: its tokenizer gives {different} tokens of {name} another number, so the two models do not read the same "
            "text. Type the base that was trained from."
        )
    return tokenizer


def _no_base(said: str) -> ConfigError:
    return ConfigError(
        f"{said}: no causal language model could be loaded from there, and without the base nothing can be compared. Type "
        "--base with the Hub id or the directory of the base."
    )
