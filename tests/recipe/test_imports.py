"""Configurations of LLaMA-Factory, axolotl and TRL as their documentation shows them: each becomes a recipe that parses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpllm.cli import main
from dpllm.errors import ConfigError
from dpllm.recipe.config import LoraConfig, RunConfig, load_config
from dpllm.recipe.imports import Imported, import_config

LLAMA_FACTORY = """
    {model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct, quantization_bit: 4, trust_remote_code: true,
    stage: sft, do_train: true, finetuning_type: lora, lora_rank: 8, lora_target: all,
    dataset: "identity,alpaca_en_demo", template: llama3, cutoff_len: 2048, max_samples: 1000, packing: true,
    overwrite_cache: true, preprocessing_num_workers: 16, output_dir: saves/llama3-8b/lora/sft, logging_steps: 10,
    save_steps: 500, plot_loss: true, overwrite_output_dir: true, report_to: none, per_device_train_batch_size: 1,
    gradient_accumulation_steps: 8, learning_rate: 1e-4, num_train_epochs: 3.0, lr_scheduler_type: cosine,
    warmup_ratio: 0.1, bf16: true, ddp_timeout: 180000000, resume_from_checkpoint: null, val_size: 0.1,
    per_device_eval_batch_size: 1, eval_strategy: steps, eval_steps: 500}
"""
AXOLOTL = """
    {base_model: NousResearch/Llama-3.2-1B, load_in_8bit: false, load_in_4bit: true, strict: false,
    datasets: [{path: teknium/GPT4-LLM-Cleaned, type: alpaca}, {path: json, data_files: [notes/a.jsonl,
    notes/b.jsonl], type: alpaca}], dataset_prepared_path: last_run_prepared, val_set_size: 0.1,
    output_dir: ./outputs/qlora-out, adapter: qlora, lora_model_dir: null, sequence_len: 2048, sample_packing: true,
    eval_sample_packing: true, lora_r: 32, lora_alpha: 16, lora_dropout: 0.05, lora_target_linear: true,
    gradient_accumulation_steps: 4, micro_batch_size: 2, num_epochs: 1, optimizer: adamw_bnb_8bit,
    lr_scheduler: cosine, learning_rate: 0.0002, bf16: auto, tf32: false, gradient_checkpointing: true,
    flash_attention: true, warmup_steps: 10, evals_per_epoch: 4, weight_decay: 0.0,
    special_tokens: {pad_token: "<|end_of_text|>"}}
"""
TRL = """
    {model_name_or_path: Qwen/Qwen2.5-0.5B, torch_dtype: bfloat16, dataset_name: trl-lib/Capybara,
    dataset_train_split: train, eval_strategy: steps, eval_steps: 100, learning_rate: 0.0002, num_train_epochs: 1,
    max_steps: 200, packing: true, per_device_train_batch_size: 2, gradient_accumulation_steps: 8,
    gradient_checkpointing: true, use_peft: true, lora_r: 32, lora_alpha: 16, lora_target_modules: [q_proj, v_proj],
    warmup_steps: 20, max_length: 1024, neftune_noise_alpha: 5, report_to: [wandb], push_to_hub: true,
    my_own_key: 7}
