"""What may lie in export/: all that peft and transformers write there, and no setting that leads to code elsewhere."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dpllm import files
from dpllm.errors import ConfigError
from dpllm.ledger import Ledger
from dpllm.run.checkpoint import export
from dpllm.run.directory import RunDir


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_an_export_holds_nothing_that_is_not_known(tmp_path: Path, family: str, lora: bool) -> None:
    model = tiny.model(family)
    if lora:
        modules = {"target_modules": "all-linear", "modules_to_save": ["lm_head"], "rank_pattern": {"lm_head": 3}}
        model = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", **modules))
    run = RunDir(tmp_path)
    export(model, tiny.tokenizer(), run)
    assert not files.unknown(files.hashes(run.export))
    for path in run.export.glob("*.json"):
        settings = json.loads(path.read_text("utf-8"))
        assert files.publishable(path.name, settings) == settings, path.name


def test_the_configuration_of_every_architecture_may_be_published() -> None:
    checked = 0
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            settings = json.loads(AutoConfig.for_model(name).to_json_string())
        except (ValueError, StrictDataclassError):  # it has no defaults
            continue
        assert files.publishable("config.json", settings) == settings, name
        checked += 1
    assert checked > 100


def test_code_that_the_base_model_names_is_not_exported(tmp_path: Path) -> None:
    """transformers writes it again, with the repository that the base came from."""
    model, tokenizer, run = tiny.model(), tiny.tokenizer(), RunDir(tmp_path)
    model.config.auto_map = {"AutoModelForCausalLM": "alice/code--modeling.Model"}
    tokenizer._auto_map = {"AutoTokenizer": ["alice/code--tokenization.Tokenizer", None]}
    export(model, tokenizer, run)
    assert not any(b"alice" in path.read_bytes() for path in run.export.glob("*.json"))
    assert tiny.tokenizer().get_vocab() == type(tokenizer).from_pretrained(run.export).get_vocab()


def test_a_lock_holds_one_at_a_time_however_many_come_and_go(tmp_path: Path) -> None:
    path, inside, counts = tmp_path / ".lock", [0], []

    def work() -> None:
        for _ in range(300):
            with files.locked(path):
                inside[0] += 1
                counts.append(inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1] * 1800
    assert not path.exists()


def test_a_file_system_without_locks_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in ("flock", "lockf"):
        monkeypatch.setattr(f"fcntl.{function}", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    for lock in (files.locked(tmp_path / "x"), RunDir(tmp_path).locked()):
        with pytest.raises(ConfigError, match="has no locks"), lock:
            pass
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"No locks available.*local disk"):  # and not after a minute of waiting
            Ledger(tmp_path / "ledger.sqlite")


def test_copies_of_rows_go_with_the_next_command_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = (
        "import os, signal\nfrom dpllm.files import scratch\n"
        "with scratch() as place:\n (place / 'rows').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(files.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", killed], env=env, check=False).returncode == -9
    (left_behind,) = tmp_path.rglob("rows")
    with files.scratch() as folder:
        assert not left_behind.exists()
        (folder / "rows").touch()
        with files.scratch():
            assert (folder / "rows").exists()  # of a command that goes on
        assert folder.stat().st_mode & 0o077 == folder.parent.stat().st_mode & 0o077 == 0
    assert list(folder.parent.iterdir()) == []
    folder.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="other users may read it"), files.scratch():
        pass
