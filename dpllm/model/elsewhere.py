"""A model that was trained elsewhere, a PEFT adapter or a whole model, loaded beside its base.

Comes in: its directory and the name of its base. Goes out: both, ready to score. Everything that would make a comparison of the
two meaningless is refused: a base that does not fit, an adapter that cannot be switched off, a tokenizer of another model. A base
that differs from the true one in its weights alone cannot be told from it.
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

ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SHAPE = ("model_type", "hidden_size", "num_hidden_layers")


def load(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, str, str]:
    """An adapter on its base, or a whole model beside it; what kind it is, and the name of the base.

    The tokenizer is the one in ``path``, or the base's where there is none.

    Args:
        path: PEFT adapter or model directory.
        base: Name or directory of the base model; None: what the adapter names.
        device: Of both.

    Raises:
        ConfigError: See the module's docstring.
    """
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter_on_base(path, base, device)
    if (path / "config.json").is_file():
        return _whole_beside_base(path, base, device)
    what = f"holds neither {ADAPTER_CONFIG} nor config.json" if path.is_dir() else "is not a directory"
    raise ConfigError(
        f"{path}: {what}, so there is no model to audit. Type the directory of a PEFT adapter or of a model, or of a run."
    )


def _adapter_on_base(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, str, str]:
    try:
        config: Any = PeftConfig.from_pretrained(str(path))
    except Exception as error:  # whatever a file that is no configuration makes peft raise
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
    return (
        ScoringModels(tokenizer, _tuned(path, net, name), settings, device),
        f"{config.peft_type.value} adapter",
        name,
    )


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
            why = f"{stored} tensors are stored, but the model has {wanted}"
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        why = type(error).__name__
        if "size mismatch" in str(error):
            why = "its tensors have other shapes"
        if "not found in the base model" in str(error):
            why = "it lacks the layers that the adapter changes"
    if why:
        raise ConfigError(
            f"{path}: the adapter does not match the base model {name} ({why}), so together they are not the model that was "
            "trained. Type its true base as --base; an adapter that stores whole embeddings has to be merged first."
        )
    return tuned.eval()


def _whole_beside_base(path: Path, base: str | None, device: torch.device) -> tuple[ScoringModels, str, str]:
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
        other = transformers.AutoConfig.from_pretrained(loading.source(base)).get_text_config()
    except Exception:  # transformers raises OSError, ValueError, KeyError and Hub errors here
        raise _no_base(f"--base {base}") from None
    own = tuned.config.get_text_config()
    if different := [key for key in _SHAPE if getattr(own, key, None) != getattr(other, key, None)]:
        raise ConfigError(
            f"--base {base}: is not what {path} was trained from: they differ in {', '.join(different)}, so the difference "
            "between their scores would say nothing about training. Type the true base."
        )
    size = min(int(tuned.get_input_embeddings().weight.shape[0]), int(other.vocab_size))
    return ScoringModels(_tokenizer(path, settings, size), tuned.eval(), settings, device), "whole model", base


def _tokenizer(path: Path, base: ModelConfig, size: int) -> Any:
    """The model's own tokenizer, or the base's, if both models can read what it makes."""
    name = base.name_or_path
    own = any((path / file).is_file() for file in _TOKENIZER_FILES)
    try:
        tokenizer = loading.load_tokenizer(ModelConfig(name_or_path=str(path)) if own else base)
    except ConfigError:
        raise ConfigError(
            f"{path if own else name}: holds no fast tokenizer that could be loaded. Copy the tokenizer.json used in training "
            "into it."
        ) from None
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values(), default=0)
    if largest >= size:
        raise ConfigError(
            f"{path}: its tokenizer has tokens up to {largest}, and {name} embeds {size}, so the base cannot read them. Type "
            "the base that the model was trained from, or use the tokenizer that belongs to it."
        )
    try:
        known = loading.load_tokenizer(base).get_vocab()
    except ConfigError:  # a base without a tokenizer says nothing
        known = vocabulary
    if different := sum(vocabulary.get(token) != index for token, index in known.items()):
        raise ConfigError(
            f"{path}: its tokenizer numbers {different} tokens differently from {name}, so the two models do not read the same "
            "text. Type the base that the model was trained from."
        )
    return tokenizer


def _no_base(said: str) -> ConfigError:
    return ConfigError(
        f"{said}: no causal language model could be loaded from there, and the audit needs the base for comparison. Type --base "
        "with the Hub id or the directory of the base."
    )
