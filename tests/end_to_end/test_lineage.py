"""Models made from models: what the second run states, and what it may not do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger_stores import adopt
from published import edit, read
from running import Place, done, edit_json, refused, train_until
from safetensors.torch import load_file, save_file

from dpllm.errors import ConfigError, Refused
from dpllm.ledger import Ledger
from dpllm.run import base_model
from dpllm.run.checkpoint import same_lineage
from dpllm.run.directory import RunDir
from dpllm.statement import lineage, section
from dpllm.statement.formatting import bound

Json = dict[str, Any]
QUICK = ("--audit.canaries", "null")


@pytest.fixture(scope="session")
def parent(finished: Place, merged: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The finished run merged, and its ledger; read only."""
    root = tmp_path_factory.mktemp("lineage") / "parent"
    shutil.copytree(finished.root, root)
    shutil.copytree(merged, root / "clinic-notes")
    return Place(root, finished.base)


@pytest.fixture(scope="session")
def child(parent: Place, tmp_path_factory: pytest.TempPathFactory, data_home: Path) -> Place:
    """A second run with privacy on the same data, from the merged first one; read only."""
    root = tmp_path_factory.mktemp("child") / "place"
    shutil.copytree(parent.root, root)
    place = Place(root, root / "clinic-notes")
    adopt(place.ledger)
    shutil.rmtree(place.run)
    done("train", place.recipe, *again(place))
    done("card", place.run)
    return place


@pytest.fixture
def place(parent: Place, tmp_path: Path) -> Place:
    """The merged first run with its ledger and no second run yet."""
    shutil.copytree(parent.root, tmp_path / "place")
    adopt(tmp_path / "place" / "ledger.sqlite")
    shutil.rmtree(tmp_path / "place" / "run")
    return Place(tmp_path / "place", tmp_path / "place" / "clinic-notes")


def based_on(place: Place, key: str, path: Path) -> lineage.Base:
    """What a run like this one would start from, with another model or adapter."""
    base = base_model.of_base(RunDir(place.run).load_config().changed({f"model.{key}": str(path)}))
    assert base is not None
    return base


def again(place: Place, *more: object) -> tuple[object, ...]:
    """Overrides: the same data and recipe, from the model that the place has as its base, into the place's own directory."""
    paths = ("--model.name_or_path", place.base, "--privacy.ledger", place.ledger, "--output_dir", place.run)
    return (*paths, "--data.train", place.train, *QUICK, *more)


def test_two_generations_on_the_same_data_state_what_both_cost(parent: Place, child: Place) -> None:
    own, record = child.json("plan.json"), child.json("run.json")["lineage"]
    base = read(parent.root / "clinic-notes")
    stated = {name: record["base"][name] for name in ("name", "epsilon", "entry")}
    due = {"name": "clinic-notes", "epsilon": base["plan"]["epsilon"], "entry": base["composed"]["entry"]}
    assert stated == due
    assert (record["same_dataset"], record["dataset"]) == (True, "notes")
    composed = record["composed"]["epsilon"]
    assert max(own["epsilon"], base["plan"]["epsilon"]) < composed <= own["epsilon"] + base["plan"]["epsilon"]
    # The ledger, which knows both runs, comes to the same.
    assert composed == pytest.approx(child.json("run.json")["ledger"]["spent_epsilon"], rel=1e-6)
    block = child.json("export/privacy.json")
    assert (block["lineage"], block["guarantee"]) == (record, True)
    assert block["plan"] == own  # this run's own, beside what both cost
    text = section.parts(child.card)["privacy"]
    assert "clinic-notes" in text
    assert f"ε = {composed:.2f}"[:6] in text
    # The child's weights contain the parent's: their epsilon, not the run's own, is that of the card.
    assert section.parts(child.card)["banner"].startswith(
        f"> **Differential privacy guarantee: ε = {bound(composed)}, "
    )
    assert section.front_matter(child.card)["privacy"]["epsilon"] == composed
    done("verify", child.run)


