"""Attacks on a published run that verification once let through."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import published
import pyarrow as pa
import pytest
import yaml
from published import carry, failing, read, rehash, write
from pyarrow import parquet
from running import Place, as_trained, contents, done, dpllm_, refused

import dpllm
from dpllm.card.card import write_card
from dpllm.errors import Refused
from dpllm.publish import push
from dpllm.recipe.config import RunConfig
from dpllm.releases import leaks
from dpllm.run import base_model
from dpllm.run.directory import RunDir


@pytest.fixture
def run(finished: Place, tmp_path: Path) -> Path:
    shutil.copytree(finished.run, tmp_path / "run", copy_function=shutil.copy2)
    return tmp_path / "run"


def test_a_card_at_the_top_is_the_one_that_is_verified(run: Path) -> None:
    """Who publishes a forged card beside the run directory of an honest run is not verified by the latter."""
    for path in (run / "export").iterdir():
        if path.is_file():
            shutil.copy(path, run / path.name)
    (run / "README.md").write_text("# epsilon is 0.01\n", encoding="utf-8")
    assert {"front matter", "marked parts", "files"} <= failing(run)
    (run / "privacy.json").unlink()
    assert failing(run)


def test_an_audit_that_was_made_cannot_be_left_out(run: Path) -> None:
    shutil.rmtree(run / "export" / "audit")
    write_card(RunDir(run))
    assert failing(run) == {"audit: canaries"}
    assert dpllm_("push", run, "alice/notes", "--dry-run").code == 3


def test_a_card_that_would_not_verify_is_not_written(run: Path, finished: Place) -> None:
    """Whatever it would say: the files stay as they were, a signature of theirs included."""
    with open(run / "private" / "audits.jsonl", "a", encoding="utf-8") as file:
        file.write("{}\n")
    config = run / "config.yaml"
    config.write_text(config.read_text("utf-8").replace("contact: null", "contact: bob@example.org"), encoding="utf-8")
    (run / "export" / "model.sig").write_text("of the former card", encoding="utf-8")
    (run / "export" / "privacy.svg").unlink()
    before = contents(run)
    message = refused("card", run, code=3)
    assert "does not verify" in message
    assert "audit: canaries" in message
    assert contents(run) == before
    with pytest.raises(Refused):
        dpllm.write_card(run)
    assert contents(run) == before
    shutil.copy(finished.run / "private" / "audits.jsonl", run / "private")
    (run / "export" / "model.sig").unlink()
    done("card", run)
    assert "bob@example.org" in (run / "export" / "README.md").read_text("utf-8")
    assert not failing(run)


def test_a_recipe_without_a_guarantee_has_none_whatever_the_record_says(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    config["privacy"]["insecure_seed"] = 7
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert "run" in failing(run)
    assert "changed after the run" in refused("card", run, code=3)
    as_trained(run)
    assert "not the one that the ledger was told" in refused("card", run, code=3)
    config["privacy"]["ledger"] = str(run / "elsewhere.sqlite")
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    done("card", run)
    block = read(run / "export")
    assert not block["guarantee"]
    assert "seeded" in block["reason"]


def _secret(run: Path) -> str:
    record = json.loads((run / "private" / "canaries.json").read_text("utf-8"))["canaries"]
    secrets = (str(canary["secret"]).strip() for canary in record)
    return next(secret for secret in secrets if secret[0] != "0")  # a number would lose its first digit


HIDINGS: dict[str, Callable[[str], bytes]] = {
    "chat_template.jinja": str.encode,
    "special_tokens_map.json": lambda text: json.dumps({"n": int(text)}).encode(),
    "generation_config.json": lambda text: json.dumps({"n": f"x_{text}_x"}).encode(),
    "config.json": lambda text: json.dumps({"a": "lorem " * 200_000, "n": text}).encode(),
    "tokenizer_config.json": lambda text: json.dumps({"n": text}).encode(),
}


def _assert_a_canary_is_found(run: Path) -> None:
    directory = RunDir(run)
    names = [path.relative_to(directory.export).as_posix() for path in directory.export.rglob("*") if path.is_file()]
    with pytest.raises(Refused, match="contains text of a canary"):
        leaks.search(directory, names, directory.export)


@pytest.mark.parametrize("name", HIDINGS)
def test_a_canary_is_found_in_a_file_of_any_kind(run: Path, name: str) -> None:
    """Also in one that an export may hold."""
    (run / "export" / name).write_bytes(HIDINGS[name](_secret(run)))
    _assert_a_canary_is_found(run)


def test_a_canary_is_found_in_the_description_of_a_safetensors_file(run: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = run / "export" / "adapter_model.safetensors"
    save_file(load_file(path), path, metadata={"note": _secret(run)})
    _assert_a_canary_is_found(run)


def _parent(block: published.Json, **other: object) -> published.Json:
    names = ("epsilon", "delta", "unit", "neighbouring_relation", "event")
    terms = {name: block["plan"][name] for name in names}
    return {
        "name": "m", "guarantee": True, **terms, "dataset": "notes", "entry": "0" * 16,
        "files_digest": "0" * 64, **other,
    }  # fmt: skip


def test_a_lineage_cannot_deny_the_common_dataset_or_add_other_units(run: Path) -> None:
    from dpllm.privacy import accounting, events

    export = run / "export"
    block = read(export)
    plan = block["plan"]
    total = accounting.epsilon(accounting.compose([events.read(plan["event"])] * 2), plan["delta"], "zero_out")
    composed = {"epsilon": total, "delta": plan["delta"], "accountant": "dp-accounting PLD"}
    honest = {
        "base": _parent(block), "ancestors": [], "same_dataset": True, "dataset": "notes", "composed": composed,
        "reason": None,
    }  # fmt: skip
    denied = {**honest, "same_dataset": False, "dataset": None, "composed": None, "reason": "other data"}
    for stated, wrong in (
        (honest, False),
        (denied, True),
        ({**honest, "composed": None, "reason": "the author says so"}, True),
        ({**honest, "base": _parent(block, unit="author")}, True),
        ({**honest, "ancestors": [_parent(block, dataset="other")] * 20}, True),
    ):
        carry(export, {**block, "lineage": stated})
        assert ("lineage" in failing(export)) is wrong


def test_a_few_bytes_cannot_fill_the_memory(run: Path) -> None:
    export = run / "export"
    path = export / "audit" / "tokens.parquet"
    table = parquet.read_table(path)
    columns = {name: table[name].to_numpy()[:1].repeat(20_000) for name in table.column_names}
    names = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["c" + "0" * 1_000_000]))
    parquet.write_table(pa.table({**columns, "canary_id": names}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    rehash(export, "audit/tokens.parquet")
    assert "audit" in failing(export)  # 20 GB otherwise


def test_events_that_take_minutes_are_refused(run: Path) -> None:
    export = run / "export"
    block = read(export)
    for numbers, checks in (({"noise_multiplier": 1e-6}, {"promise"}), ({"num_steps": 10**12}, {"promise"})):
        write(export, published.replanned(block, **numbers))
        assert checks <= failing(export)
    step = block["plan"]["event"]
    many = [{**step, "event": {**step["event"], "probability": 0.1 + number / 1000}} for number in range(20)]
    for event in ({**step, "count": 10**15}, {"type": "composed", "events": many}):  # nothing else is computed
        write(export, {**block, "plan": {**block["plan"], "event": event}})
        assert "card" in failing(export)


def test_a_file_that_changes_before_it_is_sent_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    sent: list[object] = []
    monkeypatch.setattr(hub.HfApi, "create_repo", lambda *_, **__: type("Repo", (), {"repo_id": "alice/notes"}))
    monkeypatch.setattr(hub.HfApi, "create_commit", lambda *_, **__: sent.append(1))

    def meanwhile(*_: object, **__: object) -> SimpleNamespace:
        (run / "export" / "README.md").write_text("something else", encoding="utf-8")
        return SimpleNamespace(siblings=[])

    monkeypatch.setattr(hub.HfApi, "model_info", meanwhile)
    with pytest.raises(Refused, match="changed while"):
        push.push(run, "alice/notes")
    assert not sent


@pytest.mark.parametrize("listed", ["none.safetensors", "model.safetensors"])
def test_a_statement_beside_other_weights_on_the_hub_is_refused(
    run: Path, finished: Place, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    export = run / "export"
    write(export, {**read(export), "files": {"config.json": "0" * 64, listed: "1" * 64}})
    (export / "model.safetensors").write_bytes(b"other weights")
    hub_files = {path.name: path for path in export.iterdir()}
    monkeypatch.setattr(base_model, "_hub_file", lambda _, file, *__: hub_files.get(file))
    recipe = yaml.safe_load(finished.recipe.read_text("utf-8"))
    recipe["model"]["name_or_path"] = "alice/private-model"
    with pytest.raises(Refused, match="is not the file"):
        base_model.of_base(RunConfig.model_validate(recipe))
