"""Configurations of LLaMA-Factory, axolotl and TRL as their documentation shows them: each becomes a recipe that parses."""

import json
from collections.abc import Sequence
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
    result = import_config(path)
    (tmp_path / "recipe.yaml").write_text(result.recipe)
    return result, load_config(tmp_path / "recipe.yaml")


def write_info(tmp_path: Path, entries: Any) -> None:
    (tmp_path / "data").mkdir(exist_ok=True)
    text = entries if isinstance(entries, str) else json.dumps(entries)
    (tmp_path / "data" / "dataset_info.json").write_text(text)


def assert_omitted(result: Imported, *keys: str, unknown: Sequence[str] = ()) -> None:
    """Each key has a line among those that are not carried over, and only these are unknown."""
    assert [key for key in keys if not any(line.startswith(f"{key}: ") for line in result.omitted)] == []
    assert [line for line in result.omitted if UNKNOWN in line] == [f"{key}: {UNKNOWN}" for key in unknown]


def test_llama_factory(tmp_path: Path) -> None:
    identity = {"file_name": "identity.json"}
    write_info(tmp_path, {"identity": identity, "alpaca_en_demo": {"hf_hub_url": "llamafactory/alpaca_en"}})
    result, recipe = imported(tmp_path, LLAMA_FACTORY)
    assert result.tool == "LLaMA-Factory"
    assert (recipe.model.name_or_path, recipe.model.quantization) == ("meta-llama/Meta-Llama-3-8B-Instruct", "4bit")
    assert isinstance(recipe.adapter, LoraConfig)
    assert (recipe.adapter.r, recipe.adapter.alpha, recipe.adapter.target_modules) == (8, 16.0, "auto")
    assert recipe.data.train == [str(tmp_path / "data" / "identity.json"), "llamafactory/alpaca_en"]
    assert recipe.data.max_length == 2048
    assert recipe.data.eval is None
    train = recipe.train
    assert (train.batch_size, train.tokens_per_pass, train.epochs, train.steps) == (8, "auto", 3.0, None)
    assert (train.learning_rate, train.lr_scheduler, train.warmup, train.precision) == (1e-4, "cosine", 0.1, "bf16")
    assert recipe.output_dir == "saves/llama3-8b/lora/sft"
    assert_omitted(result, "packing", "val_size", "max_samples", "template", "ddp_timeout", "overwrite_output_dir")


def test_axolotl(tmp_path: Path) -> None:
    result, recipe = imported(tmp_path, AXOLOTL)
    assert result.tool == "axolotl"
    assert (recipe.model.name_or_path, recipe.model.quantization) == ("NousResearch/Llama-3.2-1B", "4bit")
    assert recipe.model.gradient_checkpointing
    assert recipe.data.train == ["teknium/GPT4-LLM-Cleaned", "notes/a.jsonl", "notes/b.jsonl"]
    assert (recipe.data.format, recipe.data.max_length) == ("auto", 2048)
    assert recipe.adapter == LoraConfig(r=32, alpha=16.0)
    train = recipe.train
    assert (train.batch_size, train.tokens_per_pass, train.epochs, train.optimizer) == (8, "auto", 1.0, "adamw")
    assert_omitted(result, "sample_packing", "val_set_size", "lora_dropout", "warmup_steps", "special_tokens", "tf32")


def test_trl(tmp_path: Path) -> None:
    result, recipe = imported(tmp_path, TRL)
    assert result.tool == "TRL"
    assert (recipe.model.name_or_path, recipe.model.dtype) == ("Qwen/Qwen2.5-0.5B", "bfloat16")
    assert (recipe.data.train, recipe.data.eval) == ("trl-lib/Capybara", None)
    assert recipe.adapter == LoraConfig(r=32, alpha=16.0, target_modules=["q_proj", "v_proj"])
    train = recipe.train
    assert (train.batch_size, train.steps, train.epochs, train.warmup, train.eval_every) == (16, 200, None, 0.1, 100)
    assert recipe.telemetry.trackers == ["wandb"]
    keys = ("packing", "neftune_noise_alpha", "push_to_hub", "eval_strategy")
    assert_omitted(result, *keys, unknown=["my_own_key"])


@pytest.mark.parametrize("text", [LLAMA_FACTORY, AXOLOTL, TRL, *PUBLIC])
def test_every_key_has_a_line_that_begins_with_it(tmp_path: Path, text: str) -> None:
    result, _ = imported(tmp_path, text)
    reported = {line.partition(" -> ")[0].partition(": ")[0] for line in (*result.carried, *result.omitted)}
    keys = {key for key, value in yaml.safe_load(text).items() if value is not None}
    assert sorted(keys - reported) == []
    assert_omitted(result, unknown=["my_own_key"] if text == TRL else [])


