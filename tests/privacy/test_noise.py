"""The noise is there, everywhere, of the promised size, fresh, and nobody's seed brings it back."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import checks
import numpy as np
import pytest
import tiny_models as tm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from checks import ALARM, SIGMA, C
from scipy import stats
from tiny_models import CPU, Toy
from torch import Tensor

from dpllm.privacy.noise import GaussianNoise, os_entropy

STEPS = 400


@pytest.fixture(scope="module")
def released(seed: int) -> Tensor:
    """What 400 steps release beyond the clipped sum, on a frozen logical batch, over sigma C."""
    return steps(tm.units([(9, 4), (7,), (5,)]), seed)


def steps(some: list, seed: int, count: int = STEPS, entropy: int | None = None, **arguments: Any) -> Tensor:
    key = 2**90 + seed if entropy is None else entropy
    size, net = arguments.pop("size", 64), arguments.pop("net", None) or Toy(bias=True)
    engine = tm.make_engine(net, tm.plan(C, SIGMA), noise_entropy=key, **arguments)
    return checks.released(engine, tm.batches(some, size), count)


def test_noise_is_normal_of_deviation_sigma_c_on_every_coordinate(released: Tensor) -> None:
    assert released.shape == (STEPS, 72)  # weight and bias: every coordinate that trains
    checks.standard_normal(released)


BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"autocast": BF16},
    "several physical batches": {"size": 1},
    "several physical batches, bf16": {"size": 1, "autocast": BF16},
    "ghost": {"grad_sample_mode": "ghost"},
    "per_sample": {"grad_sample_mode": "per_sample"},
}


@pytest.mark.parametrize("way", WAYS)
def test_noise_is_the_same_however_the_sum_is_formed(way: str, full: bool, seed: int) -> None:
    some = tm.units([(9, 4), (7,), (5,)])
    checks.standard_normal(steps(some, seed + 7, 4000 if full else 300, **WAYS[way]))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_noise_is_the_same_on_a_model_that_accelerate_prepared(precision: str, full: bool, seed: int) -> None:
    """accelerate's own autocast, and its conversion of outputs to float32, around the forward pass."""
    net = Accelerator(cpu=True, mixed_precision=precision).prepare_model(Toy(bias=True))
    AcceleratorState._reset_state(reset_partial_state=True)
    some = tm.units([(9, 4), (7,), (5,)])
    checks.standard_normal(steps(some, seed + 8, 4000 if full else 300, net=net))
    engine = tm.make_engine(net, tm.plan(C))
    checks.neighbours(engine, some)
    assert engine.self_check(tm.VOCABULARY, 32, low_precision=precision == "bf16") <= (
        5e-2 if precision == "bf16" else 1e-5
    )


def test_noise_is_fresh_at_each_step_and_independent_between_coordinates(released: Tensor) -> None:
    flat = released.numpy()
    for lag in (1, 2, 5):
        product = (flat[:-lag] * flat[lag:]).sum() / (flat.shape[1] * (STEPS - lag)) ** 0.5
        assert 2 * stats.norm.sf(abs(product)) > ALARM / 3
    between = flat.T @ flat / STEPS**0.5
    off = abs(between[np.triu_indices(72, 1)])
    assert off.max() < 9.5  # about 1e-9 for products of normal variates; equal columns give 20


def test_an_empty_logical_batch_is_noised_too() -> None:
    released = steps([], seed=1, count=200)
    checks.standard_normal(released)
    assert bool((released != 0).all())


def test_what_is_released_is_float32_and_covers_all_that_trains() -> None:
    engine = tm.make_engine(tm.build("llama"))
    flat_P = engine._release(engine.clipped_sum([])[0])
    assert flat_P.dtype == torch.float32
    assert flat_P.numel() == sum(p.numel() for p in engine.parameters.values())
    assert GaussianNoise(1, CPU).draw(3).dtype == torch.float32


@pytest.mark.parametrize("same_seed", [0, 42])
def test_a_users_seed_does_not_bring_the_noise_back(same_seed: int) -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(same_seed)
        np.random.seed(same_seed)
        random.seed(same_seed)
        draws.append(GaussianNoise(os_entropy(), CPU).draw(100_000).double())
    correlation = float((draws[0] * draws[1]).mean()) * 100_000**0.5
    assert 2 * stats.norm.sf(abs(correlation)) > ALARM


def test_drawing_noise_neither_reads_nor_moves_the_global_generators() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = GaussianNoise(5, CPU).draw(8)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(GaussianNoise(5, CPU).draw(8), first)


def test_entropy_is_128_bits_of_the_operating_system() -> None:
    keys = [os_entropy() for _ in range(200)]
    assert len(set(keys)) == 200
    assert max(keys).bit_length() > 120


@pytest.mark.parametrize("bit", [32, 33, 63, 64, 127])
def test_every_bit_of_the_key_counts(bit: int) -> None:
    """torch's own CPU generator keeps 32 bits of its seed: its noise could be searched for."""
    one, other = GaussianNoise(5, CPU).draw(1000), GaussianNoise(5 + 2**bit, CPU).draw(1000)
    assert abs(float((one * other).mean())) < 0.3
    assert not torch.equal(one, other)


def test_torchs_generator_still_keeps_only_32_bits() -> None:
    """The reason for numpy's Philox in noise.py. If this fails, torch has been mended and the comment there is stale."""
    draws = [torch.randn(10, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + 2**32)]
    assert torch.equal(*draws)


def test_an_insecure_seed_reproduces_the_noise() -> None:
    some = tm.units([(5,)])
    assert torch.equal(steps(some, 0, count=3, entropy=84), steps(some, 0, count=3, entropy=84))
    assert not torch.equal(steps(some, 0, count=3, entropy=84), steps(some, 0, count=3, entropy=85))


def test_without_a_plan_there_is_no_noise() -> None:
    net = Toy()
    engine = tm.Engine(
        net, torch.optim.SGD([net.layer.weight], lr=1.0), tm.schedule(), None, grad_sample_mode="auto",
        noise_entropy=1, device=CPU,
    )  # fmt: skip
    assert torch.equal(engine._release(engine.clipped_sum([])[0]), torch.zeros(64))
    assert engine.self_check(tm.VOCABULARY, 32) == 0.0
