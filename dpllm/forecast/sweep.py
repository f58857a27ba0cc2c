"""A sweep: the same recipe planned at every combination of some keys' values.

Comes in: a recipe's path, overrides, and what to sweep. Goes out: one ``Point`` for each combination. Must not see data beyond
the number of its units, and must not import torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dpllm.errors import ConfigError
from dpllm.forecast.advice import own_choice
from dpllm.recipe.config import load_config
from dpllm.recipe.section import read_yaml
from dpllm.run.promise import Subject, decide, read_subject

MAX_POINTS = 200


@dataclass(frozen=True)
class Point:
    """One combination: values of the swept keys, what it promises, and of several refusals the first.

    A figure is None where a refusal left nothing to compute.
    """

    values: tuple[Any, ...]
    epsilon: float | None
    noise_multiplier: float | None
    sampling_rate: float | None
    num_steps: int | None
    batch_size: int
    noise_per_signal: float | None
    refusal: str | None


def parse_sweeps(arguments: Sequence[str]) -> dict[str, list[Any]]:
    """Turns ``KEY=v1,v2`` into {KEY: [v1, v2]}; values are read as YAML.

    Raises:
        ConfigError: An argument is not of that form, names a key twice, or the combinations are too many.
    """
    sweeps: dict[str, list[Any]] = {}
    for argument in arguments:
        key, separator, text = argument.partition("=")
        key = key.removeprefix("--").replace("-", "_")
        try:
            values = read_yaml(f"[{text}]") if text.strip() else []
        except yaml.YAMLError:
            values = []
        if not (separator and key and values) or (None in values and "null" not in text):
            raise ConfigError(
                f"--sweep {argument}: names no values. Type --sweep KEY=V1,V2, as in --sweep privacy.epsilon=1,2,4,8"
            )
        if key in sweeps:
            raise ConfigError(f"--sweep {key} is given twice, so one list would be lost. Give all its values at once.")
        sweeps[key] = values
    points = math.prod(map(len, sweeps.values()))
    if points > MAX_POINTS:
        raise ConfigError(
            f"--sweep asks for {points} combinations, each of which takes about a second. Ask for {MAX_POINTS} or fewer."
        )
    return sweeps


def sweep(recipe: str | Path, overrides: Mapping[str, Any], sweeps: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Plans every combination as ``dpllm plan`` with these overrides would, the last key changing fastest.

    Raises:
        ConfigError: A key is unknown, or one of its values is impossible.
        DataError: The data cannot be read.
    """
    combinations = list(itertools.product(*sweeps.values()))
    # Every recipe is read before the first is planned: a wrong key is said at once.
    configs = [load_config(recipe, {**overrides, **dict(zip(sweeps, values, strict=True))}) for values in combinations]
    if not configs[0].privacy.enabled:
        raise ConfigError(
            "--sweep compares guarantees, and privacy.enabled: false gives none. Set privacy.enabled: true, or leave --sweep "
            "out."
        )
    subjects: dict[str, Subject] = {}
    points = []
    for values, config in zip(combinations, configs, strict=True):
        key = repr((config.data, config.privacy.dataset, config.privacy.derived_from, config.privacy.ledger))
        if key not in subjects:
            subjects[key] = read_subject(config)
        seen = decide(config, subject=subjects[key])
        schedule, plan = seen.schedule, seen.plan
        points.append(
            Point(
                values=values,
                epsilon=plan.epsilon if plan else None,
                noise_multiplier=plan.noise_multiplier if plan else None,
                sampling_rate=schedule.sampling_rate if schedule else None,
                num_steps=schedule.num_steps if schedule else None,
                batch_size=config.train.batch_size,
                noise_per_signal=own_choice(plan).noise_per_signal if plan else None,
                refusal=str(seen.refusals[0]) if seen.refusals else None,
            )
        )
    return points
