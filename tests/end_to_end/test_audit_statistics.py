"""An audit of a whole run directory: what was memorised is found, what was not is not, and no text gets out."""

from __future__ import annotations

import hashlib
import json
import math
import random

import cards
import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from dpllm.auditing import summary
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
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(inner.get_vocab()), n_embd=64, n_layer=1, n_head=4, n_positions=64)
    )
    model.save_pretrained(folder)
    return folder


def make_run(base, root, *, adapter, private=True, epsilon=8.0, planted=True):
    """A run directory as training leaves it, without weights."""
    (root / "rows.jsonl").write_text(json.dumps({"text": "Nothing to see."}) + "\n")
    config = RunConfig.model_validate(
        {
            "model": {"name_or_path": str(base)},
            "adapter": {"method": adapter},
            "data": {"train": str(root / "rows.jsonl"), "public": not private, "format": "text", "max_length": 64},
            "privacy": {"enabled": private},
            "train": {"steps": 1},
            "audit": {"canaries": CANARIES if planted else None},
            "output_dir": str(root / "run"),
        }
    )
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


def memorise(base, plan, tokenizer, *, epochs=80, whole_rows=False):
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
    assert report["canaries"]["commitment"] == plan.commitment
    assert report["canaries"]["groups"]["1"]["candidates"] == 120
    assert report["canaries"]["groups"]["1"]["inserted"] == sum(c.inserted for c in plan.canaries if c.group == 1)
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
    adapter = get_peft_model(
        GPT2LMHeadModel.from_pretrained(base), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    export(run, adapter)
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
