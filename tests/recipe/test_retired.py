"""What dpllm no longer takes is answered in one line that says what to type instead."""

from __future__ import annotations

import pytest

from dpllm import cli
from dpllm.errors import ConfigError
from dpllm.recipe.config import make_config
from dpllm.recipe.retired import RETIRED

OPTIONS = [name for name in RETIRED if " --" in name]
ACTIONS = ["canaries", "curve", *(name for name in RETIRED if name.startswith("ledger ") and name not in OPTIONS)]
KEYS = [name for name in RETIRED if name not in {*OPTIONS, *ACTIONS}]


@pytest.mark.parametrize("name", KEYS)
def test_a_key_of_a_recipe(name: str) -> None:
    key, _, value = name.partition(": ")
    overrides = {"model.name_or_path": "gpt2", "data.train": "rows.jsonl", "privacy.epsilon": 3.0, "train.steps": 10}
    with pytest.raises(ConfigError) as caught:
        make_config({"output_dir": "runs/a"}, {**overrides, key: value or "something"}, "recipe.yaml")
    assert str(caught.value) == f"recipe.yaml: {key}: {RETIRED[name]}"


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, option = name.split()
    runs = ["runs/a", "runs/b"] if command == "compare" else []  # which its parser asks for first
    assert cli.main([command, *runs, option]) == 2
    assert capsys.readouterr().err == f"dpllm {command}: {option} is retired: {RETIRED[name]}.\n"


@pytest.mark.parametrize("name", ACTIONS)
def test_a_command_or_an_action(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(name.split()) == 2
    assert capsys.readouterr().err == f"dpllm {name} is retired: {RETIRED[name]}.\n"
