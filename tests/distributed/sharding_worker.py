"""The processes of tests/distributed/test_sharding.py: two ranks with a sharded base, and one alone with a whole one.

Usage: python sharding_worker.py FOLDER, which holds a base model in each folder that VARIANTS names. Each rank leaves
FOLDER/world<W>_rank<R>.pt and, of each variant, an adapter as the run exports it. With the word "families" after it, three
ranks compare every architecture of tests/tiny.py, sharded and whole, and leave FOLDER/families_rank<R>.pt.
"""

import contextlib
import multiprocessing
import os
import sys
import types
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import tiny_models as tm
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from dpllm.errors import ConfigError, Refused
from dpllm.model import adapters, evaluate, loading, sharding
from dpllm.privacy.engine import StepEngine, recover
from dpllm.privacy.packing import Pass, lay_out
from dpllm.privacy.schedule import TokenSequence
from dpllm.run import checkpoint
from dpllm.run.directory import RunDir
from dpllm.run.screen import Samples

C, SIGMA, STEPS = 0.05, 0.7, 2
# How each trains, and the base model: llama has a head of its own, gpt2's is tied to the embedding.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"base": "llama"},
    "checkpointed": {"base": "llama", "gradient_checkpointing": True},
    "low": {"base": "llama", "dtype": "bfloat16"},
    "tied": {"base": "gpt2", "gradient_checkpointing": True, "lora_a": "frozen"},
    "copied": {"base": "gpt2", "modules_to_save": ["lm_head"]},
}
LENGTHS = ((9, 4), (17,), (5,), (12,), (3, 7, 2), (6,), (8,))
PACKING = tm.packing()
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",  # the launcher's default, under which transformers loads on one rank only
}


def shares(world: int, rank: int) -> list[list[Pass]]:
    """Two logical batches: one that all share, one of which only rank 0 gets anything."""
    units = tm.units(LENGTHS)
    nobody = lay_out([], PACKING, 0)
    first = [[lay_out(some, PACKING, 0) for some in (units[:3], units[3:4])], [lay_out(units[4:], PACKING, 0), nobody]]
    second = [[lay_out(units[:2], PACKING, 0)], [nobody]]
    if world == 1:
        return [[*first[0], *first[1]], second[0]]
    return [first[rank], second[rank]]


def run(name: str, folder: Path, rank: int, world: int) -> dict[str, Any]:
    settings = VARIANTS[name]
    base = {key: settings[key] for key in ("gradient_checkpointing", "dtype") if key in settings}
    base["name_or_path"] = str(folder / settings["base"])
    adapter = {**tm.LORA, **{key: settings[key] for key in ("modules_to_save", "lora_a") if key in settings}}
    config = tm.recipe(model=base, adapter=adapter, train={"seed": 3})
    net = loading.build(config, tm.CPU)
    results: dict[str, Any] = facts(net)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in tm.trainable(net).values():  # no weight at zero, which would hide others
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    low = "dtype" in settings
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16) if low else contextlib.nullcontext
    promise = tm.plan(C, SIGMA, tm.schedule(24, 12, STEPS))
    engine = tm.make_engine(net, promise, noise_entropy=1234, autocast=autocast)
    results["error"] = engine.self_check(tm.VOCABULARY, low_precision=low).error
    results["before"] = held_out(net, rank, world)
    results["samples"] = Samples(("", ""), ((5, 9, 20), (7,)), None, 12).write(net, tiny.tokenizer(), autocast)
    for step, batches in enumerate(shares(world, rank)):
        results[f"losses{step}"] = torch.cat([losses(engine, batch) for batch in batches])
        sum_P, diagnostics = engine.clipped_sum(batches)
        results[f"sum{step}"], results[f"units{step}"] = sum_P, diagnostics.units
        released_P = engine._release(sum_P.clone())
        results[f"released{step}"] = released_P
        engine._apply(released_P)
    results["after"] = held_out(net, rank, world)
    results["weights"] = torch.cat([p.detach().flatten() for p in engine.parameters.values()])
    engine.close()
    results["unclipped"] = unclipped(net, shares(world, rank)[0])
    results["again"] = after_a_failure(net, shares(world, rank)[0])
    if low:  # what the self-check of a run in low precision builds beside it
        small = loading.shrunken(config, net, tm.CPU)
        results["small"] = tm.make_engine(small, promise).self_check(64).error
    if rank == 0:  # alone, as a run does: a collective in here would wait for ever
        checkpoint.export(net, Unsaved(), RunDir(folder / f"{name}{world}"))
        state = checkpoint.State(STEPS)
        checkpoint.save_resume(RunDir(folder / f"{name}{world}"), net, engine._optimizer, state)
    prompt = torch.tensor([[5, 9, 20 + rank]]) if world > 1 else torch.tensor([[5, 9, 20], [5, 9, 21]])
    settings = {"max_new_tokens": 6 + rank, "do_sample": False, "eos_token_id": None}
    tokens = net.eval().generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **settings)
    results["tokens"] = tokens[:, :9]
    return results


