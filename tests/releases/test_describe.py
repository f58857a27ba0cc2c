"""What ``dpllm describe`` promises around its noise: what it costs, when it is charged, and what nobody sees of the data."""

from __future__ import annotations

import itertools
import json
import operator
from pathlib import Path
from typing import Any

import pytest
import tiny
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as pld
from released_folders import Json, Say, describing, entries, ledger, released, write

from dpllm.files import alone
from dpllm.ledger import Budget, RunRequest, budgets
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy import privacy_loss, releases
from dpllm.privacy.accounting import dp_sgd_event
from dpllm.privacy.parts import SampledSums
from dpllm.releases import describe
from dpllm.statement.released import Statistics

FIXED = ["rows.jsonl", "--unit", "who", "--max-examples-per-unit", "2", "--dataset", "notes", "--ledger", "l.sqlite"]
ASKED = ["--units", "--shares", "label=yes,no", "--shares", "age=26,27", "--quantiles", "age=0:120:12", "--at", ".5,.9"]
RELEASES = 5
HUNDRED = ",".join(map(str, range(100)))


def rows(units: int = 30) -> list[Json]:
    return [
        {"text": f"note {unit} {number}", "who": f"p{unit}", "label": "yes" if unit % 3 else "no", "age": 20 + unit}
        for unit in range(units)
        for number in range(3)
    ]


