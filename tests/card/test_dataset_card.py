"""The card of a synthetic data set: what datasets loads, what it states with a guarantee, and what it does not without one."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cards import assert_golden
from published import failing
from written_rows import COST, ROWS, SHARES, make_data_set, make_run, record, released

from dpllm.card import synthetic
from dpllm.card.synthetic import Synthetic, write_dataset_card
from dpllm.cli import main
from dpllm.errors import ConfigError
from dpllm.privacy.accounting import compose, epsilon
from dpllm.privacy.events import PureDP
from dpllm.privacy.limits import attacker_limits
from dpllm.records import NotAStatement
from dpllm.statement import formatting, privacy_record, section, tradeoff_figure
from dpllm.statement.privacy_record import ComposedLineage, Lineage

TWENTY = Lineage.model_construct(composed=ComposedLineage(epsilon=20.0, delta=1e-5, accountant="PLD"))
GOLDEN = Path(__file__).parents[1] / "golden" / "synthetic.md"


def page(folder: Path) -> str:
    return (folder / "README.md").read_text("utf-8")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("card")
    return make_data_set(make_run(place / "run", statistics=released()), place / "set")


@pytest.fixture(scope="module")
def statement(folder: Path) -> Any:
    return privacy_record.read(json.loads((folder / "run" / "privacy.json").read_text("utf-8")))


def test_datasets_loads_exactly_the_rows_as_text(folder: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    dataset = load_dataset(str(folder), cache_dir=str(tmp_path))
    assert list(dataset) == ["train"]
    assert dataset["train"].to_list() == ROWS
    assert dataset["train"].column_names == ["visit", "text"]


def test_epsilon_is_of_model_and_statistics_together(folder: Path, statement: Any) -> None:
    terms = statement.plan
    together = epsilon(compose([terms.event, PureDP(COST["epsilon"])]), terms.delta, terms.neighbouring_relation)
    assert together > terms.epsilon
    front = section.front_matter(page(folder))
    assert front["privacy"]["epsilon"] == pytest.approx(together, rel=1e-9)
    first = section.parts(page(folder), synthetic.PARTS)["synthetic"].splitlines()[0]
    assert f"ε = {formatting.bound(together)}, δ = 1e-05 for each training example" in first


def test_epsilon_counts_the_models_before_it_on_the_same_dataset_and_the_statistics(statement: Any) -> None:
    after = statement.model_copy(update={"lineage": TWENTY})
    assert synthetic.epsilon(after) == 20.0 + COST["epsilon"]
    assert synthetic.epsilon(after.model_copy(update={"statistics": None})) == 20.0
    alone = statement.model_copy(update={"statistics": None})
    assert synthetic.epsilon(alone) == statement.plan.epsilon < synthetic.epsilon(statement)


def test_the_share_that_is_recognised_counts_the_statistics_and_the_models_before(folder: Path, statement: Any) -> None:
    most = synthetic.recognised(statement)
    assert f"at most {formatting.percent_bound(most)} of the training examples" in page(folder)
    alone = statement.model_copy(update={"statistics": None})
    assert synthetic.recognised(alone) == tradeoff_figure.recognised(statement.plan) < most < 0.5
    after = alone.model_copy(update={"lineage": TWENTY})
    assert synthetic.recognised(after) == attacker_limits(20.0, statement.plan.delta)["tpr_at_fpr_0.01"]


def test_the_front_matter_is_what_the_hub_and_datasets_read(folder: Path) -> None:
    front = yaml.safe_load(page(folder).split("---\n")[1])
    assert front["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train.jsonl"}]}
    ]
    assert (front["license"], front["language"], front["task_categories"]) == ("cc0-1.0", "en", ["text-generation"])
    assert front["tags"] == ["synthetic", "dpllm", "differential-privacy"]


def test_the_card_of_the_run_lies_beside_it_byte_for_byte(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", statistics=released())
    folder = make_data_set(run, tmp_path / "set")
    for name in ("README.md", "privacy.json"):
        assert (folder / "run" / name).read_bytes() == (run.export / name).read_bytes()
    before = contents(folder)
    write_dataset_card(folder, run)
    assert contents(folder) == before


@pytest.mark.parametrize("what", ["weights", "shares", "a figure of the card"])
def test_rows_of_another_model_or_release_get_no_card_of_this_one(tmp_path: Path, what: str) -> None:
    """Whoever trains again with a smaller epsilon in the same directory has the former rows there still."""
    run = make_run(tmp_path / "run", statistics=released())
    folder = make_data_set(run, tmp_path / "set")
    block = json.loads((run.export / "privacy.json").read_text("utf-8"))
    if what == "weights":
        block["files"]["adapter_model.safetensors"] = "0" * 64
    elif what == "shares":
        block["statistics"]["releases"][0]["entry"] = "another"
    else:
        block["hardware"] = {}
    (run.export / "privacy.json").write_text(json.dumps(block), encoding="utf-8")
    before = contents(folder)
    if what == "a figure of the card":
        write_dataset_card(folder, run)
        assert (folder / "run" / "privacy.json").read_bytes() == (run.export / "privacy.json").read_bytes()
        return
    for missing in (False, True):
        if missing:
            (folder / "run" / "privacy.json").unlink()
            del before[folder / "run" / "privacy.json"]
        with pytest.raises(ConfigError, match="these rows come from other weights"):
            write_dataset_card(folder, run)
        assert contents(folder) == before


def test_without_a_guarantee_no_epsilon_and_no_tag_is_stated(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clinic-without-privacy")
    text = page(make_data_set(run, tmp_path / "set", control=[], shares=None, columns=["visit", "text"]))
    assert "> **Synthetic text, without a differential privacy guarantee:" in text
    assert "differential-privacy" not in text.split("---\n")[1]
    assert "epsilon" not in text
    assert "ε" not in text


@pytest.mark.parametrize(
    ("statistics", "changes"), [(None, {}), (released(), {"shares": None})], ids=["not shown", "of rows"]
)
def test_shares_that_the_card_does_not_show_and_those_of_training_rows_are_refused(
    tmp_path: Path, statistics: Any, changes: Any
) -> None:
    """The latter were written while the run had no guarantee, and what its card says may change."""
    run = make_run(tmp_path / "run", statistics=statistics)
    assert failing(make_data_set(run, tmp_path / "set", **changes)) == {"rows", "record"}


@pytest.mark.parametrize("change", [{"rows": 0}, {"more": 1}, {"schema_version": 2}, {"files": {"a": "b"}}])
def test_a_record_is_closed(change: dict[str, object]) -> None:
    assert Synthetic.checked(record()).shares == SHARES
    with pytest.raises(NotAStatement):
        Synthetic.checked({**record(), **change})


def test_a_key_for_what_is_never_signed_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A check that was asked for and not made must not pass."""
    assert main(["verify", str(folder)]) == 0
    assert main(["verify", str(folder), "--public-key", str(folder / "README.md")]) == 2
    assert "--public-key" in capsys.readouterr().err


def test_the_marked_part_is_as_it_was_and_quotes_no_row(folder: Path) -> None:
    assert_golden(section.parts(page(folder), synthetic.PARTS)["synthetic"] + "\n", GOLDEN)
    assert not any(row["text"] in page(folder) for row in ROWS)
