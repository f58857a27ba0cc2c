"""What sixty recipes promise, frozen before the house was rebuilt.

A change of the house must leave every Plan as it is. One that is meant: delete the file, run this test under --full twice, read
the difference, and write it in the CHANGELOG. Processors round differently, in the last digits only.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dpllm.recipe.config import RunConfig
from dpllm.run.promise import plan_of
from dpllm.verification.values import differences

FROZEN = Path(__file__).parents[1] / "golden" / "frozen-plans.json"
TOLERANCE = 1e-5
UNITS = (700, 42_061)
Sections = dict[str, dict[str, Any]]


def grid() -> Iterator[tuple[Sections, int]]:
    """Sixty recipes, by their sections ``data``, ``privacy``, ``train`` and ``audit``, and the number of units."""
    steps = {"batch_size": 64, "steps": 40}
    for units, epsilon, clipping in product(UNITS, (1.0, 3.0, 8.0), ("flat", "automatic")):
        yield {"privacy": {"epsilon": epsilon, "clipping": clipping}, "train": steps}, units
    for units, epsilon, epochs, batch in product(UNITS, (1.0, 8.0), (1.0, 3.0), (32, 256)):
        yield {"privacy": {"epsilon": epsilon}, "train": {"batch_size": batch, "epochs": epochs}}, units
    for bands, schedule, warmup in product(("auto", 4), ("linear", "constant", "cosine"), (0.05, 0.3)):
        banded = {"epsilon": 4.0, "noise": "banded", "bands": bands}
        yield {"privacy": banded, "train": {**steps, "lr_scheduler": schedule, "warmup": warmup}}, 1_200
    for size, delta in product((None, 800), ("auto", 1e-6)):
        yield {"data": {"public_size": size}, "privacy": {"epsilon": 2.0, "delta": delta}, "train": steps}, 700
    for sampling, rows in product(("unit", "example"), (1, 2, 4)):
        owned = {"unit": "patient", "sampling": sampling, "max_examples_per_unit": rows}
        yield {"data": owned, "privacy": {"epsilon": 6.0}, "train": {"batch_size": 16, "steps": 20}}, 5_000
    for sigma, norm in product((0.8, 1.5), (0.1, 10.0)):
        noisy = {"epsilon": 50.0, "noise_multiplier": sigma, "max_grad_norm": norm, "delta": 1e-6}
        yield {"privacy": noisy, "train": steps}, 3_000
    for groups, gradient in product(({1: 30}, {1: 10, 4: 10}), (0, 5)):
        canaries = {"groups": groups, "kind": "digits"}
        yield {"audit": {"canaries": canaries, "gradient_canaries": gradient}, "train": steps}, 2_000
    for objective in ("dpo", "ipo"):
        yield {"privacy": {"epsilon": 5.0}, "train": {**steps, "objective": objective}}, 1_500


def promised(sections: Sections, units: int) -> dict[str, Any]:
    """The values of a Plan that decide what is drawn, how much noise there is, and what is stated."""
    preferences = {"format": "preference"} if "objective" in sections.get("train", {}) else {}
    data = {"train": "rows.jsonl", **preferences, **sections.get("data", {})}
    fixed = {"model": {"name_or_path": "builtin:tiny"}, "output_dir": "nowhere"}
    plan = plan_of(RunConfig.model_validate({**fixed, **sections, "data": data}), units)
    drawn = {name: getattr(plan.schedule, name) for name in ("dataset_size", "sampling_rate", "num_steps")}
    noise = ("noise_multiplier", "max_grad_norm", "clipping")
    stated = ("unit", "sampling", "neighbouring_relation", "delta", "epsilon")
    told = {name: getattr(plan, name) for name in (*noise, *stated)}
    return {**drawn, **told, "coefficients": list(plan.coefficients), "event": plan.event.to_json()}


def test_plans_stay(full: bool) -> None:
    recipes = list(grid())
    if not FROZEN.exists():
        FROZEN.write_text("[\n" + ",\n".join(json.dumps(promised(*recipe)) for recipe in recipes) + "\n]\n", "utf-8")
        pytest.fail(f"{FROZEN} was missing; it was written anew.")
    frozen = json.loads(FROZEN.read_text("utf-8"))
    assert len(frozen) == len(recipes) == 60
    for recipe, before in list(zip(recipes, frozen, strict=True))[:: 1 if full else 20]:
        assert not list(differences(promised(*recipe), before, tolerance=TOLERANCE)), recipe