"""


# What more public examples set: axolotl's qlora-1b and instruct-lora-8b for Llama 3, and the LoRA command in TRL's sft.py (all
# read in November 2026).
PUBLIC = (
    """{base_model: NousResearch/Llama-3.2-1B, load_in_8bit: false, load_in_4bit: true,
    datasets: [{path: teknium/GPT4-LLM-Cleaned, type: alpaca}], dataset_prepared_path: last_run_prepared, val_set_size: 0.1,
    output_dir: ./outputs/qlora-out, adapter: qlora, lora_model_dir: null, sequence_len: 2048, sample_packing: true,
    eval_sample_packing: true, lora_r: 32, lora_alpha: 16, lora_dropout: 0.05, wandb_project: null, wandb_watch: null,
    lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj], gradient_accumulation_steps: 4,
    micro_batch_size: 2, num_epochs: 1, optimizer: adamw_bnb_8bit, lr_scheduler: cosine, learning_rate: 0.0002, bf16: auto,
    tf32: false, gradient_checkpointing: true, logging_steps: 1, attn_implementation: flash_attention_2,
    loss_watchdog_threshold: 5.0, loss_watchdog_patience: 3, warmup_ratio: 0.1, evals_per_epoch: 4, saves_per_epoch: 1,
    weight_decay: 0.0, special_tokens: {pad_token: "<|end_of_text|>"}}""",
    """{base_model: NousResearch/Meta-Llama-3-8B-Instruct, model_type: LlamaForCausalLM, tokenizer_type: AutoTokenizer,
    load_in_8bit: true, load_in_4bit: false, strict: false, chat_template: llama3, datasets: [{
    path: fozziethebeat/alpaca_messages_2k_test, type: chat_template, field_messages: messages, message_field_role: role,
    message_field_content: content, roles: {user: [user], assistant: [assistant]}}], val_set_size: 0.05,
    output_dir: ./outputs/lora-out, sequence_len: 4096, sample_packing: false, pad_to_sequence_len: true, adapter: lora,
    lora_r: 32, lora_alpha: 16, lora_dropout: 0.05, lora_target_linear: true, gradient_accumulation_steps: 4,
    micro_batch_size: 2, num_epochs: 4, optimizer: adamw_bnb_8bit, lr_scheduler: cosine, learning_rate: 0.0002,
    train_on_inputs: false, group_by_length: false, bf16: auto, tf32: false, gradient_checkpointing: true, logging_steps: 1,
    flash_attention: true, warmup_steps: 10, evals_per_epoch: 4, eval_max_new_tokens: 128, saves_per_epoch: 1,
    weight_decay: 0.0, special_tokens: {pad_token: "<|end_of_text|>"}}""",
    """{model_name_or_path: Qwen/Qwen2-0.5B, dataset_name: trl-lib/Capybara, learning_rate: 2.0e-4, num_train_epochs: 1,
    packing: true, per_device_train_batch_size: 2, gradient_accumulation_steps: 8, gradient_checkpointing: true,
    eos_token: "<|im_end|>", eval_strategy: steps, eval_steps: 100, use_peft: true, lora_r: 32, lora_alpha: 16,
    output_dir: Qwen2-0.5B-SFT, push_to_hub: true}""",
)
UNKNOWN = "unknown, not read; dpllm plan --keys lists what a recipe can set."


def imported(tmp_path: Path, text: str, **changes: Any) -> tuple[Imported, RunConfig]:
    path = tmp_path / "their.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(text), **changes}))
    found = import_config(path)
    (tmp_path / "recipe.yaml").write_text(found.recipe)
    return found, load_config(tmp_path / "recipe.yaml")


def write_info(tmp_path: Path, entries: Any) -> None:
    """LLaMA-Factory's dataset_info.json."""
    (tmp_path / "data").mkdir(exist_ok=True)
    text = entries if isinstance(entries, str) else json.dumps(entries)
    (tmp_path / "data" / "dataset_info.json").write_text(text)


def assert_left(found: Imported, *keys: str) -> None:
    """Each key has a line among what was not carried over, and none is unknown."""
    left = "\n".join(found.left)
    assert [key for key in keys if f"{key}: " not in left] == []
    assert "unknown, not read" not in left


def test_llama_factory(tmp_path: Path) -> None:
    identity = {"file_name": "identity.json", "columns": {"prompt": "question", "response": "answer"}}
    write_info(tmp_path, {"identity": identity, "alpaca_en_demo": {"hf_hub_url": "llamafactory/alpaca_en"}})
    found, recipe = imported(tmp_path, LLAMA_FACTORY)
    assert found.tool == "LLaMA-Factory"
    assert (recipe.model.name_or_path, recipe.model.quantization) == ("meta-llama/Meta-Llama-3-8B-Instruct", "4bit")
    assert isinstance(recipe.adapter, LoraConfig)
    assert (recipe.adapter.r, recipe.adapter.alpha, recipe.adapter.target_modules) == (8, 16.0, "auto")
    assert recipe.data.train == [str(tmp_path / "data" / "identity.json"), "llamafactory/alpaca_en"]
    assert recipe.data.columns == {"instruction": "question", "output": "answer"}
    assert recipe.data.max_length == 2048
    assert recipe.data.eval is None
    train = recipe.train
    assert (train.batch_size, train.physical_batch_size, train.epochs, train.steps) == (8, 1, 3.0, None)
    assert (train.learning_rate, train.lr_scheduler, train.warmup, train.precision) == (1e-4, "cosine", 0.1, "bf16")
    assert recipe.output_dir == "saves/llama3-8b/lora/sft"
    assert_left(found, "packing", "val_size", "max_samples", "template", "ddp_timeout", "overwrite_output_dir")


