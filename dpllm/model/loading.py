"""Loads base model and tokenizer for training and scoring, and builds a small copy for the self-check.

Comes in: the recipe. Goes out: a model whose trainable parameters have requires_grad and are float32, and what is needed
to score it beside its base. This module must not see data.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate.utils import patch_environment
from peft import PeftModel
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers.utils.hub import cached_file

from dpllm.errors import ConfigError, Refused, need
from dpllm.model import adapters, memory, processes, sharding
from dpllm.model.evaluate import without_memory
from dpllm.progress import tell
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, FrozenConfig, LoraConfig, ModelConfig, RunConfig, TrainConfig
from dpllm.text import builtin
from dpllm.text.rendering import read_template
from dpllm.text.sources import asking_hub

transformers.utils.logging.disable_progress_bar()
# peft 0.21 asks transformers 5 for an attribute that is being renamed; gone when peft asks for the new name.
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.* is deprecated", category=FutureWarning)

SHRUNKEN_BLOCKS, SHRUNKEN_VOCABULARY = 2, 256
# Keys of a configuration that do not change what the model computes.
_NO_PART = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
_REFERENCE = "reference"  # name of the adapter that scores are compared with
Pooling = Literal["mean", "cls"]
"""How a sentence encoder pools: the mean of the states of all tokens, or the state of the first."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ScoringModels:
    """A tuned model and its base, both in eval mode."""

    tokenizer: Any
    tuned: nn.Module
    _base: ModelConfig
    _device: torch.device

    @contextlib.contextmanager
    def base(self) -> Iterator[nn.Module]:
        """The reference adapter if there is one; else the base model, as tuned without its adapter or as loaded anew."""
        if isinstance(self.tuned, PeftModel) and _REFERENCE in self.tuned.peft_config:
            self.tuned.set_adapter(_REFERENCE)
            try:
                yield self.tuned
            finally:
                self.tuned.set_adapter("default")
        elif isinstance(self.tuned, PeftModel):
            with self.tuned.disable_adapter():
                yield self.tuned
        else:
            yield load_base(self._base, self._device).eval()


def source(name_or_path: str) -> str:
    """What transformers can load: a builtin name becomes a directory of the package, an unknown one is a ConfigError."""
    return str(builtin.path(name_or_path)) if names.is_builtin(name_or_path) else name_or_path


def precision_of(train: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The autocast type; None for float32."""
    if train.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[train.precision]


def load_tokenizer(model: ModelConfig, data: DataConfig | None = None) -> Any:
    """The base model's tokenizer, with the chat template of ``data``; a ConfigError if it is missing or not a fast one."""
    try:
        with asking_hub(model.name_or_path):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                source(model.name_or_path), revision=model.revision, trust_remote_code=False
            )
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and Hub errors here
        raise _not_found(model, "tokenizer", error) from None
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{model.name_or_path}: has no fast tokenizer, and masking tokens needs the offsets of one. Use a model with a "
            "tokenizer.json."
        )
    if data and (template := read_template(data.chat_template)) is not None:
        tokenizer.chat_template = template
    return tokenizer


def pooling_of(model: ModelConfig) -> Pooling | None:
    """How a sentence encoder pools its states into a vector; None for a causal language model.

    A sentence encoder is a folder or Hub id in the format of sentence-transformers (modules.json; mean or first-token pooling,
    vectors of length 1), or a masked language model of transformers, whose states are averaged.

    Raises:
        ConfigError: The encoder has modules of other kinds, which would be ignored.
    """
    silent: dict[str, Any] = {
        f"_raise_exceptions_for_{case}": False for case in ("missing_entries", "connection_errors")
    }

    def read(file: str) -> Any:
        with asking_hub(model.name_or_path):
            path = cached_file(source(model.name_or_path), file, revision=model.revision, **silent)
        return json.loads(Path(path).read_text("utf-8")) if path else None

    try:
        if (modules := read("modules.json")) is None:
            config = transformers.AutoConfig.from_pretrained(
                source(model.name_or_path), revision=model.revision, trust_remote_code=False
            )
            masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
            causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or ())
            return "mean" if masked and not causal else None
        kinds = [module["type"].removeprefix("sentence_transformers.models.") for module in modules]
        settings: dict[str, Any] = {"pooling_mode_mean_tokens": True}
        if kinds[1:2] == ["Pooling"]:
            settings = read(f"{modules[1]['path']}/config.json")
        chosen = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is not False]
        usual = kinds in (["Transformer", *rest] for rest in ([], ["Pooling"], ["Pooling", "Normalize"], ["Normalize"]))
        usual &= modules[0]["path"] == "" and [settings.get(name) for name in chosen] == [True]
    except Exception as error:  # the same kinds as for a tokenizer
        raise _not_found(model, "configuration", error) from None
    poolings: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if not usual or chosen[0] not in poolings:
        raise ConfigError(
            f"{model.name_or_path}: is a sentence encoder with other parts than a transformer, mean or first-token pooling and "
            "normalisation, so its vectors would differ here. Use an encoder that has only these."
        )
    return poolings[chosen[0]]


