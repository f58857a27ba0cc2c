"""A stranger's adapter, trained with plain peft and transformers, audited by its canaries."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny

from dpllm.auditing.outside import audit_outside, outside_claim
from dpllm.text import builtin

Json = dict[str, Any]
STEPS, BATCH, LEARNING_RATE = 80, 26, 5e-3
CLAIM = outside_claim(0.5, 1e-5)


@dataclass(frozen=True)
class Stranger:
    """What somebody has who trained without dpllm."""

    adapter: Path
    untrained: Path
    canaries: list[Json]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    draw, root = random.Random(1), tmp_path_factory.mktemp("stranger")
    canaries = [
        {"carrier": f"Gate {n}:", "secret": f"{draw.randrange(10**8):08d}", "inserted": draw.random() < 0.5, "group": 1}
        for n in range(56)
    ]
    rows = [f"{draw.choice(tiny.NAMES)} owes {draw.randrange(10**6)}." for _ in range(120)]
    texts = rows[:60] + [f"{canary['carrier']} {canary['secret']}" for canary in canaries if canary["inserted"]]
    base = str(builtin.path("builtin:tiny"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    targets = ["up_proj", "down_proj", "v_proj", "o_proj"]
    net = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=targets),
    )
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
    return Stranger(root / "adapter", root / "untrained", canaries)


def manifest(path: Path, canaries: list[Json], header: Json | None) -> Path:
    lines = [*([header] if header else []), *canaries]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_claim_that_the_canaries_refute_is_falsified(stranger: Stranger, tmp_path: Path) -> None:
    path = manifest(tmp_path / "m.jsonl", stranger.canaries, {"coins": "independent"})
    report = audit_outside(stranger.adapter, path, base="builtin:tiny", claim=CLAIM).to_json()
    assert report["verdict"] == "falsified"
    assert report["epsilon_lower_bound"]["value"] > 0.5
    assert report["attacks"]["ratio"]["auc"] > 0.8
    assert report["canaries"]["groups"] == {"1": {"candidates": 56, "inserted": 18}}
    assert report["model"]["base"] == "builtin:tiny"
    written = json.dumps(report)
    assert not any(canary[key] in written for canary in stranger.canaries for key in ("secret", "carrier"))


@pytest.mark.parametrize("seed", [3, 4])
def test_coins_that_had_no_part_in_training_refute_nothing(stranger: Stranger, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    fresh = [{**canary, "inserted": draw.random() < 0.5} for canary in stranger.canaries]
    path = manifest(tmp_path / "m.jsonl", fresh, {"coins": "independent"})
    report = audit_outside(stranger.adapter, path, claim=CLAIM).to_json()
    assert report["verdict"] == "inconclusive"
    assert report["epsilon_lower_bound"]["value"] <= 0.5


def test_a_model_that_learned_nothing_gives_nothing_away(stranger: Stranger, tmp_path: Path) -> None:
    path = manifest(tmp_path / "m.jsonl", stranger.canaries, {"coins": "independent"})
    report = audit_outside(stranger.untrained, path, claim=CLAIM).to_json()
    assert report["verdict"] == "inconclusive"
    assert report["attacks"]["ratio"]["auc"] == 0.5
