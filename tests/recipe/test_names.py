"""Names and digests of recipes: old ones keep theirs, and no source tells where it lies."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpllm.recipe import names
from dpllm.recipe.config import RunConfig, dump_config, load_config

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
