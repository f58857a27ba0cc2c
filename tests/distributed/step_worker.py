"""The processes of tests/distributed/test_two_processes.py: two ranks, and one alone, on the same sampling key."""

from __future__ import annotations

import multiprocessing
import sys

import tiny_models as tm
import torch
from torch import distributed

from dpllm.privacy.sampling import PoissonSampler, physical_batches

STEPS, C, SIGMA = 3, 0.05, 0.7


def run(rank: int, world: int) -> dict[str, torch.Tensor]:
    promise = tm.plan(C, SIGMA, tm.schedule(24, 12, STEPS))
    slots = [
        None if number % 7 == 3 else tm.unit([4 + number % 9, *([5] * (number % 2))], number) for number in range(24)
    ]
    net = tm.build("llama")
    # Rank 1 is given another noise key: only rank 0's may reach the update.
    engine = tm.make_engine(net, promise, noise_entropy=1234 if rank == 0 else 999)
    engine.self_check(tm.VOCABULARY, 32)
    sampler = PoissonSampler(promise.schedule, len(slots), entropy=77)
    results: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        mine = physical_batches(sampler.draw(), slots, 4, 0, rank, world)
        sum_P, diagnostics = engine.clipped_sum(mine)
        results[f"sum{step}"], results[f"units{step}"] = sum_P, torch.tensor(diagnostics.units)
        released_P = engine._release(sum_P.clone())
        results[f"released{step}"] = released_P
        engine._apply(released_P)
    results["weights"] = torch.cat([p.detach().flatten() for p in engine.parameters.values()])
    return results


def work(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.save(run(rank, world), f"{folder}/world{world}_rank{rank}.pt")
    if world > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    # Forked after the imports, which take longer than the steps, and before torch has started a thread.
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=work, args=(rank, world, sys.argv[1])) for rank, world in ((0, 2), (1, 2), (0, 1))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
