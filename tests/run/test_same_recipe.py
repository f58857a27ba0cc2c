"""A resumed run is the run that was interrupted."""

from pathlib import Path
from typing import Any

import cards
import pytest

from dpllm.errors import Refused
from dpllm.files import write_json
from dpllm.recipe.config import dump_config, load_config
from dpllm.run.checkpoint import same_recipe
from dpllm.run.directory import RunDir, manifest_of

RECIPE = Path(__file__).parents[2] / "recipes" / "smoke" / "clinic.yaml"


@pytest.fixture
def interrupted(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.make()
    seeded = load_config(RECIPE, {"output_dir": str(run.root), "privacy.insecure_seed": 3, "data.format": "text"})
    run.config.write_text(dump_config(seeded), encoding="utf-8")
    begun = {**cards.record(artifacts={}), "manifest": manifest_of(run, seeded, ended=False)}
    write_json(run.run, begun)
    return run


def resumed(run: RunDir, **changes: Any) -> None:
    overrides = {"output_dir": str(run.root), "privacy.insecure_seed": 3}
    same_recipe(load_config(RECIPE, overrides | {key.replace("__", "."): value for key, value in changes.items()}), run)


@pytest.mark.parametrize("key", ["train__tokens_per_pass", "train__eval_every", "train__checkpoint_every"])
def test_the_same_recipe_resumes_and_speed_may_change(interrupted: RunDir, key: str) -> None:
    resumed(interrupted)
    resumed(interrupted, **{key: 7})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("privacy__insecure_seed", None),  # the record would forget that the noise can be regenerated
        ("privacy__epsilon", 3.0),
        ("privacy__max_grad_norm", 0.25),
        ("privacy__dataset", "another"),  # the steps would be charged to one dataset and reported of another
        ("privacy__ledger", "elsewhere.sqlite"),
        ("data__train", "other.jsonl"),
        ("data__revision", "main"),
        ("model__name_or_path", "gpt2"),
        ("model__adapter", "start/export"),
        ("adapter__r", 4),
        ("adapter__target_modules", ["q_proj"]),
        ("adapter__lora_a", "frozen"),
        ("train__learning_rate", 0.5),
        ("train__batch_size", 7),
        ("audit__canaries__digits", 5),
    ],
)
def test_what_promise_or_record_depends_on_may_not(interrupted: RunDir, key: str, value: Any) -> None:
    with pytest.raises(Refused, match=key.replace("__", ".")):
        resumed(interrupted, **{key: value})


def test_an_edited_recipe_does_not_resume_with_itself(interrupted: RunDir) -> None:
    """The record knows what began; a public declaration that was added would publish exact figures of its rows."""
    text = interrupted.config.read_text(encoding="utf-8")
    edited = text.replace("unit: example", "unit: patient_id")
    assert edited != text
    for more in (text, text.replace("eval_every: null", "eval_every: 2")):
        interrupted.config.write_text(more, encoding="utf-8")
        same_recipe(load_config(interrupted.config), interrupted)
    interrupted.config.write_text(edited.replace("max_examples_per_unit: null", "max_examples_per_unit: 2"), "utf-8")
    with pytest.raises(Refused, match="changed after the run"):
        same_recipe(load_config(interrupted.config), interrupted)
