"""Names, digests and Plans of recipes: old ones keep theirs, and no source tells where it lies."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpllm.recipe import names
from dpllm.recipe.config import RunConfig, dump_config, load_config
from dpllm.run.promise import plan_of
from dpllm.verification.values import differences

RUNS = [path.parent for path in sorted(Path(__file__).parents[2].glob("model_cards/*/run.json"))]
BEFORE = """
model: {name_or_path: some/model}
data: {train: /somewhere/rows.jsonl, eval: org/held-out, unit: who, max_examples_per_unit: 4}
train: {steps: 3, batch_size: 5}
output_dir: runs/old
"""


def config(**data: Any) -> RunConfig:
    value = yaml.safe_load(BEFORE)
    return RunConfig.model_validate({**value, "data": {**value["data"], **data}})


def test_a_digest_does_not_depend_on_whether_defaults_are_written(tmp_path: Path) -> None:
    frozen, lora = (
        RunConfig.model_validate({**yaml.safe_load(BEFORE), "adapter": {"method": method}})
        for method in ("frozen", "lora")
    )
    for recipe in (config(), config(csv={"delimiter": ";"}), frozen):
        (tmp_path / "whole.yaml").write_text(dump_config(recipe))
        complete = load_config(tmp_path / "whole.yaml")
        for digest in (names.digest, names.of_training):
            assert digest(complete) == digest(recipe)
    assert names.digest(frozen) != names.digest(lora) == names.digest(config())


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_the_recipes_of_published_runs_have_the_digests_that_stand_in_their_files(run: Path) -> None:
    recipe, stated = load_config(run / "config.yaml"), json.loads((run / "run.json").read_text())
    assert names.of_training(recipe) == stated["manifest"]["config.yaml"]


def test_every_setting_changes_the_digest() -> None:
    value = {**yaml.safe_load(BEFORE), "adapter": {"method": "lora"}}
    value["train"]["optimizer"] = "sgd"
    changes = {"model": {"adapter": "start/export"}, "adapter": {"lora_a": "frozen"}, "train": {"momentum": 0.9}}
    values = [value, *({**value, section: {**value[section], **keys}} for section, keys in changes.items())]
    sources = ["a.jsonl", ["a.jsonl"], ["a.jsonl", "b.jsonl"], ["b.jsonl", "a.jsonl"], "*.jsonl"]
    recipes = [*map(RunConfig.model_validate, values), *(config(train=source) for source in sources)]
    recipes += [config(csv={"delimiter": ";"}), *(config(control=item) for item in (["a"], ["a", "b"], ["b", "a"]))]
    pairs = {**value, "data": {**value["data"], "format": "preference"}}
    for keys in ({"objective": "dpo"}, {"objective": "ipo"}, {"objective": "dpo", "beta": 0.2}):
        recipes.append(RunConfig.model_validate({**pairs, "train": {**value["train"], **keys}}))
    passes = RunConfig.model_validate({**value, "train": {**value["train"], "tokens_per_pass": 512}})
    assert names.of_training(passes) == names.of_training(recipes[0])
    assert len({names.digest(recipe) for recipe in [*recipes, passes]}) == len(recipes) + 1
    assert names.digest(config(control=[], template=None)) == names.digest(config())
    assert names.digest(config(template="{prompt}{completion}")) != names.digest(config())


def test_several_sources_are_told_without_where_they_lie(tmp_path: Path) -> None:
    private = config(train=["/home/alice/a.jsonl", "/home/alice/*.csv", "org/data", "builtin:clinic"])
    assert names.publishable(private).data.train == ["a.jsonl", "*.csv", "org/data", "builtin:clinic"]
    assert names.public_name(private.data.train) == "a.jsonl, *.csv, org/data, builtin:clinic"
    assert not private.data.public  # not all of it is embedded
    assert config(train=["builtin:clinic"]).data.public
    assert names.digest(private) == names.digest(config(train=["a.jsonl", "*.csv", "data", "builtin:clinic"]))
    (tmp_path / "again.yaml").write_text(dump_config(private))
    assert load_config(tmp_path / "again.yaml") == private


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
    planned = {name: getattr(plan, name) for name in (*noise, *stated)}
    return {**drawn, **planned, "coefficients": list(plan.coefficients), "event": plan.event.to_json()}


def test_plans_stay(full: bool) -> None:
    """One that is meant to change: delete the file, run this under --full twice, and write the difference in the CHANGELOG."""
    recipes = list(grid())
    if not FROZEN.exists():
        FROZEN.write_text("[\n" + ",\n".join(json.dumps(promised(*recipe)) for recipe in recipes) + "\n]\n", "utf-8")
        pytest.fail(f"{FROZEN} was missing; it was written anew.")
    frozen = json.loads(FROZEN.read_text("utf-8"))
    assert len(frozen) == len(recipes) == 60
    for recipe, before in list(zip(recipes, frozen, strict=True))[:: 1 if full else 20]:
        assert not list(differences(promised(*recipe), before, tolerance=TOLERANCE)), recipe
