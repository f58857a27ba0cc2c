"""Whose data a recipe trains on, and what is refused: every way of saying less than the ledger knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from dpllm import data
from dpllm.config import RunConfig
from dpllm.errors import ConfigError, Refused
from dpllm.ledger import Budget, Ledger, budgets, default_path, open_ledger, protect

TEXTS = [tiny.sentence(number) for number in range(40)]


def recipe(root: Path, texts: list[str] = TEXTS, name: str = "rows.jsonl", **sections: dict[str, Any]) -> RunConfig:
    tiny.write_rows(root / name, [{"text": text} for text in texts])
    value: dict[str, Any] = {
        "model": {"name_or_path": "some/model"},
        "data": {"train": str(root / name), **sections.pop("data", {})},
        "train": {"steps": 1},
        "output_dir": str(root / "run"),
    }
    return RunConfig.model_validate({**value, **sections})


def ask(config: RunConfig, book: Ledger | None) -> protect.Custody:
    root = Path(config.output_dir).parent
    table = data.load_table(config.data.train, config.data, config.data.train_split, root / "cache")
    return protect.take_custody(config, table, book)


def opened(path: Path) -> Ledger:
    book = open_ledger(str(path))
    assert book is not None
    return book


def with_budget(path: Path, config: RunConfig, dataset: str = "notes") -> Ledger:
    book = opened(path)
    budget = Budget(8.0, 1e-5, unit="example", relation="zero_out", by="alice", reason="study")
    budgets.set_budget(book, dataset, budget, records=protect.records_of(config.data.train, book))
    protect.remember_ledger(book)
    return book


@pytest.mark.parametrize("ledger", [True, False], ids=["ledger", "no ledger"])
def test_without_privacy_only_on_public_data(tmp_path: Path, ledger: bool) -> None:
    book = opened(tmp_path / "ledger.sqlite") if ledger else None
    off = {"enabled": False}
    for private in ({}, {"eval_public": True}):  # public evaluation data do not make the training data public
        with pytest.raises(Refused, match=r"data\.public: true") as refused:
            ask(recipe(tmp_path, privacy=off, data=private), book)
        assert refused.value.reason == "no_privacy"
    assert ask(recipe(tmp_path, privacy=off, data={"public": True}), book).exceptions == ()
    assert ask(recipe(tmp_path), book).dataset == f"{tmp_path.name}/rows"


@pytest.mark.parametrize("public", [True, False])
def test_a_budget_is_stronger_than_a_declaration_that_data_are_public(tmp_path: Path, public: bool) -> None:
    config = recipe(tmp_path, privacy={"enabled": False}, data={"public": public})
    with with_budget(tmp_path / "ledger.sqlite", config) as book:
        with pytest.raises(Refused, match="which has a privacy budget"):
            ask(config, book)
        with pytest.raises(Refused, match="alone may except"):
            budgets.except_from_privacy(book, "notes", "mallory", "I want to")
        budgets.except_from_privacy(book, "notes", "alice", "a baseline that is never released")
        custody = ask(config, book)
        assert custody.dataset == "notes"
        (deviation,) = custody.deviations()
        assert "by alice" in deviation
        assert "a baseline that is never released" in deviation
        assert ask(recipe(tmp_path), book).deviations() == [deviation]  # later runs with privacy say it too


@pytest.mark.parametrize("rows", [slice(None), slice(0, 10), slice(None, None, -1)], ids=["copy", "subset", "reversed"])
@pytest.mark.parametrize("book", ["other", None], ids=["another ledger", "no ledger"])
def test_budgeted_data_are_known_outside_their_ledger(tmp_path: Path, rows: slice, book: str | None) -> None:
    with_budget(tmp_path / "ledger.sqlite", recipe(tmp_path)).close()
    config = recipe(tmp_path, TEXTS[rows], "copy.jsonl")
    with pytest.raises(Refused, match="lies in another ledger") as refused:
        ask(config, opened(tmp_path / "other.sqlite") if book else None)
    assert refused.value.reason == "outside_ledger"
    assert refused.value.dataset == "notes"
    assert str(tmp_path / "ledger.sqlite") in str(refused.value)  # and which one to name
    other = recipe(tmp_path, [f"{text}, seen again" for text in TEXTS], "other.jsonl")
    assert ask(other, None).dataset == f"{tmp_path.name}/other"


def test_a_ledger_that_is_gone_hinders_nobody(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with_budget(path, recipe(tmp_path)).close()
    path.unlink()
    assert ask(recipe(tmp_path), None).dataset == f"{tmp_path.name}/rows"


def test_the_list_of_ledgers_is_kept_whole(tmp_path: Path) -> None:
    registry = default_path().parent / "ledgers.json"
    for name in ("a", "b", "a"):
        with opened(tmp_path / f"{name}.sqlite") as book:
            protect.remember_ledger(book)
    assert json.loads(registry.read_text()) == [str(tmp_path / "a.sqlite"), str(tmp_path / "b.sqlite")]
    registry.write_text("[cut")
    assert ask(recipe(tmp_path), None).exceptions == ()


def test_a_parent_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    config = recipe(tmp_path, privacy={"derived_from": "letters"})
    with pytest.raises(ConfigError, match="there is no ledger yet"):
        ask(config, None)
    with opened(tmp_path / "ledger.sqlite") as book, pytest.raises(ConfigError, match="letters"):
        ask(config, book)
