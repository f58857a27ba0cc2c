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

from dpllm.privacy.noise import CHUNK, ChaCha20Stream, GaussianNoise, key_bits, keystream, os_entropy
from dpllm.privacy.plan import noise_scale

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
    "secure": {"secure_noise": True},
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
    engine = tm.engine_of(net, torch.optim.SGD([net.layer.weight], lr=1.0), tm.schedule(), None, noise_entropy=1)
    assert torch.equal(engine._release(engine.clipped_sum([])[0]), torch.zeros(64))
    assert engine.self_check(tm.VOCABULARY, 32) == 0.0


# --- privacy.secure_noise --------------------------------------------------------------------------------------------

RFC_8439_KEYSTREAM = """
    22 4f 51 f3 40 1b d9 e1 2f de 27 6f b8 63 1d ed 8c 13 1f 82 3d 2c 06 e2 7e 4f ca ec 9e f3 cf 78
    8a 3b 0a a3 72 60 0a 92 b5 79 74 cd ed 2b 93 34 79 4c ba 40 c6 3e 34 cd ea 21 2c 4c f0 7d 41 b7
    69 a6 74 9f 3f 63 0f 41 22 ca fe 28 ec 4d c4 7e 26 d4 34 6d 70 b9 8c 73 f3 e9 c5 3a c4 0c 59 45
    39 8b 6e da 1a 83 2c 89 c1 67 ea cd 90 1d 7e 2b f3 63
"""  # section 2.4.2: key 00 01 .. 1f, nonce 00 00 00 00 00 00 00 4a 00 00 00 00, first block 1
KEY = 2**255 + 2**77 + 13


def secure(seed: int = 0) -> GaussianNoise:
    return GaussianNoise(KEY + seed, CPU, secure=True)


def test_the_keystream_is_that_of_rfc_8439() -> None:
    key, nonce = bytes(range(32)), bytes.fromhex("00000000 0000004a 00000000")
    expected = bytes.fromhex(RFC_8439_KEYSTREAM)
    assert keystream(key, nonce, 1).update(bytes(len(expected))) == expected


def test_a_stream_takes_a_new_nonce_at_each_call_and_counts_its_blocks_from_zero() -> None:
    stream = ChaCha20Stream(KEY, b"nois")
    for call in range(3):
        expected = keystream(KEY.to_bytes(32, "little"), b"nois" + call.to_bytes(8, "little"), 0)
        assert stream.take(100) == expected.update(bytes(100))


def test_uniform_variates_are_the_first_53_bits_of_each_word() -> None:
    taken = ChaCha20Stream(KEY, b"samp").take(800)
    words = [int.from_bytes(taken[start : start + 8], "little") for start in range(0, 800, 8)]
    assert ChaCha20Stream(KEY, b"samp").uniform(100).tolist() == [(word >> 11) / 2**53 for word in words]
    uniform = ChaCha20Stream(KEY, b"samp").uniform(200_000)
    assert 0 <= uniform.min() < 1e-3
    assert 1 - 1e-3 < uniform.max() < 1
    assert stats.kstest(uniform, "uniform").pvalue > ALARM


def test_variates_are_those_of_box_and_muller() -> None:
    """Written out one by one from the same uniform variates: u for the radius, v for the angle."""
    u, v = ChaCha20Stream(KEY, b"nois").uniform(8).reshape(2, 4)
    expected = [(-2 * np.log(1 - u[k])) ** 0.5 * turn(2 * np.pi * v[k]) for turn in (np.cos, np.sin) for k in range(4)]
    np.testing.assert_allclose(secure().draw(7).numpy(), expected[:7], rtol=1e-12)


def test_secure_noise_is_standard_normal(full: bool, seed: int) -> None:
    size = 2_000_000 if full else 400_000
    noise = secure(seed).draw(size).numpy().astype(float)
    assert 2 * stats.norm.sf(abs(noise.mean()) * size**0.5) > ALARM
    assert 2 * stats.norm.sf(abs((noise**2).mean() - 1) * (size / 2) ** 0.5) > ALARM
    assert 2 * stats.norm.sf(abs((noise**3).mean()) * (size / 15) ** 0.5) > ALARM
    assert 2 * stats.norm.sf(abs((noise**4).mean() - 3) * (size / 96) ** 0.5) > ALARM
    assert stats.kstest(noise, "norm").pvalue > ALARM
    for beyond in (3.0, 4.0):
        count, share = int((abs(noise) > beyond).sum()), 2 * stats.norm.sf(beyond)
        assert stats.binomtest(count, size, share).pvalue > ALARM


def test_secure_noise_is_independent_within_a_draw_between_draws_and_across_chunks(seed: int) -> None:
    stream = secure(seed)
    draws = np.stack([stream.draw(50_000).numpy() for _ in range(6)]).astype(float)
    half = draws[0].size // 2
    pairs = [(draws[i], draws[j]) for i in range(6) for j in range(i)]
    pairs += [(draws[0][:-lag], draws[0][lag:]) for lag in (1, 2, 7, half)]  # half: a cosine and the sine of its pairs
    long = stream.draw(2 * CHUNK).numpy().astype(float)
    pairs.append((long[:CHUNK], long[CHUNK:]))
    for one, other in pairs:
        for power in (1, 2):  # squares too: of a shared radius the variates are uncorrelated and their squares are not
            a, b = ((x**power - (power - 1)) / (1 if power == 1 else 2**0.5) for x in (one, other))
            assert 2 * stats.norm.sf(abs((a * b).sum()) / len(a) ** 0.5) > ALARM / 100


def test_zero_uniform_variates_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (bytes, lambda size: b"\xff" * size):
        monkeypatch.setattr(ChaCha20Stream, "take", lambda self, size, words=words: words(size))
        noise = secure().draw(11)
        assert bool(torch.isfinite(noise).all())
        assert float(noise.abs().max()) < 8.6


def test_every_bit_of_the_long_key_and_the_purpose_count() -> None:
    first = secure().draw(1000)
    for bit in (0, 63, 127, 128, 200, 254):
        assert abs(float((first * GaussianNoise(KEY ^ 2**bit, CPU, secure=True).draw(1000)).mean())) < 0.3
    assert ChaCha20Stream(KEY, b"nois").take(64) != ChaCha20Stream(KEY, b"samp").take(64)
    assert (key_bits(True), key_bits(False)) == (256, 128)
    assert max(os_entropy(key_bits(True)) for _ in range(50)).bit_length() > 240


@pytest.mark.parametrize("size", [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 3])
def test_any_number_of_variates_can_be_drawn(size: int) -> None:
    noise = secure().draw(size)
    assert noise.shape == (size,)
    assert noise.dtype == torch.float64
    assert size < 2 or len(set(noise[:1000].tolist())) > 0.9 * min(size, 1000)


def test_secure_noise_is_what_the_engine_adds() -> None:
    engine = tm.make_engine(Toy(), tm.plan(C, SIGMA), noise_entropy=KEY, secure_noise=True)
    expected_P = noise_scale(SIGMA, C, 64) * secure().draw(64) / tm.schedule().expected_batch_size
    torch.testing.assert_close(engine._release(engine.clipped_sum([])[0]).double(), expected_P, rtol=1e-6, atol=0)
