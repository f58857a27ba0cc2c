"""Makes part of a base model trainable: LoRA adapters or the last blocks.

Comes in: a base model with nothing trainable, and the recipe. Goes out: the model with its trainable parameters, and their
names. This module must not see data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn
from transformers.pytorch_utils import Conv1D

from dpllm.errors import ConfigError, Refused
from dpllm.privacy.guards import ROUTED
from dpllm.recipe.config import FrozenConfig, LoraConfig, RunConfig
from dpllm.recipe.names import public_name

# These get no adapters: they see other rows' tokens, no gradient reaches them (sparse attention's choice of tokens), or another
# layer reads their weights (Gemma 3n).
APART = ROUTED | {"indexer", "compressor", "altup", "gate_up_proj_adapter_list"}
_WRAPPERS = {"default", "base_model", "model", "modules_to_save"}


def attach(model: Any, config: RunConfig) -> Any:
    """Makes trainable what the recipe asks for: a PeftModel, or the model itself with some layers unfrozen.

    Raises:
        ConfigError: The adapter matches nothing, or would train weights that are packed in few bits.
    """
    if isinstance(config.adapter, LoraConfig):
        model = _add_lora(model, config.adapter, config.model.name_or_path)
    else:
        unfreeze(model, config.adapter)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def start_from(model: PeftModel, folder: Path, sha256: str | None = None) -> None:
    """Loads the values of an earlier adapter into this one, from safetensors alone.

    Raises:
        ConfigError: The adapter is damaged, or has other layers or shapes.
        Refused: Its SHA-256 is another one.
    """
    try:
        content = (folder / "adapter_model.safetensors").read_bytes()
        if sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise Refused(
                f"model.adapter {folder}: its weights changed while the run was starting, so the run's lineage would be wrong. "
                "Start again, and do not change the folder meanwhile."
            )
        saved = load(content)
    except (OSError, SafetensorError, KeyError) as error:  # KeyError: a number type that torch does not have
        raise ConfigError(
            f"model.adapter {folder}: its weights cannot be read ({type(error).__name__}). Use an undamaged copy."
        ) from None
    for name, tensor in saved.items():
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise ConfigError(
                f"model.adapter {folder}: {name} has a value that is not finite, so training would fail. Use an undamaged copy."
            )
    current = get_peft_model_state_dict(model, save_embedding_layers=False)
    saved_shapes, current_shapes = ({name: tensor.shape for name, tensor in of.items()} for of in (saved, current))
    if saved_shapes != current_shapes:
        layers = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in saved if ".lora_" in name})
        differs = min(saved_shapes.items() ^ current_shapes.items())[0]
        raise ConfigError(
            f"model.adapter {folder}: {differs} is missing or has another shape in it or in the recipe's adapter, so some "
            "weights would be lost or start at random. Name its base model, its adapter.modules_to_save, and its layers: "
            f"--adapter.target_modules '[{', '.join(layers)}]'."
        )
    set_peft_model_state_dict(model, saved)


def blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """The decoder blocks and their name: the list of modules in the text decoder that has the most parameters.

    Length and class do not identify them: per-head norms can outnumber the blocks (StableLM), an image encoder may have as
    many, and blocks may alternate between two classes (Jamba).

    Raises:
        ConfigError: The model has none.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    within = {id(module) for module in model.get_decoder().modules()}
    lists = [item for item in lists if id(item[1]) in within] or lists  # ModernBERT calls its head a decoder
    if not lists:
        raise ConfigError(
            "the base model has no list of decoder blocks, so the layers to train cannot be found. Use another base model."
        )
    return max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))


def left_out(model: Any) -> list[str]:
    """Names, within a block, of the layers whose weights got no LoRA adapter; norms and biases are not counted."""
    layers = blocks(model)[1]
    frozen = [
        name
        for name, parameter in layers.named_parameters()
        if parameter.dim() > 1 and not parameter.requires_grad and not re.search(r"\.base_layer\.|\.lora_", name)
    ]
    return sorted({".".join(part for part in name.split(".")[:-1] if not part.isdigit()) for name in frozen})


