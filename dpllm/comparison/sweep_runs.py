"""The runs of a sweep: which epsilons, in which directories, and whether they are those of the sweep that lies there.

Comes in: a recipe, its overrides, the sweep's directory. Goes out: one ``Point`` for each run. Must not read data or a ledger.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError
from dpllm.files import digest, read_json
from dpllm.recipe.config import RunConfig, load_config
from dpllm.run.directory import RunDir, check_directory

STATE = "sweep.json"
"""In the sweep's directory: what was asked for, and the name of its tuning group; public values only."""
EXAMPLE = "--privacy.epsilon 1,3,8,inf"
# Beside the epsilons, which are compared by themselves: what a resumed run may change too.
MAY_CHANGE: dict[str, Any] = {
    "privacy": {"epsilon"},
    "train": {"physical_batch_size", "eval_every", "checkpoint_every", "process_timeout"},
    "card": True,
    "telemetry": True,
    "output_dir": True,
}


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        epsilon: The target; infinite for the run without differential privacy.
        config: Its recipe.
    """

    epsilon: float
    config: RunConfig

    @property
    def name(self) -> str:
        """Of its directory below the sweep's, and of its run in the ledger below the group's."""
        return f"eps-{self.epsilon:g}"

    @property
    def run(self) -> RunDir:
        """Its run directory."""
        return RunDir(Path(self.config.output_dir))


def parse_epsilons(value: Any) -> list[float]:
    """Reads the list of epsilons, from the smallest to the largest.

    Args:
        value: Such as "1,3,8,inf", or a list of numbers.

    Raises:
        ConfigError: It holds something other than positive numbers and inf, one value twice, or fewer than two.
    """
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    found = []
    for word in words:
        try:
            number = float("nan") if isinstance(word, bool) else float(word)
        except (TypeError, ValueError):
            number = float("nan")
        if not number > 0:
            raise ConfigError(
                f"--privacy.epsilon {value}: {str(word).strip()!r} is no epsilon, and every run needs one above 0, or inf for no "
                f"differential privacy. Type {EXAMPLE}"
            )
        found.append(number)
    if len({f"{number:g}" for number in found}) < len(found):
        raise ConfigError(
            f"--privacy.epsilon {value}: holds a value twice, and two runs would share a directory. Type each once."
        )
    if len(found) < 2:
        raise ConfigError(
            f"--privacy.epsilon {value}: one value leaves nothing to compare. Type two or more, as in {EXAMPLE}; or dpllm train."
        )
    return sorted(found)


def read_points(recipe: str | Path, overrides: Mapping[str, Any]) -> tuple[list[Point], Path]:
    """The runs of a sweep, and its directory. Nothing is read but the recipe.

    Raises:
        ConfigError: No list, a list for another key, or a recipe in which epsilon decides nothing.
    """
    rest = {key: value for key, value in overrides.items() if key != "privacy.epsilon"}
    if "privacy.epsilon" not in overrides:
        raise ConfigError(f"a sweep needs the epsilons to train at. Type {EXAMPLE}")
    epsilons = parse_epsilons(overrides["privacy.epsilon"])
    try:
        config = load_config(recipe, rest)
    except ConfigError as error:
        lists = [
            key for key, value in rest.items() if isinstance(value, str) and "," in value and f"{key}:" in str(error)
        ]
        if not lists:
            raise
        raise ConfigError(
            f"--{lists[0]} {rest[lists[0]]}: a sweep trains at several values of privacy.epsilon and of nothing else, since each "
            f"run is paid for. Give {lists[0]} one value; dpllm plan --sweep {lists[0]}=... compares several and spends nothing."
        ) from None
    if not config.privacy.enabled:
        raise ConfigError(
            f"{recipe}: privacy.enabled is false, and no run of a sweep would have differential privacy. Set it to true, and put "
            f"inf into the list for the run without: {EXAMPLE}"
        )
    if config.privacy.noise_multiplier is not None:
        raise ConfigError(
            f"{recipe}: privacy.noise_multiplier is set, so that every run would have the same epsilon. Set it to null."
        )
    root = Path(config.output_dir)
    return [Point(epsilon, _at(config, epsilon, root)) for epsilon in epsilons], root


def _at(config: RunConfig, epsilon: float, root: Path) -> RunConfig:
    privacy: dict[str, Any] = {"epsilon": epsilon} if math.isfinite(epsilon) else {"enabled": False}
    return config.model_copy(
        update={"privacy": config.privacy.model_copy(update=privacy), "output_dir": str(root / f"eps-{epsilon:g}")}
    )


def state_of(points: Sequence[Point], root: Path, resume: bool) -> dict[str, Any]:
    """What the sweep in this directory is; a new one gets its name here.

    Raises:
        ConfigError: Another sweep, a run or nothing to resume lies there.
    """
    path = root / STATE
    first = points[0].config.model_dump(mode="json", exclude=MAY_CHANGE)
    ours = {"recipe": digest(first), "epsilons": [f"{point.epsilon:g}" for point in points]}
    if not resume:
        if path.exists():
            raise ConfigError(
                f"{root}: already holds a sweep. Type --resume to go on with it, or another --output_dir."
            )
        if (root / "config.yaml").exists():
            raise ConfigError(
                f"{root}: holds a run, and a sweep has one directory for each. Type another --output_dir."
            )
        for point in points:
            check_directory(point.config, point.run, resume=False, overwrite=False)
        return {**ours, "group": f"{root.name}-{secrets.token_hex(4)}", "pinned": {}}
    if not path.exists():
        raise ConfigError(f"{root}: holds no sweep to resume (no {STATE}). Leave --resume out.")
    state = read_json(path)
    pinned, terms = state.get("pinned"), {"noise_multiplier", "delta"}
    whole = isinstance(pinned, dict) and all(isinstance(one, dict) and one.keys() == terms for one in pinned.values())
    if not (whole and isinstance(state.get("group"), str)):
        raise ConfigError(
            f"{path}: does not say what a sweep writes there; the file is damaged. Restore it, or type another --output_dir for "
            "a new sweep."
        )
    for key, what in (("epsilons", "list of epsilons"), ("recipe", "recipe")):
        if state.get(key) != ours[key]:
            raise ConfigError(
                f"{root}: its sweep has another {what}, and its runs were fixed together before the first. Type the same again, "
                "or another --output_dir for a new sweep."
            )
    return state