def load_base(
    model: ModelConfig,
    device: torch.device,
    *,
    force_float32: bool = False,
    stay_on_cpu: bool = False,
    kind: Any = transformers.AutoModelForCausalLM,
) -> Any:
    """The base model on its device, with nothing trainable; with ``stay_on_cpu``, on the CPU in the device's dtype.

    Raises:
        ConfigError: The model is not found, is not of this ``kind`` or does not fit, or quantization has no library.
    """
    if model.dtype != "auto":
        dtype: Any = DTYPES[model.dtype]
    else:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    arguments: dict[str, Any] = {"revision": model.revision, "dtype": torch.float32 if force_float32 else dtype}
    arguments["trust_remote_code"] = False  # else transformers asks at a terminal whether to run it
    if model.quantization is not None:
        arguments["quantization_config"] = _quantization(model.quantization, dtype)
        arguments["device_map"] = {"": device}
    try:
        with asking_hub(model.name_or_path):
            base: Any = kind.from_pretrained(source(model.name_or_path), **arguments)
        base.requires_grad_(False)
        _keep_layout(base)
        without_memory(base)
        return base if model.quantization or stay_on_cpu else base.to(device)
    except Exception as error:
        if memory.out_of_memory(error):
            raise memory.base_does_not_fit(model) from None
        description = "causal language model" if kind is transformers.AutoModelForCausalLM else "encoder"
        raise _not_found(model, description, error) from None