def losses(engine: StepEngine, some: Pass) -> torch.Tensor:
    """loss_R as a step computes it."""
    with torch.no_grad(), engine._attention.of(some):
        return engine.losses(some)[: len(some.rows)]


def unclipped(net: Any, batches: list[Pass]) -> torch.Tensor:
    """The sum of gradients of a run without differential privacy."""
    optimizer = torch.optim.SGD(list(tm.trainable(net).values()), lr=1.0)
    schedule = tm.schedule(24, 12, STEPS)
    engine = tm.engine_of(net, optimizer, schedule, None, noise_entropy=0)
    return engine.clipped_sum(batches)[0]


def after_a_failure(net: Any, batches: list[Pass]) -> torch.Tensor:
    """The clipped sum, after a forward and a backward pass that an exception ended."""
    engine = tm.make_engine(net, tm.plan(C, SIGMA, tm.schedule(24, 12, STEPS)))

    def fail(*_: Any) -> None:
        raise MemoryError

    layer = adapters.blocks(net)[1][1].mlp
    for register in (layer.register_forward_hook, layer.register_full_backward_hook):
        hook = register(fail)
        with contextlib.suppress(MemoryError):
            engine.clipped_sum(batches)
            raise AssertionError("nothing failed")
        hook.remove()
        engine.close()
        recover(net)
        engine = tm.make_engine(net, tm.plan(C, SIGMA, tm.schedule(24, 12, STEPS)))
    return engine.clipped_sum(batches)[0]


def refusals(folder: Path, rank: int) -> dict[str, str]:
    """What two ranks with different weights are told, and those whose model looks up its embedding from elsewhere."""
    results = {}
    try:
        loading.build(tm.recipe(model={"name_or_path": str(folder / ("other" if rank else "llama"))}), tm.CPU)
    except ConfigError as error:
        results["different"] = str(error)
    os.environ["ACCELERATE_USE_FSDP"] = "false"
    net = loading.build(tm.recipe(model={"name_or_path": str(folder / "llama")}), tm.CPU)
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    head, embedding = net.get_output_embeddings(), net.get_input_embeddings()
    head.forward = lambda hidden_RTd: functional.linear(hidden_RTd, embedding.weight)
    try:
        sharding.shard(net, adapters.blocks(net)[0], tm.CPU)
    except Refused as error:
        results["outside"] = str(error)
    return results


def facts(net: Any) -> dict[str, Any]:
    """How much of the model lies here, and what of it is cut."""
    blocks, layers = adapters.blocks(net)
    frozen = {name: p for name, p in layers.named_parameters() if not p.requires_grad}
    cut = {name: p for name, p in net.named_parameters() if isinstance(p, DTensor)}
    assert not any(p.requires_grad for p in cut.values())
    return {
        "sharded": isinstance(net, FSDPModule),
        "cut": sorted(cut),
        "here": sum(p.to_local().numel() for p in cut.values()),
        "all": sum(p.numel() for p in cut.values()),
        "dtypes": sorted({str(p.dtype) for p in cut.values()}),
        "frozen_types": sorted({str(p.dtype) for p in net.parameters() if not p.requires_grad}),
        "frozen_in_blocks": [f"{blocks}.{name}" for name, p in frozen.items() if p.dim() and ".lora_" not in name],
        "trains_in": sorted({str(p.dtype) for p in net.parameters() if p.requires_grad}),
        "frozen": sum(p.numel() for p in net.parameters() if not p.requires_grad),
        "trains": sorted(tm.trainable(net)),
    }


