"""A run whose recipe has data.chat_template: training, the record and whoever gets the model use that template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers
import yaml
from running import done, dpllm_, make_place

from dpllm.errors import ConfigError, Refused
from dpllm.model.loading import load_tokenizer
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, ModelConfig, load_config
from dpllm.run.checkpoint import same_recipe
from dpllm.run.directory import RunDir
from dpllm.text.rendering import read_template

OTHER = tiny.CHAT.replace("<|user|>", "<|user|>!").replace("}}{{ eos_token", "}}.{{ eos_token")


def talk(number: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"Who {number}?"}, {"role": "assistant", "content": tiny.sentence(number)}]
    return {"messages": turns * 2}


@pytest.mark.parametrize("kind", ["file", "folder", "older folder", "text"])
def test_a_template_is_a_text_or_a_file_or_a_folder_with_a_tokenizer(tmp_path: Path, kind: str) -> None:
    named = str(tmp_path / "named")
    if kind == "file":
        Path(named).write_text(OTHER)
    elif kind == "folder":
        tiny.tokenizer(chat_template=OTHER).save_pretrained(named)
    elif kind == "older folder":
        Path(named).mkdir()
        (Path(named) / "tokenizer_config.json").write_text(json.dumps({"chat_template": OTHER}))
    else:
        named = OTHER
    assert read_template(named) == OTHER
    model = ModelConfig(name_or_path=str(tiny.save_model(tmp_path / "model")))
    assert load_tokenizer(model, DataConfig(train="x", chat_template=named)).chat_template == OTHER
    assert load_tokenizer(model, DataConfig(train="x")).chat_template == tiny.CHAT


@pytest.mark.parametrize(
    "content", [None, "", '{"chat_template": null}', '{"chat_template": {"default": "{{ x }}"}}', "{"]
)
def test_a_template_that_is_not_there_is_refused(tmp_path: Path, content: str | None) -> None:
    named = tmp_path / "named"
    if content is not None:
        named.mkdir()
        (named / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"^[^\n]*named[^\n]*$"):
        read_template(str(named))


def test_messages_run_from_plan_to_card_and_the_named_template_is_recorded_and_exported(tmp_path: Path) -> None:
    bare = tiny.save_model(tmp_path / "bare", chat_template=None)
    place, template = make_place(tmp_path / "run", bare), tmp_path / "chat.jinja"
    tiny.write_rows(place.train, [talk(number) for number in range(40)])
    canaries = {"groups": {1: 28}, "references": 100}
    place.write({"audit.canaries": canaries, "data.long_examples": "chunk", "data.chat_template": str(template)})
    assert "data.chat_template" in dpllm_("plan", place.recipe).err
    template.write_text(OTHER)
    place.does("plan", "train")
    assert place.json("plan.json")["dataset_size"] == 40 + 28
    template.write_text("{{ messages }}")  # of this file nothing is read again
    record = place.json("run.json")
    assert record["model"]["chat_template"] == hashlib.sha256(OTHER.encode()).hexdigest()
    data = load_config(place.run / "config.yaml").data
    assert (data.format, data.chat_template) == ("messages", OTHER)
    assert transformers.AutoTokenizer.from_pretrained(place.run / "export").chat_template == OTHER
    place.does("audit", "card", "verify")
    assert place.json("export/audit/audit.json")["verdict"] != "falsified"
    assert done("generate", place.run, "--prompt", "Who?", "--max-new-tokens", "2").code == 0
    same_recipe(load_config(place.recipe, {"data.chat_template": OTHER}), RunDir(place.run))
    with pytest.raises(Refused, match=r"data\.chat_template differs from the run to resume"):
        same_recipe(load_config(place.recipe, {"data.chat_template": "{{ messages }}"}), RunDir(place.run))


def test_the_template_is_a_part_of_what_trained(tmp_path: Path) -> None:
    raw = {"model": {"name_or_path": "builtin:tiny"}, "data": {"train": "builtin:clinic"}, "train": {"steps": 1}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**raw, "output_dir": "run"}))
    plain, one, other = (
        load_config(tmp_path / "recipe.yaml", {"data.chat_template": text}) for text in (None, OTHER, tiny.CHAT)
    )
    assert len({names.of_training(config) for config in (plain, one, other)}) == 3