def test_axolotl(tmp_path: Path) -> None:
    found, recipe = imported(tmp_path, AXOLOTL)
    assert found.tool == "axolotl"
    assert (recipe.model.name_or_path, recipe.model.quantization) == ("NousResearch/Llama-3.2-1B", "4bit")
    assert recipe.model.gradient_checkpointing
    assert recipe.data.train == ["teknium/GPT4-LLM-Cleaned", "notes/a.jsonl", "notes/b.jsonl"]
    assert (recipe.data.format, recipe.data.max_length) == ("prompt_completion", 2048)
    assert recipe.adapter == LoraConfig(r=32, alpha=16.0)
    train = recipe.train
    assert (train.batch_size, train.physical_batch_size, train.epochs, train.optimizer) == (8, 2, 1.0, "adamw")
    assert_left(found, "sample_packing", "val_set_size", "lora_dropout", "warmup_steps", "special_tokens", "tf32")


def test_trl(tmp_path: Path) -> None:
    found, recipe = imported(tmp_path, TRL)
    assert found.tool == "TRL"
    assert (recipe.model.name_or_path, recipe.model.dtype) == ("Qwen/Qwen2.5-0.5B", "bfloat16")
    assert recipe.data.train == recipe.data.eval == "trl-lib/Capybara"
    assert recipe.data.eval_split == "test"
    assert recipe.adapter == LoraConfig(r=32, alpha=16.0, target_modules=["q_proj", "v_proj"])
    train = recipe.train
    assert (train.batch_size, train.steps, train.epochs, train.warmup, train.eval_every) == (16, 200, None, 0.1, 100)
    assert recipe.telemetry.trackers == ["wandb"]
    left = "\n".join(found.left)
    for key in ("packing", "neftune_noise_alpha", "push_to_hub"):
        assert f"{key}: " in left
    assert "my_own_key: unknown, not read" in left


@pytest.mark.parametrize("text", [LLAMA_FACTORY, AXOLOTL, TRL, *PUBLIC])
def test_every_key_has_a_line_that_begins_with_it(tmp_path: Path, text: str) -> None:
    found, _ = imported(tmp_path, text)
    told = {line.partition(" -> ")[0].partition(": ")[0] for line in (*found.carried, *found.left)}
    keys = {key for key, value in yaml.safe_load(text).items() if value is not None}
    assert sorted(keys - told) == []
    assert [line for line in found.left if UNKNOWN in line] == ["my_own_key: " + UNKNOWN] * (text == TRL)


