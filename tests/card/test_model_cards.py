"""The cards in model_cards/ are what their run.json, plan.json, recipe and audit give, byte for byte, and verify."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from cards import audit, baseline, baseline_record, broken, config, make_run, plan, record, words

from dpllm.card.card import rendered, write_card
from dpllm.cli import main
from dpllm.errors import ConfigError, Refused
from dpllm.files import BLOCK, CARD, read_json, write_json
from dpllm.recipe import names
from dpllm.recipe.config import dump_config
from dpllm.run.directory import RunDir
from dpllm.statement import privacy_record
from dpllm.statement.tradeoff_figure import FILE
from dpllm.verification.verify import verify

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import model_cards  # noqa: E402

MODEL_CARDS = ROOT / "model_cards"
DATA_SETS = sorted(path.parent for path in MODEL_CARDS.glob("*/synthetic.json"))
PAGES = sorted(
    {*MODEL_CARDS.glob("*/export/README.md"), *(page for place in DATA_SETS for page in place.rglob("README.md"))}
)
GALLERY = sorted(path.parent.name for path in MODEL_CARDS.glob("*/config.yaml"))
RUNS = {
    "dp": (config(), plan(), record(), audit()),
    "unaudited": (config(card={"title": "Notes"}), plan(), record(), None),
    "broken": (config(privacy={"insecure_seed": 7}), plan(), broken(), audit()),
    "baseline": (baseline(), None, baseline_record(), audit()),
}


def publish(run: RunDir, to: Path) -> Path:
    """A run as model_cards/ holds it, of which somebody took the weights and the tokenizer."""
    model_cards.copy(run, to)
    for name in ("adapter_model.safetensors", "tokenizer.json"):
        (to / "export" / name).unlink()
    return to


def assert_same(directory: Path) -> None:
    made, folder = rendered(RunDir(directory)), directory / "export"
    for name, text in made.items():
        assert (folder / name).read_bytes() == text.encode(), f"{directory.name}/{name}"
    assert (FILE in made) == (folder / FILE).exists()


@pytest.mark.parametrize("name", GALLERY)
def test_every_published_card_is_what_its_run_gives_and_verifies(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_same(MODEL_CARDS / name)
    export = MODEL_CARDS / name / "export"
    wrong = {check.name for check in verify(MODEL_CARDS / name).checks if check.status == "failed"}
    assert not wrong
    assert main(["verify", str(export)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_published_card_is_read_in_a_few_minutes(page: Path) -> None:
    """At most 900 words stand before the tables of the appendix, and one limit on how many are recognised."""
    text = page.read_text("utf-8")
    assert 100 < words(text) <= 900
    assert len(re.findall("recognises at most", text)) == ("guarantee: true" in text)
    assert "100% true positives" not in text


def test_a_copy_of_a_run_is_not_looked_for_in_the_ledger_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Its recipe names none, and it was not trained here: whoever has runs of their own can verify it all the same."""
    own = ("--epsilon", "8", "--delta", "1e-5", "--by", "ada", "--reason", "own runs")
    assert main(["ledger", "init", "notes", *own]) == 0
    assert main(["verify", str(MODEL_CARDS / "clinic-epsilon-8")]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("folder", DATA_SETS, ids=lambda folder: folder.name)
def test_the_published_data_set_verifies_as_it_lies_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not verify(folder).failed
    assert main(["verify", str(folder)]) == 0, capsys.readouterr().out
    assert privacy_record.read(read_json(folder / "run" / BLOCK)).statistics is not None


@pytest.mark.parametrize("name", RUNS)
def test_a_card_is_made_again_without_the_weights(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", *RUNS[name])
    write_card(run)
    assert_same(run.root)
    published = publish(run, tmp_path / "model_cards" / name)
    shutil.rmtree(run.root)
    assert_same(published)
    written = b"".join(path.read_bytes() for path in published.rglob("*") if path.is_file())
    assert b"alice" not in written.replace((published / "run.json").read_bytes(), b"")


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "plan.json", "run.json", *(f"export/{name}" for name in ("audit/audit.json", CARD, BLOCK, FILE))],
)
def test_any_edit_is_found(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", *RUNS["dp"])
    write_card(run)
    published = publish(run, tmp_path / "card")
    path = published / name
    text = path.read_text(encoding="utf-8")
    words = ("learning_rate: 0.001", "0.9184", "2359296", "0.531", "the rest", "Helvetica")
    old = next(word for word in words if word in text)
    path.write_text(text.replace(old, old[:-1] + "3" + old[-1:], 1), encoding="utf-8")
    with pytest.raises((AssertionError, ConfigError, Refused)):
        assert_same(published)


def test_a_recipe_that_is_published_names_no_place_and_no_seed(tmp_path: Path) -> None:
    secret = config(
        privacy={"insecure_seed": 918273645, "ledger": "postgresql://ada:secret@db/ledger"},
        telemetry={"textfile": "/var/lib/metrics"},
        model={"name_or_path": "/home/alice/base"},
    )
    text = dump_config(names.publishable(secret))
    for word in ("alice", "secret", "918273645", "/var", "/home"):
        assert word not in text
    assert names.publishable(names.publishable(secret)) == names.publishable(secret)


def test_the_digest_of_a_recipe_follows_its_settings_and_not_its_places() -> None:
    digest = names.digest(config())
    moved = config(model={"name_or_path": "/models/gpt2"}, data={"train": "/d/notes.jsonl"}, output_dir="/elsewhere/x")
    assert names.digest(moved) == digest
    assert names.digest(names.publishable(config())) == digest
    for change in ({"train": {"learning_rate": 0.1}}, {"data": {"max_length": 9}}, {"privacy": {"epsilon": 2.0}}):
        assert names.digest(config(**change)) != digest
    seeds = {names.digest(config(privacy={"insecure_seed": seed})) for seed in (1, 2, 3)}
    assert len(seeds) == 1  # else the seed could be searched for
    assert digest not in seeds


def test_a_card_whose_weights_are_gone_does_not_verify(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *RUNS["dp"])
    (run.export / "adapter_model.safetensors").unlink()
    write_card(run)
    (missing,) = (check.detail for check in verify(run.root).checks if check.name == "files")
    assert "missing: adapter_model.safetensors" in missing


def test_a_figure_and_a_signature_of_another_statement_go(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *RUNS["dp"])
    write_card(run)
    signature = run.export / "model.sig"
    signature.write_text("signed")
    write_card(run)
    assert signature.exists()  # the files are the same
    with open(run.export / "README.md", "a", encoding="utf-8") as file:
        file.write("Edited by hand.\n")
    write_card(run)
    assert not signature.exists()
    signature.write_text("signed")
    write_json(run.run, {**broken(), "manifest": read_json(run.run)["manifest"]})
    write_card(run)
    assert not signature.exists()
    assert not (run.export / FILE).exists()
