"""``dpllm merge``: the same function, the same statement, nothing private, and one message for each mistake."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
import yaml
from published import read
from running import SENTINEL, Place, contents, done, dpllm_, edit_recipe, refused
from safetensors.torch import load_file, save_file

from dpllm.canaries import canaries
from dpllm.card import card
from dpllm.errors import Refused
from dpllm.model import loading
from dpllm.publish import merge
from dpllm.recipe.config import RunConfig
from dpllm.run import checkpoint
from dpllm.run.directory import RunDir
from dpllm.statement import privacy_record, section

CPU = torch.device("cpu")
IDS = torch.tensor([[0, 40, 41, 42, 43, 44], [7, 8, 9, 10, 11, 12]])
Json = dict[str, Any]


def test_the_merged_model_computes_what_base_and_adapter_do(finished: Place, merged: Path) -> None:
    config = RunDir(finished.run).load_config()
    both = loading.load_for_scoring(config, finished.run / "export", CPU)
    alone = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    assert type(alone).__name__ == "LlamaForCausalLM"
    with torch.no_grad(), both.base() as base:
        plain = base(input_ids=IDS).logits
    with torch.no_grad():
        tuned, written = both.tuned(input_ids=IDS).logits, alone(input_ids=IDS).logits
    assert (written - tuned).abs().max() <= 1e-4
    assert (written - plain).abs().max() > 1e-3  # the adapter is in it
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    assert tokenizer("Anna bought")["input_ids"] == both.tokenizer("Anna bought")["input_ids"]


CASES: dict[str, tuple[str, Json, Json]] = {
    **{family: (family, {}, {}) for family in ("llama", "gpt2", "opt")},
    "mixtral, attention": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}, {}),
    "rsLoRA": ("llama", {"use_rslora": True}, {}),
    "a head of its own": ("llama", {"modules_to_save": ["lm_head"]}, {}),
    "a tied head that trained": ("llama", {"modules_to_save": ["lm_head"]}, {"tie_word_embeddings": True}),
    "a tied embedding that trained": ("llama", {"modules_to_save": ["embed_tokens"]}, {"tie_word_embeddings": True}),
    "LoRA on a tied embedding": ("llama", {"target_modules": ["embed_tokens"]}, {"tie_word_embeddings": True}),
    "LoRA on a tied head": ("llama", {"target_modules": ["lm_head"]}, {"tie_word_embeddings": True}),
    "gpt2, LoRA on its tied embedding": ("gpt2", {"target_modules": ["wte"]}, {"tie_word_embeddings": True}),
}


def adapted(root: Path, case: str) -> tuple[RunConfig, torch.Tensor]:
    """An adapter as a run exports it, moved away from where it began; and its logits."""
    family, adapter, changes = CASES[case]
    base = tiny.save_model(root / "base", family, **changes)
    value = {"model": {"name_or_path": str(base)}, "adapter": {"method": "lora", "r": 2, **adapter}}
    value |= {"data": {"train": "rows.jsonl"}, "train": {"steps": 1}, "output_dir": str(root / "run")}
    config = RunConfig.model_validate(value)
    net = loading.build(config, CPU).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    checkpoint.export(net, tiny.tokenizer(), RunDir(root / "run"))
    both = loading.load_for_scoring(config, root / "run" / "export", CPU)
    with torch.no_grad():
        return config, both.tuned(input_ids=IDS).logits


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_adapter_merges(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "SHARD", "20KB")
    config, wanted = adapted(tmp_path, case)
    merge.merge_weights(config, tmp_path / "run" / "export", tmp_path / "out")
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert (alone(input_ids=IDS).logits - wanted).abs().max() <= 1e-4 * wanted.abs().max().clamp_min(1)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1  # sharded
    stored = [name for file in files for name in load_file(tmp_path / "out" / file)]
    assert not [name for name in stored if "lora" in name or "modules_to_save" in name]


def test_a_merge_that_changes_what_is_computed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = adapted(tmp_path, "LoRA on a tied embedding")
    monkeypatch.setattr(merge, "_untie", lambda tuned: None)
    with pytest.raises(Refused, match="logits differ from"):
        merge.merge_weights(config, tmp_path / "run" / "export", tmp_path / "out")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_written_in_the_type_of_the_recipe(tmp_path: Path, dtype: str) -> None:
    config, wanted = adapted(tmp_path, "llama")
    config = config.changed({"model.dtype": dtype})
    merge.merge_weights(config, tmp_path / "run" / "export", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        assert (alone(input_ids=IDS).logits - wanted).square().mean().sqrt() <= 0.05 * wanted.std()


def test_the_statement_is_the_same_but_for_the_files(finished: Place, merged: Path) -> None:
    before, after = read(finished.run / "export"), read(merged)
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    assert after["merged_from"] == {"files": {name: before["files"][name] for name in adapter}}
    assert {**after, "files": 0, "merged_from": 0} == {**before, "files": 0, "merged_from": 0}
    assert after["guarantee"] is True
    assert not adapter & after["files"].keys()
    assert {"model.safetensors", "config.json", "tokenizer.json", "audit/audit.json"} <= after["files"].keys()
    for name in before["files"].keys() - adapter:
        assert after["files"][name] == before["files"][name], name
    audit = json.loads((merged / "audit" / "audit.json").read_text())
    assert audit["weights"] == after["merged_from"]["files"]


def test_the_card_is_that_of_a_plain_model(finished: Place, merged: Path) -> None:
    text = (merged / "README.md").read_text("utf-8")
    matter = section.front_matter(text)
    assert matter["library_name"] == "transformers"
    assert matter["privacy"] == card.matter(privacy_record.read(read(merged)))
    assert section.parts(text) == card.render(privacy_record.read(read(merged)))
    use = text.split("\n## Use\n")[1].split("\n## ")[0]
    assert "AutoModelForCausalLM.from_pretrained(here)" in use
    assert "peft" not in use
    assert "merged copy" in text
    assert "| Attacked | the adapter, before it was merged" in text
    banner = section.parts(finished.card)["banner"]
    assert section.parts(text)["banner"] == banner


def test_it_verifies_unless_its_weights_are_changed(merged: Path, tmp_path: Path) -> None:
    done("verify", merged)
    shutil.copytree(merged, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor + 1e-3 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    assert dpllm_("verify", tmp_path / "model").code == 4


def test_nothing_private_is_carried_along(finished: Place, merged: Path) -> None:
    secrets = [canary.secret for canary in canaries.load(RunDir(finished.run).canaries).canaries]
    for name, data in contents(merged).items():
        texts = (SENTINEL, str(finished.root), str(finished.base), *secrets)
        assert not [text for text in texts if text.encode() in data], name
    private = contents(finished.run / "private")
    assert not {data for data in private.values() if len(data) > 64} & set(contents(merged).values())


def test_the_run_itself_is_left_alone_and_a_second_merge_replaces_the_first(copy: Place) -> None:
    before = contents(copy.run)
    done("merge", copy.run)
    first = contents(copy.run / "merged")
    after = contents(copy.run)
    assert {name: after[name] for name in before} == before
    done("merge", copy.run)
    assert contents(copy.run / "merged") == first
    assert not list(copy.run.glob(".merged*"))


def test_a_run_without_privacy_merges_with_its_warning(baseline: Place, tmp_path: Path) -> None:
    done("merge", baseline.run, "--output", tmp_path / "out")
    assert read(tmp_path / "out")["guarantee"] is False
    text = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert section.parts(text)["banner"].startswith("> **No differential privacy guarantee")
    done("verify", tmp_path / "out")


def _frozen(place: Place) -> None:
    value = yaml.safe_load((place.run / "config.yaml").read_text())
    (place.run / "config.yaml").write_text(yaml.safe_dump({**value, "adapter": {"method": "frozen"}}))
    edit_recipe(place.run, "card")


def _occupied(place: Place) -> None:
    (place.run / "merged").mkdir()
    (place.run / "merged" / "thesis.txt").write_text("mine")


@pytest.mark.parametrize(
    ("mistake", "arguments", "code", "message"),
    [
        (_frozen, (), 2, "trained whole layers"),
        (lambda place: edit_recipe(place.run, "model", quantization="4bit"), (), 3, "is quantised, so an adapter"),
        (lambda place: (place.run / "export" / "README.md").unlink(), (), 2, "dpllm card"),
        (_occupied, (), 2, "already holds files"),
        (lambda place: None, ("--output", "EXPORT"), 2, "reserved for the run"),
        (lambda place: shutil.rmtree(place.run), (), 2, "holds no run"),
    ],
    ids=["frozen", "quantised", "no card", "occupied", "in export", "no run"],
)
def test_mistakes_are_one_line_each(
    copy: Place, mistake: Callable[[Place], None], arguments: tuple[str, ...], code: int, message: str
) -> None:
    mistake(copy)
    words = [copy.run / "export" / "x" if word == "EXPORT" else word for word in arguments]
    before = contents(copy.root)
    assert message in refused("merge", copy.run, *words, code=code)
    assert contents(copy.root) == before