@pytest.mark.parametrize(
    ("text", "changes", "key", "value"),
    [
        (AXOLOTL, {}, "train.precision", "auto"),
        (AXOLOTL, {"bf16": False, "fp16": True}, "train.precision", "fp16"),
        (AXOLOTL, {"bf16": False}, "train.precision", "auto"),  # the default of a recipe
        (AXOLOTL, {"wandb_project": "notes", "wandb_entity": "ward"}, "telemetry.project", "notes"),
        (AXOLOTL, {"wandb_project": "notes", "wandb_entity": "ward"}, "telemetry.entity", "ward"),
        (AXOLOTL, {"wandb_project": "notes"}, "telemetry.trackers", ["wandb"]),
        (TRL, {"lr_scheduler_type": "cosine_with_min_lr"}, "train.lr_scheduler", "linear"),
        (TRL, {"lr_scheduler_type": "constant_with_warmup"}, "train.lr_scheduler", "constant"),
    ],
)
def test_a_key_has_its_value_in_the_recipe(tmp_path: Path, text: str, changes: Any, key: str, value: Any) -> None:
    _, recipe = imported(tmp_path, text, **changes)
    section, name = key.split(".")
    assert getattr(getattr(recipe, section), name) == value


def test_a_line_says_what_becomes_of_a_key(tmp_path: Path) -> None:
    axolotl, _ = imported(tmp_path, AXOLOTL)
    assert "adapter: qlora -> model.quantization: 4bit" in axolotl.carried
    assert "load_in_8bit: False -> nothing to set" in axolotl.carried
    trl, _ = imported(tmp_path, TRL, eos_token="<|im_end|>")
    assert "max_steps: 200 -> train.steps: 200" in trl.carried
    assert_omitted(trl, "num_train_epochs", "eos_token", unknown=["my_own_key"])


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        (LLAMA_FACTORY, {"stage": "dpo"}, "stage: dpo trains on preferences"),
        (AXOLOTL, {"rl": "kto"}, "rl: kto trains on preferences"),
        *((text, {key: value}, f"{key}: .* trains on preferences") for text, key, value in (
            (TRL, "beta", 0.1), (TRL, "beta", 0.0), (TRL, "loss_type", "sigmoid"), (TRL, "loss_type", ["sigmoid", "nll"]),
            (TRL, "rpo_alpha", 1), (TRL, "num_generations", 1), (TRL, "precompute_ref_log_probs", True),
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
def test_what_cannot_be_a_private_run_is_refused(tmp_path: Path, text: str, changes: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        imported(tmp_path, text, **changes)


def test_templates_held_out_data_and_columns_are_carried_over(tmp_path: Path) -> None:
    assert imported(tmp_path, TRL, chat_template_path="chat.jinja")[1].data.chat_template == "chat.jinja"
    assert imported(tmp_path, AXOLOTL, chat_template_jinja="{{ messages }}")[1].data.chat_template == "{{ messages }}"
    held_out = [{"path": "org/rows", "type": "alpaca", "split": "test"}]
    rows = [{"path": "org/rows", "type": "alpaca"}]
    result, recipe = imported(tmp_path, AXOLOTL, datasets=rows, test_datasets=held_out)
    assert (recipe.data.eval, recipe.data.train_split, recipe.data.eval_split) == ("org/rows", "train", "test")
    assert_omitted(result, "datasets.type")
    assert imported(tmp_path, TRL, dataset_text_field="body")[1].data.columns == {"text": "body"}
    assert imported(tmp_path, TRL, dataset_text_field="text")[1].data.columns == {}


def test_full_fine_tuning_becomes_the_last_blocks(tmp_path: Path) -> None:
    result, recipe = imported(tmp_path, AXOLOTL, adapter=None, load_in_4bit=False)
    assert recipe.adapter.model_dump() == {"method": "frozen", "last_blocks": 2, "lm_head": False, "final_norm": True}
    assert_omitted(result, "full fine-tuning")
    _, recipe = imported(
        tmp_path, LLAMA_FACTORY, finetuning_type="freeze", freeze_trainable_layers=4, quantization_bit=None
    )
    assert recipe.adapter.model_dump(include={"method", "last_blocks"}) == {"method": "frozen", "last_blocks": 4}


def test_an_adapter_to_go_on_with_is_carried_where_adapters_train(tmp_path: Path) -> None:
    assert imported(tmp_path, AXOLOTL, lora_model_dir="old/adapter")[1].model.adapter == "old/adapter"
    assert imported(tmp_path, LLAMA_FACTORY, adapter_name_or_path="old")[1].model.adapter == "old"
    result, recipe = imported(tmp_path, LLAMA_FACTORY, adapter_name_or_path="old", finetuning_type="freeze")
    assert recipe.model.adapter is None
    assert not any("model.adapter" in line for line in result.carried)
    for value in ("old, older", ["old"]):
        result, recipe = imported(tmp_path, LLAMA_FACTORY, adapter_name_or_path=value)
        assert recipe.model.adapter is None
        assert_omitted(result, "adapter_name_or_path")


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


def test_what_is_no_sign_of_preferences_is_imported_and_several_splits_are_refused(tmp_path: Path) -> None:
    result, _ = imported(tmp_path, TRL, loss_type="chunked_nll", precompute_ref_log_probs=False, beta=None)
    assert_omitted(result, "loss_type", unknown=["my_own_key"])
    imported(tmp_path, AXOLOTL, rl=False)
    rows = [{"path": "org/rows", "split": "test"}, {"path": "org/more"}]
    with pytest.raises(ConfigError, match=r"its datasets name several splits.* one data\.train_split"):
        imported(tmp_path, AXOLOTL, datasets=rows)


def test_an_unknown_value_keeps_the_default_and_is_reported(tmp_path: Path) -> None:
    result, recipe = imported(tmp_path, AXOLOTL, lr_scheduler="rex", optimizer="lion_8bit")
    assert (recipe.train.lr_scheduler, recipe.train.optimizer) == ("linear", "adamw")
    assert not [line for line in result.carried if "rex" in line or "lion" in line]
    assert_omitted(result, "lr_scheduler", "optimizer")
    result, _ = imported(tmp_path, TRL, lr_scheduler_type="polynomial", optim="paged_adamw_8bit")
    assert_omitted(result, "lr_scheduler_type", unknown=["my_own_key"])
    assert "optim: paged_adamw_8bit -> train.optimizer: adamw" in result.carried
    result, _ = imported(tmp_path, LLAMA_FACTORY, finetuning_type="oft", quantization_bit=None)
    assert_omitted(result, "method oft")


def test_every_key_of_a_dataset_is_reported(tmp_path: Path) -> None:
    tags = {"role_tag": "who"}
    entry = {"hf_hub_url": "org/rows", "columns": {"prompt": "q"}, "num_samples": 5, "subset": "en", "tags": tags}
    write_info(tmp_path, {"rows": entry})
    result, _ = imported(tmp_path, LLAMA_FACTORY, dataset="rows")
    assert_omitted(result, *(f"datasets.{key}" for key in ("columns", "num_samples", "subset", "tags")))
    theirs = {"path": "org/rows", "type": "alpaca", "field_system": "rules", "shards": 4, "train_on_split": "train"}
    result, _ = imported(tmp_path, AXOLOTL, datasets=[{**theirs, "own": 1}])
    keys = (f"datasets.{key}" for key in ("type", "field_system", "shards", "train_on_split"))
    assert_omitted(result, *keys, unknown=["datasets.own"])
    mixture = [{"path": "org/rows", "columns": ["messages"], "split": "some"}]
    result, recipe = imported(tmp_path, TRL, dataset_name=None, datasets=mixture, dataset_train_split=None)
    assert (recipe.data.train, recipe.data.train_split) == ("org/rows", "some")


def test_numbers_without_a_reading_are_one_line(tmp_path: Path) -> None:
    adapter: Any = imported(tmp_path, LLAMA_FACTORY, lora_rank="8")[1].adapter
    assert (adapter.r, adapter.alpha) == (8, 16.0)
    for changes in ({"per_device_train_batch_size": float("inf")}, {"lora_rank": 8.5}, {"lora_rank": [8]}):
        with pytest.raises(ConfigError, match=r"^[^\n]*of another type than LLaMA-Factory documents[^\n]*$"):
            imported(tmp_path, LLAMA_FACTORY, **changes)
    write_info(tmp_path, '{"a":' * 200_000)
    with pytest.raises(ConfigError, match="of another type than LLaMA-Factory documents"):
        imported(tmp_path, LLAMA_FACTORY)


def test_a_key_that_yaml_reads_as_true_is_a_key(tmp_path: Path) -> None:
    """``on`` and ``yes`` are booleans in YAML 1.1; a mutant ended in a traceback."""
    path = tmp_path / "axolotl.yaml"
    path.write_text("base_model: a/b\nadapter: lora\ndatasets:\n  - path: a/c\n    type: completion\non: 1\n", "utf-8")
    assert any(line.startswith("True: unknown") for line in import_config(path).omitted)
