"""Runs with data.template or data.chat_template: whatever asks the model, or scores its rows, reads them as training did."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers
import yaml
from running import Place, done, dpllm_, make_place

from dpllm.auditing.members import audit_run_members
from dpllm.auditing.run import audit, load_models
from dpllm.comparison import tasks
from dpllm.errors import ConfigError, Refused
from dpllm.model.loading import load_tokenizer
from dpllm.publish import generate
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, ModelConfig, load_config
from dpllm.run.checkpoint import same_recipe
from dpllm.run.directory import RunDir, open_run
from dpllm.text import rendering
from dpllm.text.rendering import joined, read_template
from dpllm.text.tokens import encode

TEMPLATE = "[INST] {prompt} [/INST]\n### Answer:\n{completion}"
ASKED = "[INST] Who? [/INST]\n### Answer:\n"


def pairs(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"Who {n}?", "completion": tiny.sentence(n)} for n in range(start, start + count)]


@pytest.fixture(scope="module")
def templates() -> Any:
    """The templates of all texts that are made, in this module's order."""
    seen: list[str | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "joined", lambda *arguments: seen.append(arguments[2]) or joined(*arguments))
        yield seen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path, templates: list[str | None]) -> Place:
    place = make_place(tmp_path_factory.mktemp("template"), base)
    tiny.write_rows(place.train, pairs(60))
    held_out = tiny.write_rows(place.root / "data" / "eval.jsonl", pairs(60, 100))
    canaries = {"kind": "random_tokens", "groups": {1: 40}, "references": 100, "tokens": 4}
    changes = {"data.eval": str(held_out), "data.template": TEMPLATE, "audit.canaries": canaries}
    more = {"train.sample_prompts": ["Who?"], "audit.gradient_canaries": 0, "privacy.noise_multiplier": 1.0}
    place.write({**changes, **more})
    shown = " ".join(done("plan", place.recipe).out.replace("\u2502", " ").split())
    assert "masked: [INST] <prompt> [/INST] ### Answer: learned: <completion><eos>" in shown
    place.does("train", "card")
    assert templates.count(TEMPLATE) == len(templates) > 120 + 120  # rows of both files, all canaries, a sample
    return place


@pytest.mark.parametrize("way", ["audit", "members", "tasks", "generate", "synthesize"])
def test_every_text_is_made_by_the_template(run: Place, templates: list[str | None], way: str) -> None:
    templates.clear()
    place, config = RunDir(run.run), RunDir(run.run).load_config()
    public = run.root / "prompts.txt"
    public.write_text("Who?\nWhere?\n")
    if way == "audit":
        audit(place)
        done("card", run.run)
    elif way == "members":
        audit_run_members(open_run(place), load_models(open_run(place)))
    elif way == "tasks":
        tasks._encoded({"Who?": ["Anna"]}, load_models(open_run(place)), config)
    elif way == "generate":
        done("generate", run.run, "--prompt", "Who?", "--num", 1, "--max-new-tokens", 2)
    else:
        options = ("--keep-unfinished", "--keep-duplicates", "--no-quality")
        done("synthesize", run.run, "--rows", 2, "--prompts", public, *options)
    assert set(templates) == {TEMPLATE}


def test_an_export_and_a_merged_model_are_asked_as_the_run_is(run: Place) -> None:
    done("merge", run.run)
    for place in (run.run, run.run / "export", run.run / "merged"):
        loaded = generate.load(place, base=str(run.base))
        (ids,) = generate.encode_all(loaded, ["Who?"])
        assert loaded.tokenizer.decode(ids) == f"<s>{ASKED}"
    assert run.json("export/privacy.json")["template"] == TEMPLATE
    assert "joined as `template` of privacy.json says" in run.card
    done("verify", run.run)
    done("verify", run.run / "export")


def test_a_secret_begins_where_the_template_says(run: Place) -> None:
    """Behind a line end, random tokens are no tokens that begin with a space."""
    secrets = run.json("private/canaries.json")["canaries"]
    tokenizer = tiny.tokenizer()
    for secret in secrets:
        row, reads = {"prompt": secret["carrier"], "completion": secret["secret"]}, tiny.reads(128, template=TEMPLATE)
        (sequence,) = encode(row, "prompt_completion", tokenizer, reads)
        assert len(sequence.input_ids) - sequence.loss_mask.index(True) == 4 + 1


# --- data.chat_template ----------------------------------------------------------------------------------------------


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
