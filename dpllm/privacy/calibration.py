"""The noise that meets a target: calibration of the noise multiplier, and its cache.

Comes in: a target epsilon, a sampling rate, a number of steps. Goes out: a noise multiplier. Knows nothing of recipes,
and imports an accountant only when it computes.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from dpllm.errors import ConfigError
from dpllm.files import write_whole
from dpllm.privacy.events import dp_sgd_event, normal_form, number
from dpllm.privacy.privacy_loss import FINE_INTERVAL, Relation, privacy_loss, versions
from dpllm.privacy.renyi import BELOW_ONE, MAX_NOISE_MULTIPLIER, MIN_NOISE_MULTIPLIER

FORMAT = 2  # of what is calibrated and how: a change of either makes older answers unread
PROGRESS_SECONDS = 5.0


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    num_steps: int,
    relation: Relation,
    cache_dir: Path | None = None,
    group_size: int = 1,
) -> float:
    """The smallest noise multiplier, in steps of 1e-4, that meets `target_epsilon`.

    Args:
        target_epsilon: > 0.
        delta: in (0, 1).
        sampling_rate: probability q that a sampled thing joins a logical batch, 0 < q <= 1.
        num_steps: logical batches, >= 1.
        relation: the neighbouring relation.
        cache_dir: keeps answers, one JSON file each; a damaged one is computed again.
        group_size: how many sampled things are protected together, 1 to 1024.

    Raises:
        ConfigError: a value is out of range, or no noise multiplier from 0.05 to 1e4 meets the target.

    Guarantee:
        For the sigma returned, `epsilon(dp_sgd_event(q, sigma, T, group_size), delta, relation)` is at most the target;
        for sigma - 1e-3 it is not. A cached answer is as good as its directory.
    """
    dp_sgd_event(sampling_rate, 1.0, num_steps, group_size)
    number("num_steps", num_steps, 0.0)
    key = {
        "format": FORMAT,
        "target_epsilon": number("privacy.epsilon", target_epsilon, 0.0),
        "delta": number("privacy.delta", delta, 0.0, BELOW_ONE),
        "sampling_rate": float(sampling_rate),
        "num_steps": num_steps,
        "relation": relation,
        "group_size": group_size,
        "accountant": {"kind": "pld", "interval": FINE_INTERVAL, **versions()},
    }
    if cache_dir is None:
        return _calibrate(target_epsilon, delta, sampling_rate, num_steps, relation, group_size)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_dir / f"noise-multiplier-{digest[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError, ConfigError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] == key:
            return number("noise_multiplier", stored["noise_multiplier"], 0.0)
    sigma = _calibrate(target_epsilon, delta, sampling_rate, num_steps, relation, group_size)
    with suppress(OSError):  # a cache that cannot be written costs time, and nothing else
        write_whole(path, json.dumps({"key": key, "noise_multiplier": sigma}, sort_keys=True), mode=0o600)
    return sigma


def _calibrate(target: float, delta: float, q: float, num_steps: int, relation: Relation, group_size: int) -> float:
    """Secant steps in log sigma on a coarse PLD, then in whole numbers of 1e-4 on the fine one, both within brackets."""
    due, tried = time.monotonic() + PROGRESS_SECONDS, 0

    def refuse(mend: str) -> NoReturn:
        raise ConfigError(
            f"epsilon {target:g} at delta {delta:g} is not reachable with sampling rate {q:g} "
            f"and {num_steps} steps by a noise multiplier of {MIN_NOISE_MULTIPLIER:g} to "
            f"{MAX_NOISE_MULTIPLIER:g}. {mend}"
        )

    def cost(sigma: float, interval: float) -> float:
        nonlocal due, tried
        if sigma < MIN_NOISE_MULTIPLIER:
            refuse(too_weak)
        if time.monotonic() >= due:
            print(
                f"calibrating the noise: epsilon {target:g} at delta {delta:g}, {num_steps} steps: {tried} noise multipliers "
                f"tried, now {sigma:g}",
                file=sys.stderr,
                flush=True,
            )
            due = time.monotonic() + PROGRESS_SECONDS
        tried += 1
        terms = normal_form(dp_sgd_event(q, sigma, num_steps, group_size))
        try:
            return privacy_loss(terms, relation, interval).epsilon_at(delta)
        except OverflowError:
            return math.inf

    # Both ends of what is reachable come first. Without any noise, delta is at most the probability of being drawn at all.
    too_weak = "So weak a promise protects nobody: lower privacy.epsilon or privacy.delta."
    any_of_it = -math.expm1(group_size * math.log1p(-q)) if q < 1 else 1.0
    if q < 1 and -math.expm1(num_steps * group_size * math.log1p(-q)) <= delta:
        refuse(too_weak)
    if cost(MAX_NOISE_MULTIPLIER, FINE_INTERVAL) > target:
        refuse("Raise privacy.epsilon or privacy.delta, or train fewer steps.")

    # Start from the central limit theorem: mu of the Gaussian mechanism, then its sigma. A group of k is taken for one
    # thing at distance k q / (1 - (1 - q)^k) that is sampled with the probability that any of it is.
    tail = 2 * math.log(1 / delta)
    mu = math.sqrt(tail + 2 * target) - math.sqrt(tail)
    sigma = 1 / math.sqrt(math.log1p(mu**2 / (any_of_it**2 * num_steps)))
    sigma = min(sigma * group_size * q / any_of_it, MAX_NOISE_MULTIPLIER / 2)
    # The standard deviation of one step's privacy loss, about: a coarse bucket is at most a tenth of it.
    spread = q * math.sqrt(math.expm1(min(sigma**-2, 50.0)))
    coarse = min(max(spread / 10, FINE_INTERVAL), 1e-3)

    # Epsilon is 0 beyond some sigma where delta is large, so that a secant alone would swing from there to here and back.
    slope, known = -1.5, (math.nan, math.nan)  # slope: of log epsilon over log sigma
    few, many = 0.0, MAX_NOISE_MULTIPLIER
    for _ in range(60):
        found = cost(sigma, coarse)
        error = math.log(found / target) if found > 0 else -math.inf
        few, many = (sigma, many) if error > 0 else (few, sigma)
        if math.isfinite(error):
            rise = (error - known[1]) / math.log(sigma / known[0])
            slope = min(max(rise, -1000.0), -0.3) if math.isfinite(rise) else slope
            known = sigma, error
        guess = sigma * math.exp(min(max(-error / slope, -0.7), 0.7))
        if few and not few < guess < many:
            guess = math.sqrt(few * many)
        sigma, last = guess, sigma
        if abs(math.log(sigma / last)) < 1e-5:
            break

    # Whole numbers of 1e-4 from here: `grid` is tried, `low` exceeds the target (or is below the range), `high` meets it.
    per_grid, start = -slope * target / sigma * 1e-4, tried
    least, high = round(MIN_NOISE_MULTIPLIER * 1e4), round(MAX_NOISE_MULTIPLIER * 1e4)
    grid, low = math.ceil(sigma * 1e4), least - 1
    while high - low > 1:
        spare = target - cost(grid / 1e4, FINE_INTERVAL)
        if 0 <= spare < per_grid:  # one less exceeds the target: epsilon is convex in sigma
            return grid / 1e4
        low, high = (low, grid) if spare >= 0 else (grid, high)
        guess = grid - math.floor(max(spare / per_grid, -1e6)) if tried - start < 5 else (low + high) // 2
        grid = min(max(guess, low + 1), high - 1)
    if high == least:
        refuse(too_weak)
    return high / 1e4