@pytest.mark.parametrize(
    ("text", "changes", "lines", "left"),
    [
        (AXOLOTL, {}, ["load_in_4bit: True -> model.quantization: 4bit", "load_in_8bit: False -> nothing to set"], []),
        (AXOLOTL, {}, ["adapter: qlora -> adapter.method: lora", "adapter: qlora -> model.quantization: 4bit"], []),
        (AXOLOTL, {}, ["lora_target_linear: True -> adapter.target_modules: auto"], []),
        (AXOLOTL, {}, ["bf16: auto -> train.precision: auto"], []),
        (AXOLOTL, {"bf16": False}, ["bf16: False -> train.precision: fp32"], []),
        (AXOLOTL, {"bf16": False, "fp16": True}, ["fp16: True -> train.precision: fp16"], []),
        (
            AXOLOTL,
            {"wandb_project": "notes", "wandb_entity": "ward"},
            ["wandb_project: notes -> telemetry.project: notes", "wandb_entity: ward -> telemetry.entity: ward"],
            [],
        ),
        (LLAMA_FACTORY, {}, ["bf16: True -> train.precision: bf16"], ["max_samples: a data set is read whole"]),
        (
            TRL,
            {"eos_token": "<|im_end|>", "pad_token": "<pad>"},
            [],
            ["eos_token: the tokenizer's", "pad_token: the tok"],
        ),
        (
            TRL,
            {"lr_scheduler_type": "cosine_with_min_lr"},
            [],
            ["lr_scheduler_type: a recipe knows linear, cosine (both"],
        ),
        (TRL, {"lr_scheduler_type": "constant_with_warmup"}, ["lr_scheduler_type: constant_with_warmup -> "], []),
        (TRL, {}, ["max_steps: 200 -> train.steps: 200"], ["num_train_epochs: the number of steps decides"]),
    ],
)
def test_a_line_says_what_becomes_of_a_key(
    tmp_path: Path, text: str, changes: Any, lines: list[str], left: list[str]
) -> None:
    found, recipe = imported(tmp_path, text, **changes)
    for line in lines:
        assert any(told.startswith(line) for told in found.carried), found.carried
    for line in left:
        assert any(told.startswith(line) for told in found.left), found.left
    if "wandb_project" in changes:
        assert (recipe.telemetry.trackers, recipe.telemetry.project) == (["wandb"], "notes")
    if changes.get("lr_scheduler_type") == "cosine_with_min_lr":
        assert recipe.train.lr_scheduler == "linear"