@pytest.fixture
def say(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    write(rows())
    return describing(capsys, FIXED, 1.0)


def dry_run(say: Say, *words: object) -> Statistics:
    code, printed, _ = say(*words, "--dry-run", "--json")
    assert code == 0
    return Statistics.pick(json.loads(printed))


def set_budget(epsilon: float, delta: float = 1e-6) -> None:
    with ledger() as book:
        budgets.set_budget(book, "notes", Budget(epsilon, delta, "who", "zero_out", by="alice", reason="study 7"))


def direct(epsilons: list[float], delta: float, run: Any = None) -> float:
    """Epsilon of pure releases, and a run, by dp-accounting's public functions alone."""
    composed = pld.identity(1e-4)
    for epsilon in epsilons:
        composed = composed.compose(
            pld.from_privacy_parameters(common.DifferentialPrivacyParameters(epsilon, 0.0), 1e-4)
        )
    return float((composed.compose(run) if run else composed).get_epsilon_for_delta(delta))


def test_each_release_is_an_entry_and_the_ledger_composes_them_with_training(say: Say) -> None:
    assert say(*ASKED)[0] == 0
    statistics, book = released("."), ledger()
    runs = book.runs("notes")
    assert [(run.reservation.entry, run.event) for run in runs] == [(r.entry, r.event) for r in statistics.releases]
    assert {(run.state, run.steps, run.reservation.num_steps) for run in runs} == {("completed", 1, 1)}
    parts = [release.event.epsilon for release in statistics.releases]
    assert parts == pytest.approx([0.25, 0.25, 0.25, 0.125, 0.125], abs=1e-3)
    assert book.spent("notes", 1e-6) == pytest.approx(direct(parts, 1e-6), rel=1e-9)
    assert statistics.epsilon == pytest.approx(direct(parts, statistics.delta), rel=1e-9)
    assert 0.99 < statistics.epsilon <= 1.0
    reserve_all(book, "notes", [RunRequest(dp_sgd_event(0.02, 0.8, 150), 1e-6, 150, "who", "zero_out")])
    steps = privacy_loss._sampled_loss(SampledSums(0.02, 0.8, 1, 150), 1e-4).self_compose(150)
    assert book.spent("notes", 1e-6) == pytest.approx(direct(parts, 1e-6, steps), rel=1e-9)
    # Points of one step differ by 2e-16 from dp-accounting's, and 150 steps by 1.1e-9 on some processors.
    steps = pld.from_gaussian_mechanism(0.8, sampling_prob=0.02, value_discretization_interval=1e-4).self_compose(150)
    assert book.spent("notes", 1e-6) == pytest.approx(direct(parts, 1e-6, steps), rel=1e-8)


def test_a_statistic_asked_twice_costs_twice(say: Say) -> None:
    assert say("--units", epsilon=0.5)[0] == 0
    once = ledger().spent("notes", 1e-9)
    assert say("--units", "--output", "again.json", epsilon=0.5)[0] == 0
    assert ledger().spent("notes", 1e-9) == pytest.approx(direct([0.5, 0.5], 1e-9)) == pytest.approx(2 * once, rel=1e-3)
    assert say("--units", "--units", "--output", "both.json", epsilon=0.5)[0] == 0
    assert [release.event.epsilon for release in released("both.json").releases] == [0.25, 0.25]
    code, _, error = say("--units", "--output", "both.json")
    assert (code, len(ledger().runs("notes"))) == (2, 4)
    assert "both.json: holds an earlier release" in error


def test_of_two_that_write_one_file_the_second_spends_nothing(say: Say) -> None:
    with alone(Path("describe.json"), Path(".describe.json.lock")):
        code, _, error = say("--units")
    assert (code, entries()) == (2, 0)
    assert "describe.json: another process writes there" in error
    assert say("--units", "--output", "new/describe.json")[0] == 0


def test_a_large_delta_makes_no_release_more_exact(say: Say) -> None:
    """A release has no delta to spend: at 0.99 of a public N of 1 it cost seven times what was asked for."""
    write(rows(1))
    assert say("--units", "--delta", "0.99", "--data.public_size", "1")[0] == 0
    (release,) = released(".").releases
    assert release.event.epsilon < 1.01


def test_a_crash_between_reservation_and_release_stays_charged(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_before: list[Any] = []

    def crash(measure: Any, values: list[Any]) -> Any:
        runs_before.append(ledger().runs("notes"))
        if len(runs_before) == 2:
            raise RuntimeError("power cut")
        return measure(values)

    monkeypatch.setattr(releases, "draw", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        say(*ASKED)
    # All are reserved, and the first charged, before it is drawn.
    assert [run.steps for run in runs_before[0]] == [1, 0, 0, 0, 0]
    assert not Path("describe.json").exists()
    runs = ledger().runs("notes")
    assert [(run.state, run.steps) for run in runs] == [("running", 1)] * 2 + [("reserved", 0)] * 3
    assert ledger().spent("notes", 1e-9) == pytest.approx(1.0, abs=1e-3)


def test_an_exhausted_budget_refuses_and_nothing_is_spent(say: Say) -> None:
    set_budget(1.5)
    assert say("--units", epsilon=0.4)[0] == 0
    assert released(".").delta == 1e-6, "that of the budget"
    before = entries()
    for words in ([], ["--dry-run"]):
        code, _, error = say("--units", "--shares", "label=yes", "--output", "more.json", *words, epsilon=1.2)
        assert code == 3, error
        assert "notes" in error
        assert (entries(), Path("more.json").exists()) == (before, False)


def test_statistics_of_a_final_call_are_admitted_together_and_are_the_last(say: Say) -> None:
    set_budget(0.5)
    code, printed, _ = say("--units", "--dry-run", "--final", epsilon=0.5)
    assert (code, "it is final" in printed.replace("\n", " ")) == (0, True)
    assert say("--units", "--final", epsilon=0.5)[0] == 0
    code, _, error = say("--units", "--output", "more.json", epsilon=0.01)
    assert (code, "closed for good" in error) == (3, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--shares label", "must be declared"),
        ("--quantiles age", "must be declared"),
        ("--shares diagnosis=yes,no", "no row has a column 'diagnosis'"),
        ("", "no statistic is asked"),
        ("--lengths 8,16", "--model MODEL"),
        ("--units --unit whom", "has no value in column 'whom'"),
        ("--units --delta 2", "--delta is 2"),
        ("--units --delta nan", "delta"),
        ("--units --delta 0", "delta"),
        ("--units --output /dev/null/describe.json", "cannot be written to (Not a directory)"),
        (f"--units --output {'long' * 63}", "cannot be written to (File name too long)"),
        (f"--shares label={HUNDRED};age={HUNDRED}", "too many values or candidates"),
        *((f"{' '.join(ASKED)} --epsilon {epsilon}", "--epsilon") for epsilon in (0.0001, 0.0, -1.0, "nan", 2000.0)),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_spent(say: Say, words: str, message: str) -> None:
    code, _, error = say(*words.split())
    assert (code, error.count("\n"), entries()) == (2, 1, 0)
    assert message in error
    assert "p0" not in error


@pytest.mark.parametrize("mode", [["--dry-run"], []])
def test_a_refusal_that_tells_whose_a_row_is_is_counted(say: Say, mode: list[str]) -> None:
    """Also that of a dry run, which spends nothing: else whoever guesses could ask about row after row unseen."""
    assert say("--units")[0] == 0
    before = entries()
    write(rows()[:1])
    for times in (1, 2):
        code, _, error = say("--units", "--dataset", "guess", "--output", "more.json", *mode)
        assert (code, entries()) == (3, before), error
        assert list(ledger().refusals().values()) == [times]


@pytest.mark.parametrize("bad", [0, 29])
def test_a_row_that_no_template_takes_is_refused_before_anything_is_charged(say: Say, tmp_path: Path, bad: int) -> None:
    text = "raise_exception('no') if m['content'] == 'odd' else m['content']"
    template = f"{{% for m in messages %}}{{{{ {text} }}}}{{% endfor %}}"
    tiny.tokenizer(chat_template=template).save_pretrained(tmp_path / "words")
    turns = [[{"role": "user", "content": "odd" if number == bad else "even"}] for number in range(30)]
    write([{"messages": turn, "who": f"p{number}"} for number, turn in enumerate(turns)])
    words = ["--units", "--lengths", "8,16", "--model", "words"]
    code, _, error = say(*words)
    assert (code, entries(), error.count("\n")) == (2, 0, 1)
    assert f"unit {bad + 1}: the chat template refuses a role in a row's messages" in error
    assert not Path("describe.json").exists()
    write([{"messages": turn, "who": f"p{number}"} for number, turn in enumerate(turns) if number != bad])
    assert say(*words)[0] == 0


@pytest.mark.parametrize("mode", [["--dry-run"], []])
@pytest.mark.parametrize(
    "words",
    [
        "--delta 0.9",
        "--delta 0.034",
        f"--delta {1 / 30}",
        "--delta 0.012 --data.sampling example --data.max_examples_per_unit 3",
        "--delta 0.001 --data.public_size 1000",
        "--delta 0.04 --data.public_size 20",
        "--delta 0.04 --data.public_size 14",
    ],
)
def test_a_delta_of_one_in_n_or_more_is_refused_and_nothing_is_released(say: Say, mode: list[str], words: str) -> None:
    """At 0.9 an exact count would cost epsilon 0. N is that of a run: 30 people, 90 rows, or what is declared."""
    code, _, error = say("--units", *words.split(), *mode)
    assert (code, error.count("\n"), entries()) == (3, 1, 0), error
    assert "delta" in error
    assert not Path("describe.json").exists()


@pytest.mark.parametrize(
    ("words", "delta"),
    [
        ("--delta 0.033", 0.033),
        ("--delta auto", 0.003),
        ("--delta auto --data.public_size 1000", 1e-4),
        ("", 1e-9),
        (f"--data.public_size {10**9}", 1e-10),
    ],
)
def test_delta_is_below_one_in_n(say: Say, words: str, delta: float) -> None:
    assert dry_run(say, "--units", *words.split()).delta == delta


def test_the_delta_of_a_budget_bounds_auto_and_is_below_one_in_n_itself(say: Say) -> None:
    set_budget(20.0)
    assert dry_run(say, "--units", "--delta", "auto").delta == 1e-6
    Path("l.sqlite").unlink()
    set_budget(2.0, 0.5)
    before = entries()
    for words in ([], ["--delta", "1e-6"], ["--delta", "auto"]):
        code, _, error = say("--units", *words)
        assert (code, entries()) == (3, before)
        assert "delta of the dataset's budget, 0.5 is not below 1/N" in error


def test_a_dry_run_shows_costs_and_spends_nothing(say: Say) -> None:
    code, printed, _ = say(*ASKED, "--dry-run")
    assert code == 0
    assert "Nothing was spent" in printed
    assert not Path("l.sqlite").exists()
    assert not Path("describe.json").exists()
    offered = dry_run(say, *ASKED)
    assert {(release.value, release.entry) for release in offered.releases} == {(None, None)}
    assert say(*ASKED)[0] == 0
    costs = [{**release.to_json(), "value": None, "entry": None} for release in released(".").releases]
    assert costs == [release.to_json() for release in offered.releases]


def test_no_exact_value_reaches_any_public_byte(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the noise held fixed, so that it hides nothing: files and output are equal over neighbours.

    What OpenDP would be given differs; what it would return is made constant, and so are the day and the entries' names.
    """
    constants = [30, [40, 20, 0], [1, 2, 57], 50.0, 60.0]
    values_counted: list[list[Any]] = []
    counter = itertools.count()

    def constant(measure: Any, values: list[Any]) -> Any:
        values_counted.append(sorted(values))
        return constants[(len(values_counted) - 1) % RELEASES]

    monkeypatch.setattr(releases, "draw", constant)
    monkeypatch.setattr("secrets.token_hex", lambda size=32: f"{next(counter):0{2 * size}x}")
    monkeypatch.setattr(describe.time, "strftime", lambda *_: "2026-01-02")

    def public(written: list[Json], *mode: str) -> tuple[list[Any], list[Any]]:
        """What OpenDP was given, and all that anybody sees."""
        nonlocal counter
        counter = itertools.count()
        values_counted.clear()
        write(written)
        for name in ("describe.json", "l.sqlite"):
            Path(name).unlink(missing_ok=True)
        printed, path = say(*ASKED, *mode), Path("describe.json")
        return list(values_counted), [*printed, path.read_bytes() if path.exists() else b""]

    data = rows()
    changed = [{**row, "text": "x" * 500, "label": "secret", "age": 99} if row["who"] == "p7" else row for row in data]
    removed = [row for row in data if row["who"] != "p7"]
    for mode in (["--dry-run"], ["--json"], []):
        exact, shown = public(data, *mode)
        assert shown[0] == 0
        # Of 3 rows a unit, 2 count.
        assert [len(values) for values in exact] == ([] if "--dry-run" in mode else [30, 60, 60, 60, 60])
        for neighbour in (changed, removed):
            exact_of_neighbour, shown_of_neighbour = public(neighbour, *mode)
            assert shown_of_neighbour == shown, mode
            if not mode:
                same = [*map(operator.eq, exact, exact_of_neighbour)]
                assert same == [neighbour is changed, False, False, False, False], "what is counted differs"
    assert b"p7" not in shown[3]
    assert str(Path.cwd()).encode() not in shown[3]


def test_declared_size_changes_the_relation_and_nothing_else(say: Say) -> None:
    assert say("--units", "--data.public_size", 40)[0] == 0
    assert released(".").neighbouring_relation == "add_or_remove_one"
    code, _, error = say("--units", "--output", "more.json")
    assert code == 3
    assert "another quantity" in error
