"""Whose data a recipe trains on, and what is refused: every way of saying less than the ledger knows."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_models as tm

from dpllm.errors import ConfigError, DataError, Refused
from dpllm.ledger import Budget, Ledger, budgets, dataset_policy
from dpllm.recipe.config import RunConfig
from dpllm.text import data

TEXTS = [tiny.sentence(number) for number in range(40)]


def recipe(root: Path, texts: list[str] = TEXTS, name: str = "rows.jsonl", **sections: dict[str, Any]) -> RunConfig:
    tiny.write_rows(root / name, [{"text": text} for text in texts])
    data = {"train": str(root / name), **sections.pop("data", {})}
    return tm.recipe(data=data, output_dir=str(root / "run"), **sections)


def ask(config: RunConfig, book: Ledger | None) -> dataset_policy.DatasetPolicy:
    root = Path(config.output_dir).parent
    table = data.load_table(config.data.train, config.data, config.data.train_split, root / "cache")
    return dataset_policy.find_policy(config, table, data.load_held_out(config.data, root / "cache"), book)


def with_budget(path: Path, config: RunConfig, dataset: str = "notes") -> Ledger:
    book = Ledger(path)
    budget = Budget(8.0, 1e-5, unit="example", relation="zero_out", by="alice", reason="study")
    budgets.set_budget(book, dataset, budget, records=dataset_policy.records_of(config.data.train, book, "example")[0])
    return book


@pytest.mark.parametrize("ledger", [True, False], ids=["ledger", "no ledger"])
def test_without_privacy_only_on_public_data(tmp_path: Path, ledger: bool) -> None:
    book = Ledger(tmp_path / "ledger.sqlite") if ledger else None
    off = {"enabled": False}
    for private in ({}, {"eval_public": True}):  # public evaluation data do not make the training data public
        with pytest.raises(Refused, match=r"data\.public: true") as refused:
            ask(recipe(tmp_path, privacy=off, data=private), book)
        assert refused.value.reason == "no_privacy"
    assert ask(recipe(tmp_path, privacy=off, data={"public": True}), book).deviations == ()
    assert ask(recipe(tmp_path), book).dataset == f"{tmp_path.name}/rows"


@pytest.mark.parametrize("public", [True, False])
def test_a_budget_is_stronger_than_a_declaration_that_data_are_public(tmp_path: Path, public: bool) -> None:
    config = recipe(tmp_path, privacy={"enabled": False}, data={"public": public})
    with with_budget(tmp_path / "ledger.sqlite", config) as book:
        with pytest.raises(Refused, match="which has a privacy budget"):
            ask(config, book)
        with pytest.raises(Refused, match="nobody else may except"):
            budgets.except_from_privacy(book, "notes", "mallory", "I want to")
        budgets.except_from_privacy(book, "notes", "alice", "a baseline that is never released")
        policy = ask(config, book)
        assert policy.dataset == "notes"
        (deviation,) = policy.deviations
        assert "by alice" in deviation
        assert "a baseline that is never released" in deviation
        assert ask(recipe(tmp_path), book).deviations == (deviation,)  # later runs with privacy say it too


def test_noise_that_can_be_drawn_again_counts_as_none_where_there_is_a_budget(tmp_path: Path) -> None:
    seeded = recipe(tmp_path, privacy={"insecure_seed": 3})
    with Ledger(tmp_path / "free.sqlite") as book:
        assert ask(seeded, book).deviations == ()
    with with_budget(tmp_path / "ledger.sqlite", seeded) as book:
        with pytest.raises(Refused, match=r"Remove privacy\.insecure_seed") as refused:
            ask(seeded, book)
        assert refused.value.reason == "no_privacy"
        budgets.except_from_privacy(book, "notes", "alice", "a test of the noise")
        assert ask(seeded, book).deviations == ask(recipe(tmp_path), book).deviations != ()


def test_an_exception_of_somebody_else_before_the_budget_is_void(tmp_path: Path) -> None:
    off = recipe(tmp_path, privacy={"enabled": False})
    with Ledger(tmp_path / "ledger.sqlite") as book:
        budgets.except_from_privacy(book, "notes", "mallory", "I want to")
    with with_budget(tmp_path / "ledger.sqlite", off) as book:
        with pytest.raises(Refused, match="which has a privacy budget"):
            ask(off, book)
        (deviation,) = ask(recipe(tmp_path), book).deviations  # what may have happened before is said all the same
        assert "mallory" in deviation


@pytest.mark.parametrize("budgeted", [True, False])
def test_evaluation_data_that_are_private_are_not_public(tmp_path: Path, budgeted: bool) -> None:
    config = recipe(tmp_path)
    other = [f"{text}, seen again" for text in TEXTS]
    evaluation = {"eval": str(tmp_path / "rows.jsonl"), "eval_public": True}
    book = None
    if budgeted:  # not the training data
        book = with_budget(tmp_path / "ledger.sqlite", config)
        asked = recipe(tmp_path, other, "other.jsonl", data={**evaluation, "public": True})
    else:
        asked = recipe(tmp_path, data=evaluation)
    with pytest.raises(Refused, match="declared public") as refused:
        ask(asked, book)
    assert refused.value.reason == "public_evaluation"
    if budgeted:
        ask(asked.model_copy(update={"data": asked.data.model_copy(update={"eval_public": False})}), book)


@pytest.mark.parametrize("how", ["itself", "spelling", "link", "copy", "shuffled", "most", "half", "repeated", "none"])
def test_evaluation_data_that_train_are_refused(tmp_path: Path, how: str) -> None:
    same = tmp_path / "rows.jsonl"
    texts = {"shuffled": TEXTS[::-1], "copy": TEXTS}.get(how, [f"{text}, another time" for text in TEXTS])
    if how in ("most", "half"):
        texts = [*TEXTS[: 21 if how == "most" else 20], *texts[:20]]
    if how == "repeated":  # rows count, and not what they say
        texts = [*TEXTS[:1] * (len(texts) + 1), *texts]
    held_out = tiny.write_rows(tmp_path / "held_out.jsonl", [{"text": text} for text in texts])
    if how == "link":
        held_out.unlink()
        held_out.symlink_to(same)
    paths = {"itself": same, "spelling": f"{tmp_path}/../{tmp_path.name}//rows.jsonl"}
    config = recipe(tmp_path, data={"eval": str(paths.get(how, held_out)), "public": True})
    with Ledger(tmp_path / "ledger.sqlite") as book:
        if how in ("half", "none"):
            ask(config, book)
            return
        for known in (None, book):
            with pytest.raises(Refused, match=r"data\.eval") as refused:
                ask(config, known)
            assert (refused.value.dataset, refused.value.reason) == (f"{tmp_path.name}/rows", "evaluation_trains")
            assert not any(letter.isdigit() for letter in str(refused.value).replace(tmp_path.name, ""))


def test_held_out_rows_among_which_are_a_few_training_rows_are_held_out(tmp_path: Path) -> None:
    """What counts is the share of the rows that are evaluated, also where fewer train."""
    other = [*TEXTS, *(f"{text}, later" for text in TEXTS), *(f"{text}, again" for text in TEXTS)]
    path = tiny.write_rows(tmp_path / "held_out.jsonl", [{"text": text} for text in other])
    ask(recipe(tmp_path, data={"eval": str(path)}), None)


@pytest.mark.parametrize("unit", ["patient", "example"])
def test_a_budget_is_set_on_data_that_know_its_unit(tmp_path: Path, unit: str) -> None:
    config = recipe(tmp_path)
    with Ledger(tmp_path / "ledger.sqlite") as book:
        if unit == "patient":
            with pytest.raises(DataError, match="has no value in column 'patient'"):
                dataset_policy.records_of(config.data.train, book, unit)
        else:
            records, units = dataset_policy.records_of(config.data.train, book, unit)
            assert records.num_records == units == len(TEXTS)


def test_a_budget_counts_the_people_that_a_run_counts(tmp_path: Path) -> None:
    rows = [{"text": text, "who": who} for text, who in zip(TEXTS, [1, "1.0", " 1", "\u200b1", "2"], strict=False)]
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows)
    with Ledger(tmp_path / "ledger.sqlite") as book:
        assert dataset_policy.records_of(str(path), book, "who")[1] == 2
    tiny.write_rows(path, [*rows, {"text": "a", "who": " "}])
    with Ledger(tmp_path / "ledger.sqlite") as book, pytest.raises(DataError, match="row 6 has no value"):
        dataset_policy.records_of(str(path), book, "who")


@pytest.mark.parametrize("common", [1, 7, 39])
def test_a_refusal_does_not_tell_how_much_is_shared(tmp_path: Path, common: int) -> None:
    """It would tell whoever brings a file of guesses how many of them are right."""
    guesses = [*TEXTS[:common], *(f"{text}, guessed" for text in TEXTS[common:])]
    evaluation = {"eval": str(tiny.write_rows(tmp_path / "eval.jsonl", [{"text": text} for text in guesses]))}
    asked = {
        "overlap": recipe(tmp_path, guesses, "guesses.jsonl"),
        "public_evaluation": recipe(tmp_path, data={**evaluation, "eval_public": True}),
    }
    with with_budget(tmp_path / "ledger.sqlite", asked["public_evaluation"]) as book:
        for reason, config in asked.items():
            with pytest.raises(Refused, match="shares records with") as refused:
                ask(config, book)
            assert refused.value.reason == reason
            assert not any(letter.isdigit() for letter in str(refused.value).replace(tmp_path.name, ""))


@pytest.mark.parametrize("disguise", ["renamed", "reordered", "another format"])
def test_a_copy_of_budgeted_data_is_the_same_dataset(tmp_path: Path, disguise: str) -> None:
    texts = TEXTS[::-1] if disguise == "reordered" else TEXTS
    copy = recipe(tmp_path, texts, "copy.jsonl")
    if disguise == "another format":
        path = tmp_path / "copy.csv"
        path.write_text("id,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(texts)))
        copy = copy.model_copy(update={"data": copy.data.model_copy(update={"train": str(path)})})
    with with_budget(tmp_path / "ledger.sqlite", recipe(tmp_path)) as book:
        assert ask(copy, book).dataset == "notes"  # without a name of its own it is charged to the budget
        named = copy.model_copy(update={"privacy": copy.privacy.model_copy(update={"dataset": "fresh"})})
        with pytest.raises(Refused, match="these very records are dataset 'notes'"):
            ask(named, book)


def test_a_parent_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    config = recipe(tmp_path, privacy={"derived_from": "letters"})
    with pytest.raises(ConfigError, match="there is no ledger yet"):
        ask(config, None)
    with Ledger(tmp_path / "ledger.sqlite") as book, pytest.raises(ConfigError, match="letters"):
        ask(config, book)


def test_a_file_with_other_columns_is_named_by_its_recipe(tmp_path: Path) -> None:
    """``dpllm ledger init`` has no option that names columns."""
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"body": text} for text in TEXTS])
    named = tmp_path / "recipe.yaml"
    named.write_text(
        f"model: {{name_or_path: m}}\ndata: {{train: {rows}, columns: {{text: body}}}}\ntrain: {{steps: 1}}\noutput_dir: r\n"
    )
    with Ledger(tmp_path / "ledger.sqlite") as book:
        with pytest.raises(DataError, match="--data RECIPE"):
            dataset_policy.records_of(str(rows), book, "example")
        assert dataset_policy.records_of(str(named), book, "example")[1] == len(TEXTS)