def held_out(net: Any, rank: int, world: int) -> tuple[float, float, int]:
    """Of three sequences one at a time: rank 1 of two has fewer. And of one alone, of which rank 1 has nothing."""
    rows = [TokenSequence(tuple(range(3, 3 + n)), (False,) + (True,) * (n - 1), n - 1) for n in (9, 4, 13)]
    alone = evaluate.held_out_loss(net, rows[:1], 1, tm.CPU, contextlib.nullcontext, rank, world)
    result = evaluate.held_out_loss(net, rows, 1, tm.CPU, contextlib.nullcontext, rank, world)
    return (result.loss, alone.loss, result.tokens)


class Unsaved(types.SimpleNamespace):
    """In the tokenizer's place."""

    def save_pretrained(self, path: str) -> None:
        """Leaves nothing."""


def compare(family: str, adapter: dict[str, Any], checkpointing: str | None, rank: int) -> tuple[float, float]:
    """Relative difference of a clipped sum through a sharded and a whole model, and the self-check's error."""
    whole = tm.build(family, adapter, checkpointing=checkpointing)
    engine = tm.make_engine(whole, tm.plan(C))
    batches = tm.batches(tm.units(tm.RAGGED, seed=rank + 1), engine)
    expected_P = engine.clipped_sum(batches)[0]
    net = tm.build(family, adapter, checkpointing=checkpointing)
    sharding.shard(net, adapters.blocks(net)[0], tm.CPU)
    engine = tm.make_engine(net, tm.plan(C))
    error = engine.self_check(tm.VOCABULARY).error
    found_P = engine.clipped_sum(batches)[0]
    return float((found_P - expected_P).norm() / expected_P.norm()), error


def families(rank: int) -> dict[str, tuple[float, float]]:
    results = {}
    for index, family in enumerate(family for family in tiny.FAMILIES if family != "phimoe"):  # whose router draws
        sparse = {"target_modules": ["q_proj", "v_proj"]} if family == "mixtral" else {}
        checkpointing = "non-reentrant" if index % 2 else None
        results[f"{family} {checkpointing}"] = compare(family, {**tm.LORA, **sparse}, checkpointing, rank)
    for changes in (
        {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "norm"]},
        {"modules_to_save": ["lm_head", "input_layernorm"]},
    ):
        results[f"llama {changes}"] = compare("llama", {**tm.LORA, **changes}, None, rank)
    return results


def work(rank: int, world: int, folder: Path, everything: bool = False) -> None:
    torch.set_num_threads(1)
    if not everything:  # OPT's blocks return views, which nobody changes in place
        warnings.filterwarnings("error", message=".*FSDP")
    if world > 1:
        os.environ.update(LAUNCHED)
        distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    if everything:
        torch.save(families(rank), folder / f"families_rank{rank}.pt")
    else:
        results: dict[str, Any] = {name: run(name, folder, rank, world) for name in VARIANTS}
        if world > 1:
            results["refusals"] = refusals(folder, rank)
        torch.save(results, folder / f"world{world}_rank{rank}.pt")
    if world > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    # Forked after the imports, which take longer than the steps, and before torch has started a thread.
    fork = multiprocessing.get_context("fork")
    place, everything = Path(sys.argv[1]), "families" in sys.argv[2:]
    ranks = ((0, 3), (1, 3), (2, 3)) if everything else ((0, 2), (1, 2), (0, 1))
    processes = [fork.Process(target=work, args=(rank, world, place, everything)) for rank, world in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
