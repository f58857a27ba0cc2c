"""Of a run, every file is the one that it wrote, or nothing follows from it."""

import stat
from pathlib import Path
from typing import Any

import cards
import pytest

from dpllm.errors import ConfigError, Refused
from dpllm.files import digest, read_json, write_json
from dpllm.ledger import Ledger, RunRequest
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy.accounting import dp_sgd_event
from dpllm.recipe.config import dump_config
from dpllm.run.directory import RunDir, manifest_of, open_run

PRIVATE = ("canaries.json", "rows.json", "groups.json", "gradient_canaries.npy", "references.npz", "layers.json")
WRITTEN = (
    "export/adapter_model.safetensors",
    "export/tokenizer.json",
    *(f"private/{name}" for name in (*PRIVATE, "metrics.jsonl", "summary.json")),
)


def write_run(root: Path, ledger: Path | None = None) -> RunDir:
    config = cards.config(privacy={"ledger": str(ledger)} if ledger else {})
    run = cards.make_run(root, config, cards.plan(), cards.record(), None)
    for name in WRITTEN:
        if not (root / name).exists():
            (root / name).write_text("a")
    manifest = manifest_of(run, config, ended=True)
    write_json(run.run, {**cards.record(), "manifest": manifest})
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path / "run")


def test_a_run_is_opened_with_its_recipe_and_record_and_the_words_of_its_card_may_change(run: RunDir) -> None:
    opened = open_run(run)
    assert opened.config == cards.config()
    assert set(opened.record.manifest) == {"config.yaml", "plan.json", *WRITTEN}
    assert set(opened.record.artifacts) == {"adapter_model.safetensors", "tokenizer.json"}
    again = cards.config(card={"title": "Another"}, telemetry={"port": 9999})
    run.config.write_text(dump_config(again), encoding="utf-8")
    write_json(run.plan, read_json(run.plan))
    open_run(run)


@pytest.mark.parametrize("name", ["run.json", "plan.json"])
def test_a_run_of_an_earlier_version_is_told_so_and_not_that_somebody_edited_it(run: RunDir, name: str) -> None:
    write_json(run.root / name, {**read_json(run.root / name), "schema_version": 1})
    with pytest.raises(ConfigError, match=f"{name}: has schema version 1"):
        open_run(run)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_changed_file_is_named_and_a_missing_one_is_of_a_copy(run: RunDir, name: str) -> None:
    path = run.root / name
    before = path.read_bytes()
    path.write_bytes(before + b" ")
    with pytest.raises(ConfigError, match=f"{name} is not what the run wrote"):
        open_run(run)
    path.unlink()
    open_run(run)
    path.write_bytes(before)
    open_run(run)


@pytest.mark.parametrize(
    "changes",
    [{"data": {"public": True}}, {"data": {"eval_public": True}}, {"train": {"optimizer": "sgd"}},
     {"privacy": {"epsilon": 9.0}}, {"privacy": {"secure_noise": True}}],
    ids=str,
)  # fmt: skip
def test_a_changed_recipe_decides_nothing(run: RunDir, changes: dict[str, Any]) -> None:
    run.config.write_text(dump_config(cards.config(**changes)), encoding="utf-8")
    for reads in (open_run, RunDir.load_config):
        with pytest.raises(Refused, match="changed after the run"):
            reads(run)
    record = read_json(run.run)
    del record["manifest"]["config.yaml"]
    write_json(run.run, record)
    with pytest.raises(Refused, match="changed after the run"):
        open_run(run)


def test_a_changed_plan_and_added_weights_are_named(run: RunDir) -> None:
    (run.export / "more.safetensors").write_bytes(b"more")
    with pytest.raises(ConfigError, match=r"export/more\.safetensors is not"):
        open_run(run)
    (run.export / "more.safetensors").unlink()
    write_json(run.plan, {**read_json(run.plan), "epsilon": 0.1})
    with pytest.raises(ConfigError, match=r"plan\.json is not"):
        open_run(run)


def test_nobody_can_confirm_a_guess_of_private_files(tmp_path: Path) -> None:
    """Equal private files have other digests in every run, and the key is its owner's alone."""
    first, second = (write_run(tmp_path / name) for name in "ab")
    shown = [read_json(item.run)["manifest"] for item in (first, second)]
    for name in WRITTEN:
        assert (shown[0][name] == shown[1][name]) == name.startswith("export/")
    assert stat.S_IMODE(first.key.stat().st_mode) == 0o600
    first.key.unlink()
    with pytest.raises(ConfigError, match="are not what the run wrote"):
        open_run(first)
    assert not first.key.exists()


def test_of_a_run_that_goes_on_what_stood_before_its_first_step_counts(run: RunDir) -> None:
    for name in WRITTEN:
        if name != "private/canaries.json":
            (run.root / name).write_text("b")
    assert open_run(run, goes_on=True).config == cards.config()
    run.canaries.write_text("b")
    with pytest.raises(ConfigError, match=r"private/canaries\.json is not"):
        open_run(run, goes_on=True)


def test_a_manifest_that_was_changed_with_the_files_is_refused_by_the_ledger(tmp_path: Path) -> None:
    place = tmp_path / "ledger.sqlite"
    run = write_run(tmp_path / "run", place)
    record = read_json(run.run)
    event = dp_sgd_event(0.1, 2.0, 1)
    with Ledger(place) as ledger:
        entry = reserve_all(ledger, "notes", [RunRequest(event, 1e-5, 1, "example", "zero_out")])[0].entry
        record["ledger"]["entry"] = entry
        write_json(run.run, record)
        open_run(run)  # which has not ended
        ledger.charge(entry, 1)
        ledger.finish(entry, "completed", digest(record["manifest"]))
        assert ledger.closed_with(entry) == digest(record["manifest"])
    open_run(run)
    public = cards.config(data={"public": True}, privacy={"ledger": str(place)})
    run.config.write_text(dump_config(public), encoding="utf-8")
    write_json(run.run, {**record, "manifest": manifest_of(run, public, ended=True)})
    with pytest.raises(Refused, match="not the one that the ledger recorded") as caught:
        open_run(run)
    assert caught.value.reason == "tampered"
    with Ledger(place) as ledger:  # as where the process was killed before it wrote run.json
        ledger.finish(entry, "completed", digest(read_json(run.run)["manifest"]))
        assert ledger.verify() == []
    open_run(run)