@pytest.mark.parametrize(
    ("text", "changes", "says"),
    [
        (LLAMA_FACTORY, {"stage": "dpo"}, "stage: dpo trains on preferences"),
        (AXOLOTL, {"rl": "kto"}, "rl: kto trains on preferences"),
        *((text, {key: value}, f"{key}: .* trains on preferences") for text, key, value in (
            (TRL, "beta", 0.1), (TRL, "beta", 0.0), (TRL, "loss_type", "hinge"), (TRL, "loss_type", ["sigmoid", "nll"]),
            (TRL, "max_prompt_length", 512), (TRL, "desirable_weight", 1.0), (TRL, "ref_model_sync_steps", 64),
            (TRL, "num_ppo_epochs", 4), (AXOLOTL, "process_reward_model", True), (AXOLOTL, "orpo_alpha", 0.1),
            (LLAMA_FACTORY, "kto_chosen_weight", 0.0),
        )),
        (TRL, {"dataset_name": None}, "data.train: required"),
        (AXOLOTL, {"datasets": 5}, "a value of another type than axolotl documents"),
        (TRL, {"learning_rate": "fast"}, "a value of another type than TRL documents"),
        (LLAMA_FACTORY, {"num_train_epochs": [3]}, "a value of another type than LLaMA-Factory documents"),
        ("a: 1", {}, "not a configuration of LLaMA-Factory or TRL"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_private_run_is_refused(tmp_path: Path, text: str, changes: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        imported(tmp_path, text, **changes)


DPO = """
    {model_name_or_path: Qwen/Qwen2-0.5B-Instruct, dataset_name: trl-lib/ultrafeedback_binarized, learning_rate: 5.0e-6,
    per_device_train_batch_size: 2, gradient_accumulation_steps: 8, use_peft: true, lora_r: 32, lora_alpha: 16,
    max_length: 512, max_prompt_length: 128, loss_type: sigmoid, precompute_ref_log_probs: true, beta: 0.2}
"""


@pytest.mark.parametrize(
    ("changes", "objective", "smoothing"),
    [
        ({}, "dpo", 0.0),
        ({"loss_type": ["sigmoid"], "label_smoothing": 0.1}, "cdpo", 0.1),
        ({"loss_type": "robust", "label_smoothing": 0.2}, "dpo", 0.2),
        ({"loss_type": "ipo"}, "ipo", 0.0),
    ],
)
def test_dpo_of_trl_becomes_a_recipe_on_pairs(tmp_path: Path, changes: Any, objective: str, smoothing: float) -> None:
    found, recipe = imported(tmp_path, DPO, **changes)
    train = recipe.train
    assert (train.objective, train.label_smoothing, train.beta) == (objective, smoothing, 0.2)
    assert (recipe.data.format, recipe.data.max_length, train.learning_rate) == ("preference", 512, 5e-6)
    left = "\n".join(found.left)
    assert "precompute_ref_log_probs: the reference is asked once" in left
    assert "max_prompt_length: a pair is cut at its end" in left
    assert ("means over tokens" in left) == (objective == "ipo")
    assert imported(tmp_path, DPO, beta=None, learning_rate=None)[1].train.beta == 0.1  # TRL's default


@pytest.mark.parametrize("key", ["beta", "max_prompt_length", "precompute_ref_log_probs", "label_smoothing"])
def test_dpo_of_trl_that_names_no_loss_is_that_of_its_default(tmp_path: Path, key: str) -> None:
    """As alignment-handbook writes it: beta, and no loss_type."""
    rest = dict.fromkeys({"beta", "max_prompt_length", "precompute_ref_log_probs", "loss_type"} - {key})
    found, recipe = imported(tmp_path, DPO, **rest, **({"label_smoothing": 0.0} if key == "label_smoothing" else {}))
    assert (recipe.train.objective, recipe.data.format) == ("dpo", "preference")
    assert "loss_type: sigmoid (TRL's default) -> train.objective: dpo" in found.carried
    assert any(line.startswith("loss_type: not given; KTO and ORPO") for line in found.left)
    given, _ = imported(tmp_path, DPO)
    assert not any("not given" in line for line in given.left)


@pytest.mark.parametrize(
    "other", ["num_generations", "desirable_weight", "packing", "reward_model_path", "assistant_only_loss"]
)
def test_beta_of_another_training_is_refused(tmp_path: Path, other: str) -> None:
    with pytest.raises(ConfigError, match="in a way that dpllm does not"):
        imported(tmp_path, DPO, loss_type=None, **{other: 1})


def test_a_chat_template_of_another_file_is_carried_over(tmp_path: Path) -> None:
    assert imported(tmp_path, TRL, chat_template_path="chat.jinja")[1].data.chat_template == "chat.jinja"
    assert imported(tmp_path, AXOLOTL, chat_template_jinja="{{ messages }}")[1].data.chat_template == "{{ messages }}"


@pytest.mark.parametrize("key", ["rpo_alpha", "ref_model_sync_steps", "cpo_alpha", "num_generations"])
def test_another_loss_beside_dpo_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="in a way that dpllm does not"):
        imported(tmp_path, DPO, **{key: 1})


def test_full_fine_tuning_becomes_the_last_blocks(tmp_path: Path) -> None:
    found, recipe = imported(tmp_path, AXOLOTL, adapter=None, load_in_4bit=False)
    assert recipe.adapter.model_dump() == {"method": "frozen", "last_blocks": 2, "lm_head": False, "final_norm": True}
    assert "full fine-tuning: " in "\n".join(found.left)
    _, recipe = imported(
        tmp_path, LLAMA_FACTORY, finetuning_type="freeze", freeze_trainable_layers=4, quantization_bit=None
    )
    assert recipe.adapter.model_dump(include={"method", "last_blocks"}) == {"method": "frozen", "last_blocks": 4}


def test_an_adapter_to_go_on_with_is_carried_where_adapters_train(tmp_path: Path) -> None:
    assert imported(tmp_path, AXOLOTL, lora_model_dir="old/adapter")[1].model.adapter == "old/adapter"
    assert imported(tmp_path, LLAMA_FACTORY, adapter_name_or_path="old")[1].model.adapter == "old"
    found, recipe = imported(tmp_path, LLAMA_FACTORY, adapter_name_or_path="old", finetuning_type="freeze")
    assert recipe.model.adapter is None
    assert not any("model.adapter" in line for line in found.carried)
    for value in ("old, older", ["old"]):
        found, recipe = imported(tmp_path, LLAMA_FACTORY, adapter_name_or_path=value)
        assert recipe.model.adapter is None
        assert any(line.startswith("adapter_name_or_path: a recipe starts from one") for line in found.left)
    for new in (True, False):
        found, recipe = imported(tmp_path, LLAMA_FACTORY, adapter_name_or_path="old", create_new_adapter=new)
        assert recipe.model.adapter == (None if new else "old")
        assert any("model.adapter" in line for line in found.carried) is not new
        assert any(line.startswith("create_new_adapter: the old adapter becomes") for line in found.left) is new


def test_pretraining_and_held_out_data(tmp_path: Path) -> None:
    write_info(tmp_path, {"c4": {"file_name": "c4.jsonl", "columns": {"prompt": "body"}}})
    _, recipe = imported(tmp_path, LLAMA_FACTORY, stage="pt", dataset="c4")
    assert (recipe.data.train, recipe.data.columns) == (str(tmp_path / "data" / "c4.jsonl"), {"text": "body"})
    held_out = [{"path": "org/rows", "type": "alpaca", "split": "test"}]
    _, recipe = imported(tmp_path, AXOLOTL, datasets=[{"path": "org/rows", "type": "alpaca"}], test_datasets=held_out)
    assert (recipe.data.eval, recipe.data.train_split, recipe.data.eval_split) == ("org/rows", "train", "test")


def test_fields_of_axolotl_become_columns(tmp_path: Path) -> None:
    fields = [
        ({"type": "chat_template", "field_messages": "talk"}, {"conversations": "talk"}, "messages"),
        ({"type": "completion", "field": "body"}, {"text": "body"}, "text"),
        ({"type": {"field_instruction": "q", "field_output": "a"}}, {"instruction": "q", "output": "a"}, "auto"),
    ]
    for entry, columns, fmt in fields:
        _, recipe = imported(tmp_path, AXOLOTL, datasets=[{"path": "org/rows", "split": "all", **entry}])
        assert (recipe.data.train, recipe.data.train_split) == ("org/rows", "all")
        assert (recipe.data.columns, recipe.data.format) == (columns, fmt)


def test_the_command_prints_a_recipe_and_reports_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(TRL)
    assert main(["import-config", str(path)]) == 0
    printed = capsys.readouterr()
    assert RunConfig.model_validate(yaml.safe_load(printed.out)).train.steps == 200
    assert "packing: rows of several people in one sequence" in printed.err
    recipe = tmp_path / "recipe.yaml"
    assert main(["import-config", str(path), "--output", str(recipe)]) == 0
    assert recipe.read_text() == printed.out
    assert capsys.readouterr().out == ""
    assert main(["import-config", str(path), "--output", str(recipe)]) == 2  # nothing is overwritten
    assert main(["import-config", str(tmp_path / "absent.yaml")]) == 2


def test_a_supervised_loss_and_a_key_switched_off_are_no_such_sign(tmp_path: Path) -> None:
    found, _ = imported(tmp_path, TRL, loss_type="chunked_nll", precompute_ref_log_probs=False, beta=None)
    assert "loss_type: the clipped loss" in "\n".join(found.left)
    imported(tmp_path, AXOLOTL, rl=False)


def test_rows_that_train_are_never_held_out(tmp_path: Path) -> None:
    found, recipe = imported(tmp_path, TRL, eval_strategy=False, dataset_test_split="test")  # what YAML makes of no
    assert (recipe.data.eval, "eval_split" in found.recipe) == (None, False)
    assert "dataset_test_split: nothing is evaluated" in "\n".join(found.left)
    rows = {"path": "org/rows", "type": "alpaca"}
    for text, changes in (
        (TRL, {"dataset_name": "rows.jsonl"}),
        (TRL, {"dataset_test_split": "train"}),
        (AXOLOTL, {"datasets": [rows], "test_datasets": [dict(rows)]}),
        (LLAMA_FACTORY, {"eval_dataset": "identity"}),
    ):
        found, recipe = imported(tmp_path, text, **changes)
        assert (recipe.data.eval, "eval_split" in found.recipe) == (None, False), changes
        assert "data.eval: these rows would train too" in "\n".join(found.left)


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"type": {"field_instruction": "ask"}}, "instruction"),
        ({"type": "alpaca", "split": "test"}, "data.train_split"),
    ],
)
def test_datasets_that_a_recipe_cannot_read_alike_are_refused(tmp_path: Path, entry: Any, key: str) -> None:
    first = {"path": "org/rows", "type": {"field_instruction": "q"}}
    with pytest.raises(ConfigError, match=f"its datasets name .* for {key}"):
        imported(tmp_path, AXOLOTL, datasets=[first, {"path": "org/more", **entry}])


