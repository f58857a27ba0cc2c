"""Audits a model that was trained elsewhere, a PEFT adapter or a whole model, by the canaries that its owner planted.

Comes in: its directory, the name of its base, and a manifest that states which texts were planted and which were not. Goes out: a
summary like that of an audited run, with the assumptions that no file can prove. The manifest itself states whether its
coins are independent; this is never guessed. A model that cannot be compared with its base is refused, but a base that
differs from the true one only in its weights cannot be detected. Errors name lines and keys and quote no text.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from scipy import stats

from dpllm.auditing.bounds import epsilon_lower_bound
from dpllm.auditing.scores import score_encoded
from dpllm.auditing.statistics import words_control
from dpllm.auditing.summary import AuditContext, summarise
from dpllm.canaries import canaries
from dpllm.canaries.canaries import count_groups
from dpllm.canaries.texts import Canary, encode_secret
from dpllm.errors import ConfigError
from dpllm.model import loading
from dpllm.model.loading import ScoringModels, positions
from dpllm.privacy.plan import AuditSettings
from dpllm.privacy.schedule import TokenSequence
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, ModelConfig
from dpllm.recipe.sections import AuditConfig, default_ways
from dpllm.run import checkpoint
from dpllm.statement.audit import Bound, Summary
from dpllm.statement.audit_bounds import Claim
from dpllm.text.layouts import Format

FEWEST_OUT = 20  # minimum number of texts that were not planted; with fewer, no comparison is possible
COINS = {"coins": "independent"}
MAX_LENGTH = 512  # tokens of a row, for a model without a maximum length
ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ASSUMED = (
    "that each canary trained as often as its group says where it was inserted, and never where it was not",
    "that nobody chose this model, or these canaries, by what was inserted",
    "that the base is the one that the model was trained from",
)
_MOST_REPEATED = 1_000_000
_HALVES = re.compile("[\ud800-\udfff]")  # surrogates, which no tokenizer accepts
_LIKELIEST_LIE = 1e-6  # p-value; fair coins fall below it in one manifest of a million
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
    independent_coins: bool  # each was planted by its own fair coin; otherwise no lower bound on epsilon follows
    commitment: str | None = None  # only of dpllm's own manifest, checked against its content


class OutsideAudit(Summary):
    """The summary of the audit of a model that was trained elsewhere."""

    model: dict[str, Any]
    canaries: dict[str, Any]
    assumed: tuple[str, ...]


def outside_claim(epsilon: float | None, delta: float | None, unit: str = "example") -> Claim | None:
    """The claim that others make for the model, epsilon > 0 and delta in [0, 1); None if neither is given.

    Raises:
        ConfigError: One of the two is missing or out of range.
    """
    if epsilon is None and delta is None:
        return None
    if epsilon is None or delta is None or not 0 < epsilon < float("inf") or not 0 <= delta < 1:
        raise ConfigError(
            f"--epsilon {epsilon} --delta {delta} is not a claim, which is an epsilon above 0 with its delta in [0, 1). Type "
            "both, or none."
        )
    return Claim(epsilon, delta, unit)


def audit_outside(
    path: Path, manifest: Path, *, base: str | None = None, claim: Claim | None = None, fmt: Format = "text"
) -> OutsideAudit:
    """Audits a model that was trained elsewhere by its canaries.

    Guarantee:
        A true claim is called falsified with probability at most the default of ``audit.alpha``, if the manifest is true:
        coins are fair and independent, and each canary trained as often as its group says. Without independent coins no
        bound is given and no claim is tested.

    Args:
        path: PEFT adapter or model directory.
        manifest: private/canaries.json of a run, or a file in the other form: see ``read_manifest``.
        base: Name or directory of the base model; None: the one that adapter_config.json names.
        claim: Result of ``outside_claim``.
        fmt: Format of the canaries' rows in training.

    Raises:
        ConfigError: See ``load`` and ``read_manifest``; also a claim without independent coins, a canary that cannot be
            trained on in full at the model's maximum length, or scores that are not finite.
    """
    planned = read_manifest(manifest)
    if any(len(canary.answers) > 1 for canary in planned.canaries):
        raise ConfigError(
            f"{manifest}: its canaries have two answers each, which the audit of their own run compares. Type: dpllm audit RUN"
        )
    if claim and not planned.independent_coins:
        raise ConfigError(
            f"{manifest}: a claim cannot be tested. {_NO_COINS} Otherwise leave --epsilon and --delta out."
        )
    models, kind, name = load(path, base, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
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


def load(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, str, str]:
    """Loads an adapter on its base, or a whole model and its base; also returns the kind and the name of the base.

    The tokenizer is the one in ``path``, or the base's if there is none.

    Args:
        path: PEFT adapter or model directory.
        base: Name or directory of the base model; None: the one that the adapter names.
        device: Device of both models.

    Raises:
        ConfigError: No model, a base that does not match, an adapter that cannot be switched off, or another model's tokenizer.
    """
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter_on_base(path, base, device)
    if (path / "config.json").is_file():
        return _whole_model_and_base(path, base, device)
    problem = f"holds neither {ADAPTER_CONFIG} nor config.json" if path.is_dir() else "is not a directory"
    raise ConfigError(
        f"{path}: {problem}, so there is no model to audit. Type the directory of a PEFT adapter or of a model, or of a run."
    )


def _adapter_on_base(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, str, str]:
    try:
        config: Any = PeftConfig.from_pretrained(str(path))
    except Exception as error:  # peft raises many types for a broken configuration
        raise ConfigError(
            f"{path / ADAPTER_CONFIG}: is not an adapter configuration that this version of peft can read "
            f"({type(error).__name__}). Check the file, or pip install -U peft."
        ) from None
    name = base or config.base_model_name_or_path
    if not name:
        raise ConfigError(f"{path / ADAPTER_CONFIG}: names no base model. Type --base NAME.")
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
            f"{path}: holds no {WEIGHTS}, so there are no weights to score. Save the adapter in this format (adapter_model.bin "
            "is no longer read)."
        )
    models = ScoringModels(tokenizer, _tuned(path, net, name), settings, device)
    return models, f"{config.peft_type.value} adapter", name


def _tuned(path: Path, net: Any, name: str) -> Any:
    problem = ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error below
            tuned: Any = PeftModel.from_pretrained(net, str(path))
        missing = tuned.load_adapter(str(path), "default").missing_keys  # loaded again: this reports missing keys
        with safe_open(path / WEIGHTS, "pt") as file:
            stored = len(file.keys())
        # Only tensors that are switched off with the adapter count: stored embeddings of the base are not.
        num_tensors = len(get_peft_model_state_dict(tuned, save_embedding_layers=False))
        if missing or stored != num_tensors:
            problem = f"{stored} tensors are stored, but the model has {num_tensors}"
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        problem = type(error).__name__
    if problem:
        raise ConfigError(
            f"{path}: the adapter does not match the base model {name} ({problem}), so together they are not the model that was "
            "trained. Type its true base as --base; an adapter that stores whole embeddings has to be merged first."
        )
    return tuned.eval()


def _whole_model_and_base(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, str, str]:
    if base is None:
        raise ConfigError(
            f"{path}: is a whole model that does not name its base, which the audit compares it with. Type --base NAME."
        )
    settings = ModelConfig(name_or_path=base)
    try:
        tuned = loading.load_base(ModelConfig(name_or_path=str(path)), device)
    except ConfigError:
        raise ConfigError(f"{path}: no causal language model could be loaded from it. Check its files.") from None
    try:
        stored = transformers.AutoConfig.from_pretrained(loading.source(base), trust_remote_code=False)
        base_config = stored.get_text_config()
    except Exception:  # transformers raises OSError, ValueError, KeyError and Hub errors here
        raise _no_base(f"--base {base}") from None
    config = tuned.config.get_text_config()
    shape = ("model_type", "hidden_size", "num_hidden_layers")
    if different := [key for key in shape if getattr(config, key, None) != getattr(base_config, key, None)]:
        raise ConfigError(
            f"--base {base}: is not what {path} was trained from: they differ in {', '.join(different)}, so the difference "
            "between their scores would say nothing about training. Type the true base."
        )
    size = min(int(tuned.get_input_embeddings().weight.shape[0]), int(base_config.vocab_size))
    return ScoringModels(_tokenizer(path, settings, size), tuned.eval(), settings, device), "whole model", base


def _tokenizer(path: Path, base: ModelConfig, size: int) -> Any:
    """The model's own tokenizer, else the base's; ConfigError if its token ids do not suit both models."""
    name = base.name_or_path
    has_tokenizer = any((path / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    try:
        tokenizer = loading.load_tokenizer(ModelConfig(name_or_path=str(path)) if has_tokenizer else base)
    except ConfigError:
        raise ConfigError(
            f"{path if has_tokenizer else name}: holds no fast tokenizer that could be loaded. Copy the tokenizer.json used "
            "in training into it."
        ) from None
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values(), default=0)
    try:
        base_vocabulary = loading.load_tokenizer(base).get_vocab()
    except ConfigError:  # without a tokenizer of the base there is nothing to compare
        base_vocabulary = vocabulary
    different = sum(vocabulary.get(token) != index for token, index in base_vocabulary.items())
    if different or largest >= size:
        raise ConfigError(
            f"{path}: its tokenizer numbers {different} tokens differently from {name} and has them up to {largest} where that "
            f"embeds {size}, so the two models do not read the same text. Type the base that the model was trained from."
        )
    return tokenizer


def _no_base(problem: str) -> ConfigError:
    return ConfigError(
        f"{problem}: no causal language model could be loaded from there, and the audit needs the base for comparison. Type "
        "--base with the Hub id or the directory of the base."
    )


def _summary(models: ScoringModels, planned: Manifest, claim: Claim | None, fmt: Format) -> Summary:
    """The conclusions of a run's audit; without independent coins no theorem applies, and the bound is 0."""
    everyone, longest = (*planned.canaries, *planned.references), positions(models.tuned) or MAX_LENGTH
    tokens = score_encoded(models, everyone, [_encode(canary, fmt, models.tokenizer, longest) for canary in everyone])
    tests = default_ways(sum(canary.group == 1 for canary in planned.canaries))
    # Nobody fixed settings in advance, so the defaults are used and nobody can choose.
    settings = AuditSettings.pick({**AuditConfig().fixed().to_json(), **tests})
    context = AuditContext(words=words_control(planned.canaries), own_references=not planned.references)
    report = summarise(tokens, claim, settings, context)
    if planned.independent_coins:
        return report
    nothing = epsilon_lower_bound([], [], delta=report.epsilon_lower_bound.delta, alpha=settings.alpha)
    method = "none: the canaries were not planted by independent fair coins"
    changes = {"epsilon_lower_bound": Bound.pick(nothing.to_json(), method=method), "verdict_reason": _NO_COINS}
    return report.model_copy(update=changes)


