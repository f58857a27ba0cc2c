"""The processes of tests/distributed/test_steps.py: three ranks, two, and one alone, on the same sampling key."""

import multiprocessing
import sys
from dataclasses import replace

import tiny_models as tm
import torch
from torch import distributed

from dpllm.privacy.banded import LearningRate, strategy
from dpllm.privacy.gradient_canaries import GradientCanaries
from dpllm.privacy.packing import passes_of
from dpllm.privacy.sampling import CyclicSchedule, PoissonSampler
from dpllm.privacy.schedule import Unit

STEPS, C, SIGMA = 3, 0.05, 0.7
SLOTS, DRAWS, MEMBERS = 40, 1500, 10  # of the sampling masks
RELEASES = 400  # of empty batches
PACKING = tm.packing(32, longest=16)
Results = dict[str, torch.Tensor]


def ragged() -> list[Unit | None]:
    """Units of one to six rows, so that one goes on over two passes, and slots without data."""
    lengths = [[4 + number % 9, *([5] * (number % 2)), *([6] * (4 * (number % 11 == 6)))] for number in range(24)]
    return [None if number % 7 == 3 else tm.unit(of_one, number) for number, of_one in enumerate(lengths)]


def steps(rank: int, world: int) -> Results:
    """Whole steps: this rank's sum, what is released, the weights at the end."""
    promise, slots = tm.plan(C, SIGMA, tm.schedule(24, 12, STEPS)), ragged()
    # The other ranks are given another noise key: only rank 0's may reach the update.
    engine = tm.make_engine(tm.build("llama"), promise, tokens=32, longest=16, noise_entropy=1234 if rank == 0 else 999)
    engine.self_check(tm.VOCABULARY)
    if rank == 0:  # as in a run, where rank 0 holds the gradient canaries
        engine.canaries = GradientCanaries(5, (True, False, True), engine.size, "flat", torch.device("cpu"))
    sampler = PoissonSampler(promise.schedule, len(slots), entropy=77)
    results: Results = {}
    for step in range(STEPS):
        mine = passes_of(sampler.draw(), slots, PACKING, 0, rank, world)
        sum_P, diagnostics = engine.clipped_sum(mine, [0, 1, 2] if rank == 0 else [])
        results[f"sum{step}"], results[f"units{step}"] = sum_P, torch.tensor(diagnostics.units)
        results[f"batches{step}"] = torch.tensor(len(mine))
        released_P = engine._release(sum_P.clone())
        results[f"released{step}"] = released_P
        if engine.projections is not None:
            results[f"projections{step}"] = engine.projections
        engine._apply(released_P)
    results["weights"] = torch.cat([p.detach().flatten() for p in engine.parameters.values()])
    return results


def few(rank: int, world: int) -> Results:
    """Batches with fewer units than ranks: the share of some, or of all, is empty."""
    promise, slots = tm.plan(C, SIGMA, tm.schedule(24, 12, STEPS)), ragged()
    engine = tm.make_engine(tm.build("llama"), promise, tokens=32, longest=16, noise_entropy=55)
    results: Results = {}
    for name, drawn in {"one": [6], "none": [], "empty_slot": [3]}.items():
        mine = passes_of(drawn, slots, PACKING, 0, rank, world)
        results[f"{name}_sum"] = engine.clipped_sum(mine)[0]
        results[f"{name}_batches"] = torch.tensor(len(mine))
        results[f"{name}_released"] = engine._release(results[f"{name}_sum"].clone())
    return results


def noise(rank: int, world: int) -> Results:
    """What is released where nobody was drawn: noise alone."""
    promise = tm.plan(C, SIGMA, tm.schedule(24, 12, STEPS))
    engine = tm.make_engine(tm.build("llama"), promise, noise_entropy=31 + rank)
    size = len(engine.clipped_sum([])[0])
    empty = torch.zeros(size, dtype=torch.float64)
    rows = torch.stack([engine._release(empty.clone()) for _ in range(RELEASES)])
    return {"rows": rows[:, :512].clone()}


def banded_noise(rank: int, world: int) -> Results:
    """Banded noise released over a whole run, and who joins which step; the groups' key is shared, the noise key is not."""
    plain = tm.plan(C, SIGMA, tm.schedule(24, 6, STEPS * 3))
    coefficients = strategy(LearningRate(warmup=0.05), STEPS * 3, 3)
    banded = plain.model_copy(update={"coefficients": coefficients})
    engine = tm.make_engine(tm.build("llama"), banded, noise_entropy=71 + rank)
    sampler = PoissonSampler(plain.schedule, 24, 77, CyclicSchedule(3, 2**250 + 1))
    empty = torch.zeros(len(engine.clipped_sum([])[0]), dtype=torch.float64)
    rows, joined = [], torch.zeros((STEPS * 3, 24), dtype=torch.int8)
    for step in range(STEPS * 3):
        rows.append(engine._release(empty.clone()).double() * plain.schedule.expected_batch_size)
        joined[step, sampler.draw()] = 1
    held = torch.tensor(len(engine._noise._past))  # type: ignore[union-attr]
    return {"rows": torch.stack(rows), "joined": joined, "held": held}


def masks(rank: int, world: int) -> Results:
    """Which slots this rank computed in each draw; slot s writes token s + 3 everywhere."""
    schedule = tm.schedule(SLOTS, MEMBERS)
    slots = [tm.constant_unit(2 + slot % 5, slot + 3) for slot in range(SLOTS)]
    sampler = PoissonSampler(schedule, SLOTS, entropy=2024)
    seen = torch.zeros((DRAWS, SLOTS), dtype=torch.int8)
    for draw in range(DRAWS):
        for each in passes_of(sampler.draw(), slots, replace(PACKING, most_units=4), 0, rank, world):
            for unit in each.units:
                seen[draw, each.input_ids_1M[0, unit.start] - 3] += 1
    return {"seen": seen}


def work(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        rendezvous = f"file://{folder}/rendezvous{world}"
        distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    results = {job.__name__: job(rank, world) for job in (steps, few, noise, banded_noise, masks)}
    torch.save(results, f"{folder}/world{world}_rank{rank}.pt")
    if world > 1:
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    # Forked after the imports, which take longer than the steps, and before torch has started a thread.
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=work, args=(rank, world, sys.argv[1])) for world in (1, 2, 3) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
