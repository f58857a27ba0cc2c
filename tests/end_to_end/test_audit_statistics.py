"""Audits of models of known contents: what was memorised is found, what was not is not, and no text gets out."""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import cards
import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from dpllm.auditing import summary
from dpllm.auditing.outside import audit_outside, outside_claim
from dpllm.auditing.run import audit
from dpllm.auditing.table import read_tokens, sum_up
from dpllm.canaries import canaries
from dpllm.canaries.texts import encode_secret
from dpllm.errors import ConfigError
from dpllm.files import read_json, write_json
from dpllm.privacy.plan import AuditSettings
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, RunConfig, dump_config
from dpllm.run import checkpoint
from dpllm.run.directory import RunDir
from dpllm.statement.run_files import read_plan
from dpllm.text import builtin

CANARIES = {"groups": {1: 120, 8: 10}, "digits": 12, "references": 150}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with a tiny untrained model and its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<|eos|>"], initial_alphabet=alphabet)
    plan = canaries.plan_canaries(canaries.CanaryConfig(groups={1: 500}), generator=random.Random(1))
    inner.train_from_iterator([canary.carrier for canary in plan.canaries], trainer)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|eos|>").save_pretrained(folder)
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=len(inner.get_vocab()), n_embd=64, n_layer=1, n_head=4, n_positions=64)
    GPT2LMHeadModel(shape).save_pretrained(folder)
    return folder


def make_run(base, root, *, adapter, private=True, epsilon=8.0, planted=True):
    """A run directory as training leaves it, without weights."""
    rows = tiny.write_rows(root / "rows.jsonl", [{"text": "Nothing to see."}])
    value = {"model": {"name_or_path": str(base)}, "adapter": {"method": adapter}, "privacy": {"enabled": private}}
    value |= {"data": {"train": str(rows), "public": not private, "format": "text", "max_length": 64}}
    value |= {"audit": {"canaries": CANARIES if planted else None}, "train": {"steps": 1}}
    config = RunConfig.model_validate({**value, "output_dir": str(root / "run")})
    run = RunDir(root / "run")
    run.make()
    run.config.write_text(dump_config(config))
    plan = canaries.plan_canaries(canaries.CanaryConfig(**CANARIES), generator=random.Random(0))
    canaries.save(plan, run.canaries)
    promise = cards.plan(epsilon=epsilon, delta=1e-5, unit="example", canary_commitment=plan.commitment)
    promise |= {"audit": config.audit.fixed().to_json(), "schema_version": 2}
    if private:
        write_json(run.plan, promise)
    written = {"config.yaml": names.of_training(config)}
    if private:
        written["plan.json"] = read_plan(run).digest
    write_json(run.run, {**cards.record(artifacts={}), "manifest": written, "ledger": None})
    return run, plan


def export(run, model):
    """The weights as training leaves them, with their hashes in run.json."""
    model.save_pretrained(run.export)
    record = read_json(run.run)
    weights = {f"export/{name}": value for name, value in checkpoint.weight_hashes(run.export).items()}
    write_json(run.run, {**record, "manifest": {**record["manifest"], **weights}})


