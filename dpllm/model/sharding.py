"""Shards a base model too large for one device: its frozen weights, over the ranks, by torch's FSDP2.

Comes in: what `accelerate launch` put into the environment, and a model on the CPU that is ready to train. Goes out: the same
model on its devices; each rank keeps a part of every decoder block. Trainable parameters stay whole, in float32 and equal on
every rank, so that clipping, noise and checkpoints need not know about sharding. Must not know data or the Plan.

A block is gathered for its forward pass, freed, gathered again for its backward pass, and freed. All ranks therefore take part in
every forward and backward pass: a rank with fewer rows than the others runs dummy rows.

References:
    Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel (the idea; fully_shard is its second
    version, which shards each parameter by itself and can leave some out).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import parse_flag_from_env
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dpllm.errors import ConfigError, Refused
from dpllm.model import memory, processes
from dpllm.privacy.loss import in_eval_mode
from dpllm.recipe.config import LoraConfig, RunConfig

QUANTISED = (
    "quantised weights have scales that are stored separately, and sharding would split the two. Set model.quantization: null "
    "and name an unquantised model, or launch with recipes/accelerate/gpu_ddp.yaml: a quantised base is much smaller."
)


def requested() -> bool:
    """Whether the launcher asks for a sharded base (`distributed_type: FSDP`)."""
    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))


def check(config: RunConfig) -> None:
    """Checks recipe and launch file, before anything is loaded.

    Raises:
        Refused: The recipe trains weights that would be sharded, or the launch file has an unsupported setting.
        ConfigError: There is only one process.
    """
    if not isinstance(config.adapter, LoraConfig):
        raise Refused(
            "adapter.method frozen trains layers of the base model, and a sharded base (distributed_type: FSDP) gives each "
            "process only a part of them, while clipping needs per-example gradients of whole layers. Set adapter.method: "
            "lora, or launch with recipes/accelerate/gpu_ddp.yaml."
        )
    if config.model.quantization is not None:
        raise Refused(QUANTISED)
    _check_plugin(_plugin())
    if not processes.several():
        raise ConfigError(
            "the launch file asks for a sharded base (distributed_type: FSDP), but there is only one process, which would hold "
            "all of it. Start several, or launch with recipes/accelerate/gpu.yaml."
        )


def _plugin() -> FullyShardedDataParallelPlugin:
    """The plugin that accelerate builds from the environment."""
    version = os.environ.get("FSDP_VERSION", "1")  # accelerate's default, whose plugin names settings differently
    if version != "2":
        raise Refused(
            f"fsdp_version is {version}: it flattens all weights of a layer, trained and frozen, into one tensor, so an "
            "adapter's per-example gradients cannot be separated. Set fsdp_version: 2, as recipes/accelerate/gpu_fsdp2.yaml does."
        )
    try:
        return FullyShardedDataParallelPlugin()
    except (ValueError, RuntimeError, ImportError, KeyError) as error:
        raise ConfigError(f"fsdp_config: {error} See recipes/accelerate/gpu_fsdp2.yaml.") from None


def _check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuses settings of a launch file that are not supported."""
    wrap = "TRANSFORMER_BASED_WRAP"
    checkpointing = "false, and model.gradient_checkpointing: true in the recipe"
    unsupported = {  # key -> whether it has an unsupported value, and what to set
        "fsdp_offload_params": (isinstance(plugin.cpu_offload, CPUOffloadPolicy), "false"),
        "fsdp_reshard_after_forward": (not plugin.reshard_after_forward, "true"),
        "fsdp_activation_checkpointing": (plugin.activation_checkpointing, checkpointing),
        # The plugin does not distinguish NO_WRAP from no value.
        "fsdp_auto_wrap_policy": (os.environ.get("FSDP_AUTO_WRAP_POLICY", wrap).upper() != wrap, wrap),
        "fsdp_transformer_layer_cls_to_wrap": (bool(plugin.transformer_cls_names_to_wrap), "null"),
        "fsdp_ignored_modules": (bool(plugin.ignored_modules), "null"),
        "use_parallelism_config": (bool(parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG")), "false"),
    }
    for key, (is_set, instead) in unsupported.items():
        if is_set:
            raise Refused(
                f"the launch file's {key} is not supported: dpllm gathers one decoder block at a time on the device and frees it "
                f"again, and no other setting is tested. Set it to {instead}."
            )


def shard(model: Any, blocks: str, device: torch.device) -> None:
    """Moves a model to its device, one decoder block after another, and keeps this rank's part of each.

    Input embedding and output head are sharded too, unless they are tied: a tied one is needed from the first layer to the last,
    so sharding it would save no peak memory. It stays whole, as final norm and positions do.

    Args:
        model: On the CPU, with its adapter, equal on all ranks; from then on always called as a whole. Its frozen parameters keep
            their dtype and become DTensors.
        blocks: Name of its list of decoder blocks.
        device: This rank's.

    Raises:
        ConfigError: The ranks loaded different weights, or one rank's part does not fit.
        Refused: Parts of the model share frozen weights or are quantised, or it uses weights outside their layer.
    """
    units = [*model.get_submodule(blocks), *_ends(model)]
    cut = _to_cut(units)
    world = distributed.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    unsharded = {parameter for parameter in model.parameters() if id(parameter) not in cut}
    fingerprint = 0
    try:
        for unit in units:
            fingerprint += _place(unit, device)
            # Resharding after every forward pass keeps the ranks in step, whatever a single one does with its state_dict.
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=unsharded)
        fingerprint += _place(model, device)  # what is left
        processes.check_equal({"the fingerprint of the loaded weights": f"{fingerprint:x}"})
        # The root shards nothing itself; it connects the others.
        fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=unsharded)
        _try(model, device)
    except (RuntimeError, MemoryError) as error:
        if not memory.out_of_memory(error):
            raise
        raise ConfigError(
            f"one decoder block and 1/{world} of the others do not fit into this device's memory. Start more processes "
            "(--num_processes), set model.dtype: bfloat16, or name a smaller model."
        ) from None


