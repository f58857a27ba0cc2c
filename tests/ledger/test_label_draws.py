"""Labels are drawn once, and what their account holds and may hold: check and reservation are one transaction."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
from ledger_stores import Place

from dpllm.cli import main
from dpllm.errors import BudgetExceeded, ConfigError, DpllmError, Refused
from dpllm.ledger import Budget, Claim, Ledger, RunRequest, budgets, dataset_policy
from dpllm.ledger.budgets import reserve_all
from dpllm.ledger.records import Fingerprint, fingerprint
from dpllm.ledger.values import label_account
from dpllm.privacy import renyi
from dpllm.privacy.events import Imported, PureDP
from dpllm.privacy.parts import added
from dpllm.recipe.config import RunConfig, around
from dpllm.releases import labels

Row = dict[str, str]
MANY = 6


def pairs(count: int, start: int = 0) -> list[Row]:
    numbers = range(start, start + count)
    return [{"who": f"p{n % 5}", "prompt": f"q{n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in numbers]


def written(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(data: Path, ledger: object, **more: object) -> RunConfig:
    keys = {"model.name_or_path": "none", "data.format": "preference", "train.objective": "dpo"}
    return around(str(data), {**keys, "privacy.ledger": str(ledger), **more}, "tests")


def draw(data: Path, ledger: object, *, again: bool = False, output: Path | None = None, **more: object) -> Any:
    return labels.randomize(recipe(data, ledger, **more), 1.0, output or data.with_suffix(".out.jsonl"), again=again)


def hashed(ledger: Ledger, rows: list[Row]) -> Fingerprint:
    return fingerprint(rows, ("prompt", "chosen", "rejected"), ledger.records.label_key())


def request(epsilon: float = 1.0, unit: str = "example") -> RunRequest:
    return RunRequest(PureDP(epsilon), 1e-9, 1, unit, "label_changed", "a draw")


def reserve(ledger: Ledger, name: str, records: Fingerprint) -> Claim:
    return reserve_all(ledger, name, [request()], records=records, once=True)[0]


@pytest.mark.parametrize(
    "named", [lambda n: "labels of notes", lambda n: f"labels of {n}"], ids=["one", "each its own"]
)
def test_of_many_draws_at_once_one_is_admitted(place: Place, named: Callable[[int], str]) -> None:
    """A mutant looks before the lock alone; a copy under another name must not be a second account either."""
    place.open().close()
    ready, said = Barrier(MANY), [""] * MANY

    def work(number: int) -> None:
        with place.open() as ledger:
            records = hashed(ledger, pairs(20)[number:])  # each lacks other rows
            ready.wait()
            try:
                said[number] = reserve(ledger, named(number), records).entry
            except Refused as error:
                said[number] = error.reason

    workers = [Thread(target=work, args=(number,)) for number in range(MANY)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert said.count("again") == MANY - 1, said
    with place.open() as ledger:
        assert sum(len(ledger.runs(name)) for name in ledger.datasets()) == 1


@pytest.mark.parametrize("end", ["reserved", "running", "completed", "reconciled"])
def test_whatever_became_of_a_draw_there_is_no_other(place: Place, end: str) -> None:
    """A mutant asks for completed ones alone."""
    with place.open() as ledger:
        records = hashed(ledger, pairs(8))
        claim = reserve(ledger, "labels of notes", records)
        if end not in ("reserved", "reconciled"):
            ledger.charge(claim.entry, 1)
        if end == "reconciled":
            ledger.reconcile(claim.entry, "ann", "it died")
        elif end not in ("reserved", "running"):
            ledger.finish(claim.entry, end)
        for rows in (pairs(8), pairs(3), pairs(40), pairs(9, start=7)):  # whole, part, more than it, one in common
            with pytest.raises(Refused) as refused:
                reserve(ledger, "labels of notes", hashed(ledger, rows))
            assert (refused.value.reason, refused.value.dataset) == ("again", "labels of notes")
        reserve(ledger, "labels of notes", hashed(ledger, pairs(9, start=100)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_draw_that_was_killed_is_not_drawn_again(tmp_path: Path) -> None:
    data, ledger = written(tmp_path / "pairs.jsonl", pairs(20)), tmp_path / "l.sqlite"
    if not (child := os.fork()):
        labels.randomize(
            recipe(data, ledger), 1.0, tmp_path / "o.jsonl", lambda _: os.kill(os.getpid(), signal.SIGKILL) or 0
        )
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with pytest.raises(Refused, match=r"randomised before \(labels of .*One draw never ended"):
        draw(data, ledger)
    assert draw(data, ledger, again=True).account_epsilon == 2.0


def test_a_second_draw_says_what_it_costs_and_is_charged_to_the_same_people(tmp_path: Path) -> None:
    """Whatever the file is called, and however it is laid out."""
    ledger, told = tmp_path / "l.sqlite", {"data.unit": "who", "data.max_examples_per_unit": 4}
    first = draw(written(tmp_path / "pairs.jsonl", pairs(20)), ledger, **told)
    assert (first.unit_epsilon, first.account_epsilon) == (4.0, 4.0)
    (tmp_path / "part.csv").write_text(
        "who,prompt,chosen,rejected\n" + "".join(f"p{n % 5},q{n},no {n},yes  {n}\n" for n in range(9))
    )
    part, output = tmp_path / "part.csv", tmp_path / "part.out.jsonl"
    with pytest.raises(Refused, match=r"costs epsilon 4 more for one who, 8 in all.*type --again"):
        draw(part, ledger, output=output, **told)
    assert not output.exists()
    with pytest.raises(Refused, match=r"type --dataset '.*pairs'"):
        draw(part, ledger, output=output, again=True, **told, **{"privacy.dataset": "others"})
    second = draw(part, ledger, output=output, again=True, **told)
    assert (second.dataset, second.unit_epsilon, second.account_epsilon) == (first.dataset, 4.0, 8.0)
    with Ledger(ledger) as book:
        assert [run.event for run in book.runs(first.dataset)] == [PureDP(4.0)] * 2


def budget(ledger: Ledger, epsilon: float, delta: float = 1e-6) -> Budget:
    wanted = Budget(epsilon, delta, "example", "label_changed", by="ann", reason="a study")
    return budgets.set_budget(ledger, "labels of notes", wanted)


@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-3])
def test_a_budget_of_labels_admits_exactly_the_sum(place: Place, delta: float) -> None:
    """A mutant counts them by a Renyi filter of the usual orders, which admits no draw of 4.5 at an epsilon of 9."""
    with place.open() as ledger:
        assert budget(ledger, 9.0, delta).order == renyi.SUM
        for _ in range(2):
            reserve_all(ledger, "labels of notes", [request(4.5)])
        assert ledger.used("labels of notes") == 1
        with pytest.raises(BudgetExceeded, match=r"100% of epsilon 9 used.*fewer labels"):
            reserve_all(ledger, "labels of notes", [request(0.01)])
        with pytest.raises(Refused, match="is another quantity"):
            reserve_all(ledger, "labels of notes", [RunRequest(PureDP(0.1), 1e-9, 1, "example", "zero_out")])


def test_what_was_drawn_elsewhere_adds_up_too(place: Place) -> None:
    """An epsilon that holds but for a delta does not add to others that hold always."""
    who = {"run": "x", "unit": "example", "relation": "label_changed", "by": "ann", "reason": "elsewhere"}
    with place.open() as ledger:
        budget(ledger, 9.0)
        with pytest.raises(ConfigError, match="--delta 0"):
            budgets.import_run(ledger, "labels of notes", event=Imported(1.0, 1e-9), **who)
        budgets.import_run(ledger, "labels of notes", event=Imported(5.0, 0.0), **who)
        with pytest.raises(BudgetExceeded):
            reserve_all(ledger, "labels of notes", [request(4.5)])
        reserve_all(ledger, "labels of notes", [request(4.0)])
        assert added(*ledger.account("labels of notes").events()) == 9.0


def test_an_account_of_labels_has_one_name_and_what_is_imported_into_it_is_of_labels(tmp_path: Path) -> None:
    assert label_account("notes") == label_account("labels of notes") == "labels of notes"
    ledger = ["--ledger", str(tmp_path / "ledger.sqlite"), "--by", "alice", "--reason", "study 7"]
    assert main(["ledger", "import", "labels of notes", "--run", "r", "--epsilon", "1", "--delta", "0", *ledger]) == 0
    with Ledger(tmp_path / "ledger.sqlite") as book:
        [entry] = (entry for entry in book.history("labels of notes") if entry.kind == "import")
        assert entry.facts["relation"] == "label_changed"


def test_data_of_a_budget_are_labels_and_no_texts(tmp_path: Path) -> None:
    """Their first draw is none of a second time, and the texts keep an account of their own."""
    data = written(tmp_path / "pairs.jsonl", pairs(20))
    with Ledger(tmp_path / "l.sqlite") as ledger:
        records, units = dataset_policy.records_of(str(data), ledger, "example", "label_changed")
        wanted = Budget(1.0, 1e-6, "example", "label_changed", by="ann", reason="a study")
        budgets.set_budget(ledger, "labels of study", wanted, records=records)
        assert units == 20
        texts, _ = dataset_policy.records_of(str(data), ledger, "example")
        assert ledger.records.conflict("notes", texts, None) is None
        text = written(tmp_path / "text.jsonl", [{"text": "a"}])
        with pytest.raises(ConfigError, match="only pairs have labels"):
            dataset_policy.records_of(str(text), ledger, "example", "label_changed")
    assert draw(data, tmp_path / "l.sqlite").dataset == "labels of study"
    with pytest.raises(DpllmError):
        draw(data, tmp_path / "l.sqlite", again=True, output=tmp_path / "more.jsonl")


def test_the_order_of_sums_costs_a_release_its_epsilon_to_the_bit() -> None:
    """A mutant computes the divergence there, where rounding hides a part."""
    for epsilon in (0.1, 0.3, 1.7, 4.5, 9.3):
        assert renyi.rdp(PureDP(epsilon), renyi.SUM) == epsilon
        assert renyi.allowance(epsilon, 1e-9, renyi.SUM) == epsilon


def test_one_label_in_a_thousand_others_is_not_drawn_again(tmp_path: Path) -> None:
    """A file of fresh pairs around known ones would give these a second coin, in an account of its own."""
    ledger, first = tmp_path / "ledger.sqlite", written(tmp_path / "first.jsonl", pairs(40))
    name = draw(first, ledger).dataset
    around_one = written(tmp_path / "second.jsonl", [*pairs(1, 7), *pairs(300, 1000)])
    with pytest.raises(Refused, match=r"costs epsilon 1 more .* 2 in all"):
        draw(around_one, ledger)
    assert draw(around_one, ledger, again=True).dataset == name
    with Ledger(ledger) as book:
        assert len(book.runs(name)) == 2
        with pytest.raises(Refused):
            reserve_all(book, label_account("third"), [request()], records=hashed(book, [*pairs(1), *pairs(500, 9000)]))