def test_a_baseline_without_privacy_on_local_data_is_known_by_its_account(place: Place, base: Path) -> None:
    """Its ledger has no entry for it; a mutant knew it by the name of the file, and gave what started from it a guarantee."""
    plain = Place(place.root, base)
    done("ledger", "except", "notes", "--by", "ada", "--reason", "a baseline", "--ledger", place.ledger)
    done("train", place.recipe, *again(plain, "--privacy.enabled", "false"))
    done("card", place.run)
    assert place.json("export/privacy.json")["dataset"] == place.json("run.json")["dataset"] == "notes"
    adapter = shutil.copytree(place.run / "export", place.root / "exported")
    shutil.rmtree(place.run)
    words = again(plain, "--model.adapter", adapter)
    done("train", place.recipe, *words)
    reason = place.json("run.json")["guarantee"]["reason"]
    assert "was trained on the same dataset (notes) without a guarantee" in reason
    shutil.rmtree(place.run)
    # The ledger learns of it from a sweep too.
    done("sweep", place.recipe, *words, "--privacy.epsilon", "4,8", "--train.steps", 1)
    with Ledger(place.ledger) as ledger:
        assert [run.reservation.flaw is not None for run in ledger.runs("notes")][-2:] == [True, True]


def test_a_third_generation_carries_the_first_on(child: Place, tmp_path: Path) -> None:
    done("merge", child.run, "--output", tmp_path / "third")
    done("verify", tmp_path / "third")
    base = based_on(child, "name_or_path", tmp_path / "third")
    assert base.statement.name == "third"
    assert [ancestor.name for ancestor in base.ancestors] == ["clinic-notes"]
    assert base.ancestors[0].to_json() == child.json("run.json")["lineage"]["base"]


def test_an_adapter_is_started_from_on_the_statement_that_it_was_trained_on(child: Place, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(child.run / "export", tmp_path / "adapter"))
    base = based_on(child, "adapter", folder)
    names = [(item.name, item.adapter) for item in (base.statement, *base.ancestors)]
    assert names == [("adapter", True), ("clinic-notes", False)]
    # What the adapter's block says of its base counts only where the base says it too.
    stated = read(folder)["lineage"]
    denied = {"same_dataset": False, "dataset": None, "composed": None, "reason": "other data"}
    edit_json(folder / "privacy.json", lineage={**stated, **denied, "base": {**stated["base"], "dataset": "other"}})
    assert based_on(child, "adapter", folder) == base
    for name in ("privacy.json", "README.md"):
        (folder / name).unlink()
    with pytest.raises(Refused, match="does not name the privacy statement of clinic-notes"):
        based_on(child, "adapter", folder)