def _ends(model: Any) -> list[nn.Module]:
    """Embedding and head, unless they are tied; without the adapters around them, whose class selects their layer rule."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    layers = [[layer for name, layer in end.named_modules() if "lora_" not in name and _frozen(layer)] for end in ends]
    frozen = [{id(p) for layer in parts for p in _frozen(layer)} for parts in layers]
    return [] if len(ends) == 2 and frozen[0] & frozen[1] else [layer for parts in layers for layer in parts]


def _frozen(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer.parameters(recurse=False) if not p.requires_grad]


def _to_cut(units: list[nn.Module]) -> set[int]:
    """Ids of the units' frozen parameters, except adapters' and scalars, which cannot be sharded."""
    cut: set[int] = set()
    for unit in units:
        if any(not p.is_floating_point() for p in unit.parameters()):
            raise Refused(QUANTISED)
        owned = unit.named_parameters()
        frozen = {id(p) for name, p in owned if not p.requires_grad and p.dim() and "lora_" not in name}
        if frozen & cut:
            raise Refused(
                "decoder blocks of the base model share weights, so gathering one would change another. Launch with "
                "recipes/accelerate/gpu_ddp.yaml."
            )
        cut |= frozen
    return cut


def _place(module: nn.Module, device: torch.device) -> int:
    """Moves parameters and buffers that are not sharded yet; returns the parameters' fingerprint."""
    parameters = [p for p in module.parameters() if not isinstance(p, DTensor)]
    for tensor in (*parameters, *module.buffers()):
        tensor.data = tensor.data.to(device)
    return processes.fingerprint(parameters)


def _try(model: Any, device: torch.device) -> None:
    """Runs one forward pass, which initialises FSDP from the root and shows that the model works when sharded."""
    try:
        with in_eval_mode(model):
            ids_RT = torch.zeros((1, 2), dtype=torch.long, device=device)
            model(input_ids=ids_RT, attention_mask=torch.ones_like(ids_RT), use_cache=False)
    except RuntimeError as error:
        if memory.out_of_memory(error):
            raise
        raise Refused(
            f"{type(model.get_base_model()).__name__} uses weights outside the layer that holds them ({type(error).__name__}), "
            "which needs them unsharded. Launch with recipes/accelerate/gpu_ddp.yaml."
        ) from error
