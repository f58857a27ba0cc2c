"""The noise is there, everywhere, of the promised size, fresh, and nobody's seed brings it back."""

from __future__ import annotations

import random
from decimal import Decimal, localcontext
from typing import Any

import checks
import numpy as np
import pytest
import tiny_models as tm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cases import BF16
from checks import ALARM, SIGMA, C
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from mutants import around
from scipy import stats
from tiny_models import CPU, Toy
from torch import Tensor

from dpllm.privacy.noise import CHUNK, ENDS, GaussianNoise, SecretStream, os_entropy


def steps(net: Any, some: list, seed: int, count: int, **arguments: Any) -> Tensor:
    """What so many steps release beyond the clipped sum, on one logical batch, over sigma C."""
    engine = tm.make_engine(net, tm.plan(C, SIGMA), noise_entropy=2**90 + seed, **arguments)
    return checks.released(engine, tm.batches(some, engine), count)


WAYS: dict[str, dict[str, Any]] = {
    "one pass": {},
    "several passes, bf16": {"tokens": 16, "autocast": BF16},
    "each example by itself": {"tokens": tm.ALONE},
    "gradients formed twice": {"mode": "twice"},
    "an empty logical batch": {"some": []},
}


@pytest.mark.parametrize("way", WAYS)
def test_noise_is_the_same_however_the_sum_is_formed(way: str, full: bool, seed: int) -> None:
    net = tm.build("llama", {**tm.LORA, "target_modules": ["q_proj"]})
    values = {"some": tm.units([(9, 4), (7,), (5,)]), **WAYS[way]}
    checks.standard_normal(steps(net, seed=seed + 7, count=4000 if full else 300, **values))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_noise_is_the_same_on_a_model_that_accelerate_prepared(precision: str, full: bool, seed: int) -> None:
    """accelerate's own autocast, and its conversion of outputs to float32, around the forward pass."""
    net = Accelerator(cpu=True, mixed_precision=precision).prepare_model(Toy(bias=True))
    AcceleratorState._reset_state(reset_partial_state=True)
    some = tm.units([(9, 4), (7,), (5,)])
    checks.standard_normal(steps(net, some, seed + 8, 4000 if full else 300))
    engine, low = tm.make_engine(net, tm.plan(C)), precision == "bf16"
    checks.neighbours(engine, some)
    assert engine.self_check(tm.VOCABULARY, low_precision=low).error <= (5e-2 if low else 1e-5)


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
    first = GaussianNoise(5, CPU).draw(8)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(GaussianNoise(5, CPU).draw(8), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_entropy_is_256_bits_of_the_operating_system() -> None:
    keys = [os_entropy() for _ in range(200)]
    assert len(set(keys)) == 200
    assert max(keys).bit_length() > 245


@pytest.mark.parametrize("bit", [32, 63, 128, 255])
def test_every_bit_of_the_key_counts(bit: int) -> None:
    """torch's own CPU generator keeps 32 bits of its seed: its noise could be searched for."""
    one, other = GaussianNoise(5, CPU).draw(1000), GaussianNoise(5 + 2**bit, CPU).draw(1000)
    assert abs(float((one * other).mean())) < 0.3
    assert not torch.equal(one, other)


def test_torchs_generator_still_keeps_only_32_bits() -> None:
    """Why noise.py has a stream of its own. If this fails, torch has been fixed and docs/decisions.md is stale."""
    draws = [torch.randn(10, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + 2**32)]
    assert torch.equal(*draws)


def test_without_a_plan_there_is_no_noise() -> None:
    net = Toy()
    engine = tm.engine_of(net, torch.optim.SGD([net.layer.weight], lr=1.0), tm.schedule(), None, noise_entropy=1)
    assert torch.equal(engine._release(engine.clipped_sum([])[0]), torch.zeros(64))
    assert engine.self_check(tm.VOCABULARY).error == 0.0


# --- the stream ------------------------------------------------------------------------------------------------------

KEY = 2**255 + 2**77 + 13


def stream_of(seed: int = 0, purpose: bytes = b"nois") -> SecretStream:
    return SecretStream(KEY + seed, purpose)


def draw(stream: SecretStream, size: int) -> np.ndarray:
    noise = np.empty(size)
    stream.normal(noise)
    return noise


def test_the_stream_is_aes_256_of_a_counter() -> None:
    """Block by block: NIST SP 800-38A, section 6.5; and its first vector of AES-256, section F.1.5, which is of one block."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    block = bytes.fromhex("6bc1bee22e409f96e93d7e117393172a")
    assert Cipher(AES(key), ECB()).encryptor().update(block).hex() == "f3eed1bdb5d2a03c064b5a7e3db181f8"
    counters = b"".join(b"nois" + number.to_bytes(12, "big") for number in range(50))
    expected = Cipher(AES(KEY.to_bytes(32, "little")), ECB()).encryptor().update(counters)
    stream = stream_of()
    assert b"".join(stream.words(size).tobytes() for size in (2, 60, 38)) == expected  # no block twice
    assert stream_of(purpose=b"samp").words(100).tobytes() != expected


def test_noise_goes_on_where_the_stream_stands(seed: int) -> None:
    """Variates of one call and of several are those of the same words, each used once."""
    size = 2 * CHUNK + 6
    whole, stream = draw(stream_of(seed), size), stream_of(seed)
    np.testing.assert_array_equal(np.concatenate([draw(stream, CHUNK), draw(stream, CHUNK + 6)]), whole)
    assert len(np.unique(whole)) > size - 5


def test_uniform_variates_are_the_first_53_bits_of_each_word() -> None:
    words = stream_of().words(100).view(np.uint64).tolist()
    assert stream_of().uniform(100).tolist() == [(word >> 11) / 2**53 for word in words]
    uniform = stream_of().uniform(200_000)
    assert 0 <= uniform.min() < 1e-3
    assert 1 - 1e-3 < uniform.max() < 1
    assert stats.kstest(uniform, "uniform").pvalue > ALARM


def test_variates_are_those_of_box_and_muller() -> None:
    """Written out one by one: four words for the radii, four for the angles."""
    words = stream_of().words(8).tolist()
    expected = [
        (-2 * np.log(0.5 + words[k] / 2**64)) ** 0.5 * turn(2 * np.pi * words[4 + k] / 2**64)
        for turn in (np.cos, np.sin)
        for k in range(4)
    ]
    np.testing.assert_allclose(draw(stream_of(), 8), expected, rtol=1e-9)
    np.testing.assert_array_equal(draw(stream_of(), 7), draw(stream_of(), 8)[:7])


@pytest.mark.parametrize("distance", [0, 1, 12345, 2**30, 2**52 - 1, 2**52])
@pytest.mark.parametrize("low", [True, False], ids=["far out", "near the centre"])
def test_radii_are_dense_to_the_ends(distance: int, low: bool) -> None:
    """Where u is near 0 or 1, 64 more bits decide: log(u) is that of 128 bits, computed with integers and decimals."""
    word = -(2**63) + distance if low else 2**63 - 1 - distance
    more = int(stream_of().words(1).view(np.uint64)[0])
    result = stream_of()._log_near_an_end(np.array([word], dtype=np.int64))
    with localcontext() as exact:
        exact.prec = 60
        v = (Decimal(distance) + (Decimal(more) + Decimal("0.5")) / 2**64) / 2**64
        expected = float(v.ln() if low else (1 - v).ln())
    np.testing.assert_allclose(result, expected, rtol=1e-14)


def test_the_ends_are_taken_from_more_bits(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As often as u lies there: a share of 2^-11."""
    seen: list[int] = []
    around(SecretStream, "_log_near_an_end", lambda log, self, u: seen.append(len(u)) or log(self, u))(monkeypatch)
    draw(stream_of(seed), 40 * CHUNK)
    assert stats.binomtest(sum(seen), 20 * CHUNK, 2 * ENDS).pvalue > ALARM


def test_the_extremes_of_the_stream_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        def __init__(self, byte: bytes) -> None:
            self.byte = byte

        def update(self, data: bytes) -> bytes:
            return self.byte * len(data)

        def update_into(self, data: bytes, out: np.ndarray) -> None:
            out[:] = self.byte[0]

    for byte in (b"\0", b"\xff", b"\x80", b"\x7f"):
        stream = stream_of()
        stream._cipher = Constant(byte)
        noise = draw(stream, 12)
        assert np.isfinite(noise).all()
        assert abs(noise).max() < 13.5


def test_noise_of_the_stream_is_standard_normal(full: bool, seed: int) -> None:
    size = 2_000_000 if full else 400_000
    noise = draw(stream_of(seed), size)
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert 2 * stats.norm.sf(abs((noise**power).mean() - mean) * (size / variance) ** 0.5) > ALARM
    assert stats.kstest(noise, "norm").pvalue > ALARM
    for beyond in (3.0, 4.0):
        count, share = int((abs(noise) > beyond).sum()), 2 * stats.norm.sf(beyond)
        assert stats.binomtest(count, size, share).pvalue > ALARM


def test_noise_of_the_stream_is_independent_within_a_draw_between_draws_and_across_chunks(seed: int) -> None:
    stream = stream_of(seed)
    draws = np.stack([draw(stream, 50_000) for _ in range(6)])
    half = draws[0].size // 2
    pairs = [(draws[i], draws[j]) for i in range(6) for j in range(i)]
    pairs += [(draws[0][:-lag], draws[0][lag:]) for lag in (1, 2, 7, half)]  # half: a cosine and the sine of its pairs
    long = draw(stream, 2 * CHUNK)
    pairs.append((long[:CHUNK], long[CHUNK:]))
    for one, other in pairs:
        for power in (1, 2):  # squares too: of a shared radius the variates are uncorrelated and their squares are not
            a, b = ((x**power - (power - 1)) / (1 if power == 1 else 2**0.5) for x in (one, other))
            assert 2 * stats.norm.sf(abs((a * b).sum()) / len(a) ** 0.5) > ALARM / 100


@pytest.mark.parametrize("size", [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 3])
def test_any_number_of_variates_can_be_drawn(size: int) -> None:
    noise = GaussianNoise(KEY, CPU).draw(size)
    assert noise.shape == (size,)
    assert noise.dtype == torch.float64
    assert size < 2 or len(set(noise[:1000].tolist())) > 0.9 * min(size, 1000)