def _encode(canary: Canary, fmt: Format, tokenizer: Any, longest: int) -> tuple[TokenSequence, tuple[bool, ...]]:
    data = DataConfig(train="elsewhere", max_length=longest, long_examples="refuse")
    try:
        return encode_secret(canary, fmt, tokenizer, data)
    except ConfigError:
        raise ConfigError(
            f"canary {canary.canary_id}: in format {fmt} its secret has no place, shares tokens with other text, or lies beyond "
            f"the {longest} tokens that the model reads, so it could not be learned. Type the --format of training, or drop it."
        ) from None


def read_manifest(path: Path) -> Manifest:
    """Reads dpllm's own manifest, or a file with one JSON object per line.

    A foreign manifest is trusted: nothing in a file can prove that these texts trained, or how often.

    Raises:
        ConfigError: The file is not a manifest, or is one that cannot be audited.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a manifest ({type(error).__name__}). {_FORM}") from None
    value = _parsed(text)
    if isinstance(value, dict) and "canaries" in value:
        plan = canaries.load(path)
        manifest = Manifest(plan.canaries, plan.references, True, plan.commitment)
    else:
        manifest = _read_lines(path, text)
    _check_manifest(path, manifest)
    return manifest


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_lines(path: Path, text: str) -> Manifest:
    values = [(number, _parsed(line)) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    independent = bool(values) and values[0][1] == COINS
    if independent:
        del values[0]
    entries = [_entry(path, index, number, value) for index, (number, value) in enumerate(values)]
    candidates = tuple(entry for entry in entries if entry.group)
    references = tuple(entry for entry in entries if not entry.group)
    return Manifest(candidates, references, independent)


def _entry(path: Path, index: int, number: int, value: Any) -> Canary:
    value = value if isinstance(value, dict) else {}
    group: Any = value.get("group", 1)
    inserted: Any = value.get("inserted", False if group == 0 else None)
    texts = [value.get("carrier"), value.get("secret")]
    good = (
        set(value) <= {"carrier", "secret", "inserted", "group"}
        and all(isinstance(text, str) and text.strip() and not _HALVES.search(text) for text in texts)
        and isinstance(inserted, bool)
        and type(group) is int
        and inserted <= group <= _MOST_REPEATED  # group 0 is a reference, which is never inserted
    )
    if not good:
        raise ConfigError(f"{path}: line {number} is not a canary. {_FORM}")
    return Canary(f"{'c' if group else 'r'}{index:05d}", group, value["carrier"], value["secret"], inserted)


def _check_manifest(path: Path, manifest: Manifest) -> None:
    everyone = (*manifest.canaries, *manifest.references)
    planted = sum(canary.inserted for canary in manifest.canaries)
    if not planted or len(everyone) - planted < FEWEST_OUT:
        raise ConfigError(
            f"{path}: {planted} canaries were inserted and {len(everyone) - planted} were not, too few to compare; one and "
            f"{FEWEST_OUT} are needed, the others as inserted: false or as references (group: 0). {_FORM}"
        )
    out = {canary.group for canary in manifest.canaries if not canary.inserted}
    if alone := sorted({canary.group for canary in manifest.canaries} - out if not manifest.references else []):
        raise ConfigError(
            f"{path}: every canary of group {alone[0]} was inserted, so its exposure has nothing to be ranked among. Give those "
            "that were not inserted the same group, or group: 0, which all groups share."
        )
    if repeated := len(everyone) - len({(canary.carrier, canary.secret) for canary in everyone}):
        raise ConfigError(
            f"{path}: {repeated} canaries have the same text as another one, so it is unclear whether they were inserted. Keep "
            "one line for each text."
        )
    chance = stats.binomtest(planted, len(manifest.canaries)).pvalue
    if manifest.independent_coins and chance < _LIKELIEST_LIE:
        raise ConfigError(
            f"{path}: {planted} of {len(manifest.canaries)} canaries were inserted, which fair coins do once in "
            f"{1 / max(chance, 1e-300):.0e} manifests; without fair coins there is no lower bound. Leave the line about coins "
            "out, or plant by fair coins."
        )