def positions(net: Any) -> int | None:
    """How many tokens a model can read at once; None if its configuration does not say, or says -1 as XLNet's does."""
    longest = getattr(net.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 1 else None


def digest(model: Any, tokenizer: Any, pooling: Pooling | None) -> str:
    """SHA-256 of weights, configuration, vocabulary, the tokens of the whole vocabulary as one text, and the pooling."""
    vocab = sorted(tokenizer.get_vocab().items())
    text = "\n".join(tokenizer.batch_decode([[number] for _, number in vocab]))  # so that every merge is used
    ids, settings = tokenizer(text, verbose=False)["input_ids"], model.config.to_diff_dict()
    settings = {name: value for name, value in sorted(settings.items()) if name not in _NO_PART}
    content = hashlib.sha256(repr((vocab, ids, pooling, json.dumps(settings, sort_keys=True, default=str))).encode())
    # Without one in the checkpoint, transformers initialises a pooler at random, and no state goes through it.
    for tensor in (tensor for name, tensor in model.named_parameters() if "pooler" not in name):
        content.update(repr(tensor.shape).encode() + tensor.detach().float().cpu().numpy().tobytes())
    return content.hexdigest()


def check_length(config: RunConfig, net: Any) -> None:
    """Refuses, with a ConfigError, a ``data.max_length`` above the model's context length."""
    longest = positions(net)
    if longest and config.data.max_length > longest:
        raise ConfigError(
            f"data.max_length {config.data.max_length} is more than the {longest} positions of {config.model.name_or_path}. Set "
            f"data.max_length to {longest} or less."
        )


def build(config: RunConfig, device: torch.device, weights: str | None = None) -> Any:
    """The model as it trains: a PeftModel or a transformers model, in training mode, with float32 trainable parameters.

    ``train.seed`` seeds the adapter's initialisation. If the launcher asks for it, frozen weights are sharded over the ranks,
    which must all call this. ``weights`` is the SHA-256 that the weights of ``model.adapter`` must have.

    Raises:
        ConfigError: The adapter matches no layer, or would train quantised weights. Refused: The model cannot be sharded, its
            8-bit products couple rows, or ``model.adapter`` has other weights.
    """
    tell("Loading the model", public=True)
    sharded = sharding.requested()
    if sharded:
        sharding.check(config)
    torch.manual_seed(config.train.seed)
    # With autocast, float32 blocks can read a low-precision base; without it, both must be float32.
    frozen_float32 = isinstance(config.adapter, FrozenConfig) and config.train.precision in {"auto", "fp32"}
    # With fsdp_cpu_ram_efficient_loading, accelerate's default, transformers may leave the weights empty on all ranks but one,
    # and expects accelerate to fill them. Ranks of one machine share mapped safetensors if model.dtype is the file's.
    with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false") if sharded else contextlib.nullcontext():
        model = load_base(config.model, device, force_float32=frozen_float32, stay_on_cpu=sharded)
    if processes.several() and not sharded:  # a sharded model is checked while it moves to its devices
        processes.check_equal(
            {"the fingerprint of the loaded weights": f"{processes.fingerprint(model.parameters()):x}"}
        )
    check_outliers(model)
    model = adapters.attach(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if config.model.adapter is not None:
        adapters.start_from(model, Path(config.model.adapter), weights)
    if processes.several():  # frozen factors too, which no step compares
        tuned = (p for name, p in model.named_parameters() if p.requires_grad or ".lora_" in name)
        processes.check_equal({"the adapter or layers that training starts from": f"{processes.fingerprint(tuned):x}"})
    if sharded:
        sharding.shard(model, adapters.blocks(model)[0], device)
    return model.train()


def shrunken(config: RunConfig, model: Any, device: torch.device) -> Any:
    """Two blocks of the same architecture with random float32 weights, a vocabulary of 256, and the same adapter.

    The engine checks itself on it to 1e-3 if the precision of the real model would hide smaller errors.

    Raises:
        Refused: The architecture cannot be built from its configuration alone.
    """
    small = copy.deepcopy(model.config)
    text = small.get_text_config()  # of a model that also reads images; else the configuration itself
    layers, num_blocks = text.num_hidden_layers, min(SHRUNKEN_BLOCKS, text.num_hidden_layers)
    text.num_hidden_layers = num_blocks
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == layers:  # a value for each block
            setattr(text, name, value[:num_blocks])
    text.vocab_size = SHRUNKEN_VOCABULARY
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    adapter = config.adapter
    if isinstance(adapter, FrozenConfig):
        adapter = adapter.changed({"last_blocks": min(adapter.last_blocks, num_blocks)})
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        try:
            text.pad_token_id = text.bos_token_id = text.eos_token_id = None
            net = transformers.AutoModelForCausalLM.from_config(
                small, dtype=torch.float32, attn_implementation=model.config._attn_implementation
            )
            net = net.to(device).requires_grad_(False)
            net = adapters.attach(net, config.changed({"adapter": adapter}))
        except Exception as error:  # model classes of the Hub raise anything
            raise Refused(
                f"the self-check needs a small float32 copy of {type(model).__name__}, which could not be built "
                f"({type(error).__name__}). Set train.precision: fp32 and model.dtype: float32."
            ) from None
    without_dropout(net)
    return net.train()


def without_dropout(model: nn.Module) -> dict[str, float]:
    """Switches dropout off, in place: with masks of a whole batch, one unit would change the contributions of others.

    Covers dropout modules, and rates (layer drop too) whose names in modules and their configurations contain "drop". The
    configuration that the model exports keeps the values of the base model. The self-check finds dropout under other names.

    Returns:
        The rates that were not zero, by the last part of their names; public.
    """
    exported = {id(model), id(model.get_base_model()) if isinstance(model, PeftModel) else id(model)}
    settings: dict[int, tuple[Any, Any]] = {}  # keeps the original alive, so that no other object gets its id
    rates: dict[str, float] = {}
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            rates[path.rpartition(".")[2]], module.p = module.p, 0.0
        rates |= _zeroed(module)
        module_config = vars(module).get("config")
        if isinstance(module_config, transformers.PretrainedConfig) and id(module) not in exported:
            if id(module_config) not in settings:
                settings[id(module_config)] = module_config, copy.deepcopy(module_config)
                rates |= _zeroed(settings[id(module_config)][1])
            module.config = settings[id(module_config)][1]  # Falcon reads its rates from there as it runs
    return dict(sorted(rates.items()))


def _zeroed(owner: Any) -> dict[str, float]:
    rates = {
        name: value for name, value in vars(owner).items() if "drop" in name and isinstance(value, float) and value
    }
    for name in rates:
        setattr(owner, name, 0.0)
    return rates


def load_for_scoring(config: RunConfig, export: Path, device: torch.device) -> ScoringModels:
    """Loads what a run exported, as any reader would, together with its base.

    Raises:
        ConfigError: The export directory holds no weights.
        Refused: A weight is not finite.
    """
    if not any(export.glob("*.safetensors")):
        raise ConfigError(f"{export}: holds no weights: the run did not finish. Run dpllm train again, or resume it.")
    tokenizer = load_tokenizer(config.model, config.data)
    if isinstance(config.adapter, LoraConfig):
        tuned: Any = PeftModel.from_pretrained(load_base(config.model, device), str(export))
        reference = config.objective.reference(config.model.adapter)
        if reference is not None:
            if not Path(reference).is_dir():
                raise ConfigError(f"model.adapter {reference}: is missing, and scores need it. Put it back.")
            tuned.load_adapter(reference, _REFERENCE)
    else:
        arguments: Any = {"dtype": torch.float32, "trust_remote_code": False}
        tuned = transformers.AutoModelForCausalLM.from_pretrained(str(export), **arguments).to(device)
    check_finite(tuned, str(export))
    return ScoringModels(tokenizer, tuned.eval(), config.model, device)


def check_finite(model: Any, where: str) -> None:
    """Refuses, with Refused, a weight that is not finite; the outcome follows from the weights alone."""
    for name, tensor in model.named_parameters():
        if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
            raise Refused(
                f"{where}: {name} has a value that is not finite: the training diverged, or the file is damaged. Lower "
                "train.learning_rate and train again."
            )


def _quantization(bits: str, dtype: Any) -> Any:
    need("bitsandbytes", "model.quantization")
    if bits == "8bit":
        # With the default of 6, one large token anywhere in the batch takes columns out of everyone's 8-bit product.
        return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    compute = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def _keep_layout(base: Any) -> None:
    """Keeps 4-bit weights in the layout in which they were loaded.

    In evaluation on a CPU with AVX512-BF16, bitsandbytes 0.50 repacks them for a kernel without a backward pass, and later
    training uses it too. Can go when Linear4bit.forward unpacks them for training.
    """
    for module in base.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False


def check_outliers(model: Any) -> None:
    """Refuses a checkpoint quantised by LLM.int8() with outlier columns: one row would change how others round."""
    settings = getattr(model.config, "quantization_config", None)
    if getattr(settings, "load_in_8bit", False) and getattr(settings, "llm_int8_threshold", 0.0) > 0:
        raise Refused(
            "the checkpoint is quantised to 8 bits with outlier columns, which all rows of a batch share, so one row would "
            "change the contributions of others, unclipped. Use the unquantised checkpoint and model.quantization: 8bit."
        )


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Refuses a tokenizer with more tokens than the model: an error about a text with such a token would reveal it."""
    if len(tokenizer) > (embeddings := model.get_input_embeddings().weight.shape[0]):
        raise ConfigError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model {embeddings:,}, so texts with the other tokens cannot be "
            "read. Use the model's own tokenizer."
        )


def _not_found(model: ModelConfig, kind: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.name_or_path {model.name_or_path!r}: no {kind} could be loaded ({type(error).__name__}). Check the spelling "
        "and the network, or name a local directory, or builtin:tiny."
    )
