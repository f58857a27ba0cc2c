"""Models that were trained elsewhere, loaded for scoring beside the base that they came from.

Comes in: a PEFT adapter directory or a model directory, and the name of a base. Goes out: both models and what they are
called. Everything that would make their comparison meaningless is refused: a base that does not fit, an adapter that cannot be
switched off, a tokenizer of another model. This module must not see data.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from dpllm.errors import ConfigError
from dpllm.model import loading
from dpllm.model.loading import ScoringModels
from dpllm.recipe.config import ModelConfig

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS, OLD_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SHAPE = ("model_type", "hidden_size", "num_hidden_layers")


def load_outside(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, dict[str, Any]]:
    """Loads an adapter on its base, or a whole model beside it.

    The tokenizer is the one in ``path``, or the base's where there is none. A base that differs from the true one in its
    weights alone cannot be told from it: ``base_matches_name`` says whether the adapter names the same.

    Args:
        path: Directory with adapter_config.json, or with config.json and weights.
        base: Name or directory; None: what adapter_config.json names.
        device: Where the models run.

    Returns:
        The models, and a description for the report.

    Raises:
        ConfigError: No model in ``path``, no base named, a base that does not match, an adapter that cannot be switched off,
            or a tokenizer that does not fit.
    """
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter(path, base, device)
    if (path / "config.json").is_file():
        return _whole(path, base, device)
    what = f"holds neither {ADAPTER_CONFIG} nor config.json" if path.is_dir() else "is no directory"
    raise ConfigError(
        f"{path}: {what}, so there is no model to audit. Type the directory of a PEFT adapter or of a model, or of a run."
    )


def positions(net: Any) -> int | None:
    """How many tokens a model can read at once; None where its configuration does not say."""
    longest = getattr(net.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 1 else None


def _adapter(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, dict[str, Any]]:
    config = _peft_config(path)
    stated = config.base_model_name_or_path or None
    name = base or stated
    if name is None:
        raise ConfigError(f"{path / ADAPTER_CONFIG}: names no base model, so nothing can be loaded. Type --base NAME.")
    if config.is_prompt_learning:
        raise ConfigError(
            f"{path}: a {config.peft_type.value} adapter puts tokens of its own before a text, and token by token its scores "
            "would not be those of the base. Only adapters inside the layers, such as LoRA, can be audited."
        )
    settings = ModelConfig(name_or_path=name)
    net = _base(settings, device, typed=base is not None)
    tokenizer = _tokenizer(path, settings, int(net.get_input_embeddings().weight.shape[0]), name)
    if not any((path / name).is_file() for name in (WEIGHTS, OLD_WEIGHTS)):
        raise ConfigError(
            f"{path}: holds no {WEIGHTS}, so there is nothing to score. Check that training wrote all files."
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error below
            tuned: Any = PeftModel.from_pretrained(net, str(path))
        missing = tuned.load_adapter(str(path), "default").missing_keys  # a second time, to be told what was missing
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise _no_match(path, name, _why(error)) from None
    num_stored, num_wanted = _num_stored(path), _num_wanted(tuned)
    if missing or num_stored != num_wanted:
        raise _no_match(path, name, f"{num_stored} tensors are stored and {num_wanted} have a place in it")
    described = {
        "kind": f"{config.peft_type.value} adapter",
        "name": path.resolve().name,
        "base": loading.public_name(name),
        "base_matches_name": base is None or stated is None or _same(base, stated),
    }
    return ScoringModels(tokenizer, tuned.eval(), settings, device), described


def _whole(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, dict[str, Any]]:
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
    own, other = tuned.config.get_text_config(), _config(base).get_text_config()
    if different := [key for key in _SHAPE if getattr(own, key, None) != getattr(other, key, None)]:
        raise ConfigError(
            f"--base {base}: is not what {path} was trained from: they differ in {', '.join(different)}. What one tells that "
            "the other does not would say nothing about training. Type the true base."
        )
    size = min(int(tuned.get_input_embeddings().weight.shape[0]), int(other.vocab_size))
    tokenizer = _tokenizer(path, settings, size, base)
    described = {
        "kind": "whole model",
        "name": path.resolve().name,
        "base": loading.public_name(base),
        "base_matches_name": True,
    }
    return ScoringModels(tokenizer, tuned.eval(), settings, device), described


def _peft_config(path: Path) -> Any:
    try:
        return PeftConfig.from_pretrained(str(path))
    except Exception as error:  # whatever a file that is no configuration makes peft raise
        raise ConfigError(
            f"{path / ADAPTER_CONFIG}: is no configuration of an adapter that this version of peft knows "
            f"({type(error).__name__}). Check the file, or pip install -U peft."
        ) from None


def _base(settings: ModelConfig, device: torch.device, *, typed: bool) -> Any:
    try:
        return loading.load_base(settings, device)
    except ConfigError:
        said = f"--base {settings.name_or_path}" if typed else f"{ADAPTER_CONFIG} names {settings.name_or_path!r}"
        raise ConfigError(
            f"{said}: no causal language model could be loaded from there, and without the base nothing can be compared. Type "
            "--base with the Hub id or the directory of the base."
        ) from None


def _config(base: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(loading.source(base))
    except ConfigError:
        raise
    except Exception:  # transformers raises OSError, ValueError, KeyError and Hub errors here
        raise ConfigError(
            f"--base {base}: no causal language model could be loaded from there, and without the base nothing can be "
            "compared. Type the Hub id or the directory of the base."
        ) from None


def _tokenizer(path: Path, base: ModelConfig, size: int, name: str) -> Any:
    """The model's own tokenizer, or the base's, if both models can read what it makes."""
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
    if own and (different := _num_different(vocabulary, base)):
        raise ConfigError(
            f"{path}: its tokenizer gives {different} tokens of {name} another number, so the two models do not read the same "
            "text. Type the base that was trained from."
        )
    return tokenizer


def _num_different(vocabulary: dict[str, int], base: ModelConfig) -> int:
    try:
        known = loading.load_tokenizer(base).get_vocab()
    except ConfigError:
        return 0  # a base without a tokenizer says nothing
    return sum(vocabulary.get(token) != index for token, index in known.items())


def _num_stored(path: Path) -> int:
    """Tensors in the adapter's file, of the newer or the older kind."""
    if (path / WEIGHTS).is_file():
        with safe_open(path / WEIGHTS, "pt") as file:
            return len(file.keys())
    return len(torch.load(path / OLD_WEIGHTS, map_location="cpu", weights_only=True))


def _num_wanted(tuned: Any) -> int:
    """Tensors that belong to the adapter, and so are switched off with it: stored embeddings of the base are none of them."""
    return len(get_peft_model_state_dict(tuned, save_embedding_layers=False))


def _why(error: Exception) -> str:
    text = str(error)
    if "size mismatch" in text:
        return "its tensors have other shapes"
    if "not found in the base model" in text:
        return "the layers that it changes are not in it"
    return type(error).__name__


def _no_match(path: Path, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{path}: the adapter does not match the base model {name} ({why}), so the two together are not the model that was "
        "trained. Type its true base as --base. An adapter that stores whole embeddings has to be merged, and the merged "
        "model audited."
    )


def _same(one: str, other: str) -> bool:
    return Path(loading.source(one)).name == Path(loading.source(other)).name