def trainable_table(model: nn.Module) -> list[tuple[str, int, int]]:
    """What trains, one tuple for each kind: (kind of layer, number of tensors, number of parameters).

    The adapters of all projections are one kind, ("LoRA on q, k, v, o_proj of 12 layers", 96, 589824); so are whole blocks.
    """
    kinds: dict[str, tuple[dict[str, None], set[str], int, int]] = {}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapter = "LoRA" if any(re.search(r"\.lora_(embedding_)?A\.", name) for name in trained) else "B of LoRA"
    for name, parameter in trained.items():
        path, lora, _ = name.partition(".lora_")
        parts = [part for part in (path if lora else name.rpartition(".")[0]).split(".") if part not in _WRAPPERS]
        block = re.match(r"(.*?\.)?\d+\.", name)  # up to the first number, which counts layers
        kind = adapter if lora else "blocks" if block and ".modules_to_save." not in name else parts[-1]
        layers, blocks, tensors, size = kinds.get(kind, ({}, set(), 0, 0))
        layers[parts[-1]] = None
        kinds[kind] = layers, blocks | ({block[0]} if block else set()), tensors + 1, size + parameter.numel()
    return [
        (_in_words(kind, list(layers), len(blocks)), tensors, size)
        for kind, (layers, blocks, tensors, size) in kinds.items()
    ]


def _in_words(kind: str, layers: list[str], blocks: int) -> str:
    count = "1 layer" if blocks == 1 else f"{blocks} layers"
    if kind == "blocks":
        return f"{count}, whole"
    proj = all(layer.endswith("_proj") for layer in layers)
    named = ", ".join(layer.removesuffix("_proj") for layer in layers) + "_proj" if proj else ", ".join(layers)
    return (f"{kind} on " if kind.endswith("LoRA") else "") + named + (f" of {count}" if blocks else "")


def trainable_text(kinds: Sequence[tuple[str, int, int]], total: int) -> str:
    """``trainable_table`` in words, a line for each kind; ``total`` includes frozen parameters."""
    sums = sum(tensors for _, tensors, _ in kinds), sum(size for *_, size in kinds)
    rows = [*kinds, ("in all", *sums)] if len(kinds) > 1 else kinds
    lines = (f"{kind}: {tensors} tensors, {size:,} of {total:,} parameters" for kind, tensors, size in rows)
    return "What trains: " + "\n             ".join(lines)


def _add_lora(model: Any, adapter: LoraConfig, name: str) -> Any:
    adaptable = _adaptable(model)
    linear = {path.rpartition(".")[2] for path in adaptable}
    targets: Any = adapter.target_modules
    if isinstance(targets, str) and targets in linear:
        targets = [targets]  # peft would read a single name as an expression for whole paths
    _check_modules_to_save(model, adapter, linear if targets == "auto" else targets)
    if targets == "auto":
        targets = _targets(model, adaptable)
    conv1d = any(isinstance(module, Conv1D) for module in model.modules())
    try:
        peft_config = PeftLoraConfig(
            task_type="CAUSAL_LM",
            r=adapter.r,
            lora_alpha=adapter.alpha,
            lora_dropout=adapter.dropout,
            target_modules=targets,
            use_rslora=adapter.use_rslora,
            modules_to_save=adapter.modules_to_save or None,
            fan_in_fan_out=conv1d,
        )
        peft_model = get_peft_model(model, peft_config)
    except (ValueError, re.error):
        raise ConfigError(
            f"adapter.target_modules {adapter.target_modules!r} matches no layer that LoRA knows in {name}. "
            f"Its linear layers are {', '.join(sorted(linear))}; or set adapter.target_modules: auto."
        ) from None
    if adapter.lora_a == "frozen":
        for path, parameter in peft_model.named_parameters():
            if ".lora_embedding_A." in path:
                raise ConfigError(
                    "adapter.lora_a: frozen does not work for an embedding: peft initialises the first factor of its adapter "
                    "to zero, so the second would never learn. Remove the embedding from adapter.target_modules, or set "
                    "adapter.lora_a: trained."
                )
            if ".lora_A." in path:
                parameter.requires_grad_(False)
    # A local path means nothing to others, and may reveal more than it should.
    peft_model.peft_config["default"].base_model_name_or_path = public_name(name)
    return peft_model