def test_a_resumed_run_stands_on_the_base_that_it_started_from(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changed: the files, the statement alone, a statement that is gone."""
    every = ("--train.checkpoint_every", "1")
    train_until(monkeypatch, 3, place.recipe, *again(place, *every))
    block, card, run = place.base / "privacy.json", place.base / "README.md", RunDir(place.run)
    resume = ("train", place.recipe, *again(place, *every), "--resume")
    statement, text, record = block.read_bytes(), card.read_bytes(), run.run.read_bytes()
    edit_json(block, composed={**json.loads(statement)["composed"], "entry": "0" * 16})
    assert "model.name_or_path no longer holds the files and the privacy statement that" in refused(*resume, code=3)
    block.unlink()
    card.unlink()
    assert "none is found now: it was removed, or the Hub cannot be reached" in refused(*resume, code=3)
    earlier = edit_json(run.run, lineage=None)
    block.write_bytes(statement)
    card.write_bytes(text)
    assert "model.name_or_path no longer holds" in refused(*resume, code=3)
    del earlier["lineage"]  # of a version that wrote none
    run.run.write_text(json.dumps(earlier))
    same_lineage(None, run.load_config(), run)
    run.run.write_bytes(record)
    done(*resume)
    assert place.json("run.json")["lineage"]["base"]["name"] == "clinic-notes"


def test_a_base_that_was_exchanged_is_not_merged_into(child: Place, tmp_path: Path) -> None:
    shutil.copytree(child.root, tmp_path / "place")
    copy = Place(tmp_path / "place", tmp_path / "place" / "clinic-notes")
    edit(copy.run / "config.yaml", str(child.base), str(copy.base))
    done("merge", copy.run, "--output", tmp_path / "well")
    for name in ("privacy.json", "README.md"):
        (copy.base / name).unlink()
    message = refused("merge", copy.run, "--output", tmp_path / "out", code=3)
    assert "is not the base model that the run was trained on" in message
    assert not (tmp_path / "out").exists()


def test_nothing_is_promised_after_a_run_without_privacy_on_the_same_data(place: Place) -> None:
    done("train", place.recipe, *again(place, "--privacy.enabled", "false", "--data.public", "true"))
    place.does("card", "verify")
    assert place.json("run.json")["lineage"]["reason"].startswith("this run gives no guarantee")
    assert "No differential privacy guarantee" in section.parts(place.card)["banner"].splitlines()[0]
    # Whoever goes on from there with privacy has none for these data: the base holds them already.
    done("merge", place.run, "--output", place.root / "leaky")
    leaky = Place(place.root, place.root / "leaky")
    shutil.rmtree(place.run)
    done("train", place.recipe, *again(leaky))
    place.does("card", "verify")
    record = place.json("run.json")
    assert (record["guarantee"]["holds"], record["lineage"]["composed"]) == (False, None)
    assert "leaky, which was trained on the same dataset (notes) without a guarantee" in record["guarantee"]["reason"]
    assert place.json("export/privacy.json")["guarantee"] is False


def _weights(base: Path) -> None:
    path = base / "model.safetensors"
    save_file({name: tensor + 1e-3 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def _half_epsilon(base: Path) -> None:
    plan = read(base)["plan"]
    edit_json(base / "privacy.json", plan={**plan, "epsilon": plan["epsilon"] / 2})


OTHER_FILES = "is not the file that its privacy.json describes"
LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (_weights, OTHER_FILES),
    "another file of weights": (lambda base: (base / "pytorch_model.bin").write_bytes(b"0"), OTHER_FILES),
    "tokenizer": (lambda base: (base / "tokenizer.json").unlink(), OTHER_FILES),
    "epsilon": (_half_epsilon, "its own event costs"),
    "key": (lambda base: edit_json(base / "privacy.json", unheard_of=1), "is not a privacy block"),
    "no block": (lambda base: (base / "privacy.json").unlink(), "privacy.json is missing"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_base_that_lies_is_refused(place: Place, name: str) -> None:
    lie, message = LIES[name]
    lie(place.base)
    before = (place.base.parent / "ledger.sqlite").read_bytes()
    assert message in refused("plan", place.recipe, *again(place), code=3)
    assert (place.base.parent / "ledger.sqlite").read_bytes() == before


@pytest.fixture
def hub(parent: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of org/clinic-notes in a cache of the Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--org--clinic-notes"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(parent.root / "clinic-notes", repository / "snapshots" / ("0" * 40))
    return repository / "snapshots" / ("0" * 40)


@pytest.mark.parametrize("fetch", [True, False])
def test_a_model_of_the_hub_is_read_where_it_is_cached(parent: Place, hub: Path, fetch: bool) -> None:
    config = RunDir(parent.run).load_config()

    def seen(name: str) -> lineage.Base | None:
        return base_model.of_base(config.changed({"model.name_or_path": name}), fetch=fetch)

    local, cached = seen(str(parent.root / "clinic-notes")), seen("org/clinic-notes")
    assert local is not None
    assert cached is not None
    assert cached.statement == local.statement.model_copy(update={"name": "org/clinic-notes"})
    assert seen("org/nothing") is None
    files = read(hub)["files"]
    others = {name: sha for name, sha in files.items() if name not in ("config.json", "model.safetensors")}
    edit_json(hub / "privacy.json", files={**others, "adapter_config.json": "0" * 64})
    with pytest.raises(ConfigError, match="is an adapter"):
        seen("org/clinic-notes")
    edit_json(hub / "privacy.json", files=files)
    _weights(hub)
    with pytest.raises(Refused, match=r"is not the file that its privacy\.json describes"):
        seen("org/clinic-notes")