def memorise(base, plan, tokenizer, *, epochs=62, whole_rows=False):
    """Trains without any privacy on the inserted canaries, on their secrets alone or on all that enters a run's loss."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel.from_pretrained(base)
    held = [canary for slot in canaries.slots(plan, DataConfig(train="rows.jsonl")) for canary in slot]
    rows = [encode_secret(canary, "text", tokenizer, tiny.reads(64, "refuse")) for canary in held]
    ids = torch.zeros(len(rows), 64, dtype=torch.long)
    labels = torch.full((len(rows), 64), -100)
    for place, (sequence, mask) in enumerate(rows):
        ids[place, : len(mask)] = torch.tensor(sequence.input_ids)
        learned = torch.tensor(sequence.loss_mask if whole_rows else mask)
        labels[place, : len(mask)] = torch.where(learned, ids[place, : len(mask)], -100)
    width = max(len(mask) for _, mask in rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(epochs):
        for batch in torch.randperm(len(rows)).split(16):
            optimizer.zero_grad()
            model(input_ids=ids[batch, :width], labels=labels[batch, :width]).loss.backward()
            optimizer.step()
    return model


@pytest.fixture(scope="module")
def memorised(base, tmp_path_factory):
    """A run that claims much and kept nothing of it."""
    run, plan = make_run(base, tmp_path_factory.mktemp("memorised"), adapter="frozen", epsilon=1.0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    export(run, memorise(base, plan, tokenizer))
    return run, plan, audit(run).to_json()


def test_a_broken_promise_is_falsified(memorised):
    _, _, report = memorised
    assert report["verdict"] == "falsified"
    assert report["epsilon_lower_bound"]["value"] > 2.0
    assert report["attacks"]["ratio"]["auc"] > 0.95
    low, high = report["attacks"]["ratio"]["base_control_auc_interval"]
    assert high - low < 0.5
    assert report["exposure"]["1"]["p_value"] < 1e-9
    count = report["extraction"]["1"]
    assert count["tuned"] > count["inserted"] / 2
    assert count["base"] == count["held_out_tuned"] == 0


def test_the_report_names_what_it_is_about(memorised):
    run, plan, report = memorised
    inserted = sum(canary.inserted for canary in plan.canaries if canary.group == 1)
    assert report["canaries"]["commitment"] == plan.commitment
    assert report["canaries"]["groups"]["1"] == {"candidates": 120, "inserted": inserted}
    names = ("config.json", "model.safetensors")
    hashes = {name: hashlib.sha256((run.export / name).read_bytes()).hexdigest() for name in names}
    assert report["weights"] == hashes
    written = json.loads((run.export / "audit" / "audit.json").read_text())
    assert written == {"schema_version": written["schema_version"], **report}


def test_a_run_without_privacy_is_found_out_by_its_rows_before_its_secrets(base, tmp_path):
    """The whole row entered the loss; what a secret gives away is the same, whatever else was scored."""
    run, plan = make_run(base, tmp_path, adapter="frozen", private=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    export(run, memorise(base, plan, tokenizer, epochs=12, whole_rows=True))
    report = audit(run).to_json()
    tokens = read_tokens(run.private / "audit" / "tokens.parquet")
    settings, context = AuditSettings.pick(report["settings"]), summary.AuditContext(words=report["controls"]["words"])
    of_secrets = summary.summarise(tokens.secrets(), None, settings, context).to_json()
    assert report["attacks"]["calibrated"]["auc"] > of_secrets["attacks"]["calibrated"]["auc"] + 0.1
    assert report["epsilon_lower_bound"]["value"] > of_secrets["epsilon_lower_bound"]["value"] + 1
    assert all(of_secrets[name] == report[name] for name in ("exposure", "extraction", "sampling"))


def test_an_adapter_that_learned_nothing_is_not_accused(base, tmp_path):
    run, _ = make_run(base, tmp_path, adapter="lora", epsilon=4.0)
    settings = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    export(run, get_peft_model(GPT2LMHeadModel.from_pretrained(base), settings))
    report = audit(run).to_json()
    assert report["verdict"] == "inconclusive"
    assert "seen to work nowhere" in report["verdict_reason"]
    assert report["epsilon_lower_bound"]["value"] < 1.0
    assert report["attacks"]["loss"]["auc"] == report["attacks"]["loss"]["base_control_auc"]
    tokens = read_tokens(run.export / "audit" / "tokens.parquet")
    assert all(math.isclose(row.tuned_log_prob, row.base_log_prob) for row in sum_up(tokens))


def test_what_cannot_be_audited_is_refused(base, tmp_path):
    run, _ = make_run(base, tmp_path, adapter="frozen")
    with pytest.raises(ConfigError, match="holds no weights"):
        audit(run)
    export(run, GPT2LMHeadModel.from_pretrained(base))
    promise = read_json(run.plan)
    for key, value in (("epsilon", "?"), ("epsilon", -1.0), ("delta", 7)):
        write_json(run.plan, {**promise, key: value})
        with pytest.raises(ConfigError, match=f"{key} is not what a run writes there"):
            audit(run)
    run.plan.unlink()
    with pytest.raises(ConfigError, match="missing"):
        audit(run)
    (tmp_path / "other").mkdir()
    unplanted, _ = make_run(base, tmp_path / "other", adapter="frozen", planted=False)
    with pytest.raises(ConfigError, match="audit twin"):
        audit(unplanted)


# --- a stranger's adapter, trained with plain peft and transformers --------------------------------------------------


Json = dict[str, Any]
STEPS, BATCH, LEARNING_RATE = 80, 26, 5e-3
CLAIM = outside_claim(0.5, 1e-5)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Json]]:
    """What somebody has who trained without dpllm: a folder with adapters, trained and not, and canaries."""
    torch.set_num_threads(1)
    draw, root = random.Random(1), tmp_path_factory.mktemp("stranger")
    planted = [
        {"carrier": f"Gate {n}:", "secret": f"{draw.randrange(10**8):08d}", "inserted": draw.random() < 0.5, "group": 1}
        for n in range(56)
    ]
    rows = [f"{draw.choice(tiny.NAMES)} owes {draw.randrange(10**6)}." for _ in range(120)]
    texts = rows[:60] + [f"{canary['carrier']} {canary['secret']}" for canary in planted if canary["inserted"]]
    base = str(builtin.path("builtin:tiny"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    targets = ["up_proj", "down_proj", "v_proj", "o_proj"]
    settings = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=targets)
    net = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    net.save_pretrained(root / "untrained")
    optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=LEARNING_RATE)
    net.train()
    for _ in range(STEPS):
        batch = tokenizer(draw.sample(texts, BATCH), return_tensors="pt", padding=True, padding_side="right")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        net(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    net.save_pretrained(root / "adapter")
    return root, planted


def audited(adapter: Path, planted: list[Json], manifest: Path, **more: Any) -> Json:
    tiny.write_rows(manifest, [{"coins": "independent"}, *planted])
    return audit_outside(adapter, manifest, claim=CLAIM, **more).to_json()


def test_a_claim_that_the_canaries_refute_is_falsified(stranger: tuple[Path, list[Json]], tmp_path: Path) -> None:
    root, planted = stranger
    report = audited(root / "adapter", planted, tmp_path / "m.jsonl", base="builtin:tiny")
    assert report["verdict"] == "falsified"
    assert report["epsilon_lower_bound"]["value"] > 0.5
    assert report["attacks"]["ratio"]["auc"] > 0.8
    assert report["canaries"]["groups"] == {"1": {"candidates": 56, "inserted": 18}}
    assert report["model"]["base"] == "builtin:tiny"
    written = json.dumps(report)
    assert not any(canary[key] in written for canary in planted for key in ("secret", "carrier"))


@pytest.mark.parametrize("seed", [3, 4])
def test_coins_that_had_no_part_in_training_refute_nothing(
    stranger: tuple[Path, list[Json]], tmp_path: Path, seed: int
) -> None:
    root, planted = stranger
    draw = random.Random(seed)
    fresh = [{**canary, "inserted": draw.random() < 0.5} for canary in planted]
    report = audited(root / "adapter", fresh, tmp_path / "m.jsonl")
    assert report["verdict"] == "inconclusive"
    assert report["epsilon_lower_bound"]["value"] <= 0.5


def test_a_model_that_learned_nothing_gives_nothing_away(stranger: tuple[Path, list[Json]], tmp_path: Path) -> None:
    root, planted = stranger
    report = audited(root / "untrained", planted, tmp_path / "m.jsonl")
    assert (report["verdict"], report["attacks"]["ratio"]["auc"]) == ("inconclusive", 0.5)