def _check_modules_to_save(model: Any, adapter: LoraConfig, targets: Any) -> None:
    names = dict(model.named_modules())
    for module in adapter.modules_to_save:
        layers = [name for name in names if name == module or name.endswith(f".{module}")]
        containers = [name for name in layers if next(names[name].children(), None) is not None]
        if not layers or containers:
            reason = "matches no layer" if not layers else f"is {containers[0]}, which holds other layers"
            raise ConfigError(
                f"adapter.modules_to_save: {module!r} {reason}. Name single layers, such as lm_head, embed_tokens or norm."
            )
        for name in layers:
            _refuse_packed(names[name], f"adapter.modules_to_save: {module!r}")
        if not isinstance(targets, str) and module in targets:
            raise ConfigError(
                f"adapter.modules_to_save: {module!r} also gets an adapter. Remove it from this list or from target_modules."
            )


def _targets(model: Any, chosen: list[str]) -> list[str] | str:
    """The chosen layers as adapter_config.json names them: last parts if these match nothing else, else an expression."""
    prefix = blocks(model)[0]
    names = {name.rpartition(".")[2] for name in chosen}
    if chosen == [name for name, _ in model.named_modules() if name.rpartition(".")[2] in names]:
        return sorted(names)
    inside = {re.escape(name.removeprefix(f"{prefix}.").partition(".")[2]) for name in chosen}
    return rf"{re.escape(prefix)}\.\d+\.({'|'.join(sorted(inside))})"


def _adaptable(model: Any) -> list[str]:
    """Full names of the linear layers in the decoder blocks that read every row's tokens and are called themselves.

    Names decide, not a forward pass, because the model may be sharded or on the meta device (``dpllm plan``).
    """
    prefix, layers = blocks(model)
    linear = []
    for name, module in layers.named_modules(prefix=prefix):
        if not isinstance(module, (nn.Linear, Conv1D)) or APART & set(name.split(".")):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        # Fused kernels of state-space mixers (Mamba) read every other weight without calling its layer.
        mixer = {"A_log", "D"} <= {parameter for parameter, _ in parent.named_parameters(recurse=False)}
        if mixer and not name.rpartition(".")[2].startswith("in_proj"):
            continue
        if type(module).__name__.endswith("GroupedLinear"):  # its output has not the shape of LoRA's (DeepSeek V4)
            continue
        linear.append(name)
    # peft 0.21 applies the names of linear layers, even dense and shared ones, to the fused experts that replaced them.
    converted = PeftLoraConfig(target_modules=linear)
    convert_peft_config_for_transformers(converted, model, None)
    return [name for name in linear if name in (converted.target_modules or ())]


def unfreeze(model: Any, adapter: FrozenConfig) -> None:
    """Makes the last blocks and what else the adapter names trainable; a ConfigError if that is nothing or impossible."""
    name, layers = blocks(model)
    if adapter.last_blocks > len(layers):
        raise ConfigError(f"adapter.last_blocks is {adapter.last_blocks}, but the base model has {len(layers)} blocks.")
    chosen: list[nn.Module] = list(layers)[len(layers) - adapter.last_blocks :]
    if adapter.final_norm:
        parent = model.get_submodule(name.rpartition(".")[0])
        siblings = list(parent.named_children())
        position = [child for child, _ in siblings].index(name.rpartition(".")[2])
        chosen += [
            module
            for index, (child, module) in enumerate(siblings)
            # OPT names its final norm before its blocks; other norms there belong to the embedding.
            if "norm" in type(module).__name__.lower() and (index > position or child.startswith("final"))
        ]
    if adapter.lm_head:
        head = model.get_output_embeddings()
        if head is None:
            raise ConfigError(
                f"adapter.lm_head: true, but {type(model).__name__} has no output head that could train. Set adapter.lm_head: "
                "false."
            )
        chosen.append(head)
    for module in chosen:
        _refuse_packed(module, "adapter.method: frozen")
        module.requires_grad_(True)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("nothing trains: set adapter.last_blocks to 1 or more, or adapter.final_norm: true.")


def _refuse_packed(module: nn.Module, who: str) -> None:
    if any(not parameter.is_floating_point() for parameter in module.parameters()):
        raise ConfigError(
            f"{who} trains whole weights, but quantised weights cannot be trained. Give them adapters (adapter.method: lora, "
            "adapter.target_modules), or use the unquantised checkpoint and model.quantization: null."
        )
