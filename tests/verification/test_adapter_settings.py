"""What an audit is about: the weights, and the settings that say how they are applied."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from cards import HASH, TOKENIZER, audit, config, make_run, plan, record
from published import rehash

from dpllm.card.card import write_card
from dpllm.verification.values import Check
from dpllm.verification.verify import verify

NAME, SETTINGS = "adapter_config.json", {"peft_type": "LORA", "lora_alpha": 16, "r": 8}


def export(root: Path, named: bool) -> Path:
    """A published adapter whose audit names its settings, or is of a version that named none."""
    text = json.dumps({**SETTINGS, "base_model_name_or_path": "openai-community/gpt2"}).encode()
    weights = {"adapter_model.safetensors": HASH, NAME: hashlib.sha256(text).hexdigest()}
    happened = record(artifacts={**weights, "tokenizer.json": hashlib.sha256(TOKENIZER).hexdigest()})
    of_audit = weights if named else {"adapter_model.safetensors": HASH}
    run = make_run(root, config(), plan(), happened, audit(weights=of_audit))
    (run.export / NAME).write_bytes(text)
    write_card(run)
    return run.export


def of_weights(folder: Path) -> Check:
    """The line of the audit's weights, or of whatever ended the audit before it."""
    return next(check for check in verify(folder).checks if check.name in ("audit: weights", "audit"))


@pytest.mark.parametrize("named", [True, False])
def test_a_changed_scale_is_never_under_a_verified_line(tmp_path: Path, named: bool) -> None:
    folder = export(tmp_path / "run", named)
    before = of_weights(folder)
    assert before.status == ("verified" if named else "asserted")
    assert NAME in before.detail
    path = folder / NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 48}), encoding="utf-8")
    rehash(folder, NAME)
    after = of_weights(folder)
    assert after.status == ("failed" if named else "asserted")
    assert ("other weights" if named else NAME) in after.detail