def test_what_a_recipe_does_not_know_keeps_its_default_and_is_told(tmp_path: Path) -> None:
    found, recipe = imported(tmp_path, AXOLOTL, lr_scheduler="rex", optimizer="lion_8bit")
    assert (recipe.train.lr_scheduler, recipe.train.optimizer) == ("linear", "adamw")
    assert not [line for line in found.carried if "rex" in line or "lion" in line]
    left = "\n".join(found.left)
    assert "linear replaces rex" in left
    assert "adamw, replaces lion_8bit" in left
    found, _ = imported(tmp_path, TRL, lr_scheduler_type="polynomial", optim="paged_adamw_8bit")
    assert "linear replaces polynomial" in "\n".join(found.left)
    assert "optim: paged_adamw_8bit -> train.optimizer: adamw" in found.carried
    found, _ = imported(tmp_path, LLAMA_FACTORY, finetuning_type="oft", quantization_bit=None)
    assert "method oft: a recipe trains LoRA or the last blocks" in "\n".join(found.left)
    assert "full fine-tuning" not in "\n".join(found.left)


def test_every_key_of_a_dataset_is_told(tmp_path: Path) -> None:
    columns = {"prompt": "q", "system": "rules", "history": "before"}
    entry = {
        "hf_hub_url": "org/rows",
        "columns": columns,
        "num_samples": 5,
        "subset": "en",
        "tags": {"role_tag": "who"},
    }
    write_info(tmp_path, {"rows": entry})
    found, recipe = imported(tmp_path, LLAMA_FACTORY, dataset="rows")
    assert recipe.data.columns == {"instruction": "q"}  # an Alpaca row has no system
    kind = {"field_instruction": "q", "field_system": "rules", "format": "{instruction}"}
    theirs = {"path": "org/rows", "type": kind, "shards": 4, "train_on_split": "train", "own": 1}
    more, _ = imported(tmp_path, AXOLOTL, datasets=[theirs, {"path": "org/rest", "type": "oasst"}])
    left = "\n".join([*found.left, *more.left])
    keys = "system", "history", "num_samples", "subset", "tags", "format", "field_system", "shards", "train_on_split"
    assert all(f"datasets.{key}: " in left and f"datasets.{key}: unknown" not in left for key in keys)
    assert "datasets.own: unknown" in left
    assert "datasets.type: " in left
    mixture = [{"path": "org/rows", "columns": ["messages"], "split": "some"}]
    found, recipe = imported(tmp_path, TRL, dataset_name=None, datasets=mixture, dataset_train_split=None)
    assert "datasets.columns: " in "\n".join(found.left)
    assert (recipe.data.train, recipe.data.eval_split, recipe.data.eval) == ("org/rows", "test", "org/rows")
    chat = {"hf_hub_url": "org/chat", "formatting": "sharegpt", "columns": {"messages": "talk", "system": "rules"}}
    write_info(tmp_path, {"chat": chat})
    _, recipe = imported(tmp_path, LLAMA_FACTORY, dataset="chat")
    assert recipe.data.columns == {"conversations": "talk", "system": "rules"}


def test_numbers_without_a_reading_are_one_line(tmp_path: Path) -> None:
    adapter: Any = imported(tmp_path, LLAMA_FACTORY, lora_rank="8")[1].adapter
    assert (adapter.r, adapter.alpha) == (8, 16.0)
    for changes in ({"per_device_train_batch_size": float("inf")}, {"lora_rank": 8.5}, {"lora_rank": [8]}):
        with pytest.raises(ConfigError, match="of another type than LLaMA-Factory documents") as refused:
            imported(tmp_path, LLAMA_FACTORY, **changes)
        assert "\n" not in str(refused.value)
    write_info(tmp_path, '{"a":' * 200_000)
    with pytest.raises(ConfigError, match="of another type than LLaMA-Factory documents"):
        imported(tmp_path, LLAMA_FACTORY)
