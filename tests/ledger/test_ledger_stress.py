"""Many processes at once, and processes that are killed: as much is accepted as fits, and the ledger stays whole."""

import os
import random
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from ledger_stores import TERMS, Place, budget, cost_of, reserve, room_for

from dpllm.errors import BudgetExceeded, Refused
from dpllm.ledger import Ledger, budgets
from dpllm.privacy.events import Imported

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks, so that 8 processes start at once")
PROCESSES = 8


def forked(work: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """Runs ``work`` in a child, which may say words; returns its number and where to read them."""
    source, sink = os.pipe()
    child = os.fork()
    if child:
        os.close(sink)
        return child, source
    code = 1
    try:
        os.close(source)
        work(lambda word: os.write(sink, (word + "\n").encode()) and None)
        code = 0
    except BaseException:
        os.write(sink, ("ERROR " + traceback.format_exc().replace("\n", " | ") + "\n").encode())
    finally:
        os._exit(code)


def said(child: int, source: int) -> tuple[list[str], int]:
    """All that a child said, and how it ended."""
    with open(source, "rb") as file:
        words = file.read().decode().split("\n")[:-1]
    return words, os.waitpid(child, 0)[1]


@pytest.mark.parametrize("final", [False, True])
def test_processes_that_reserve_at_once_get_exactly_what_fits(ledger: Ledger, place: Place, final: bool, full):
    """Of those that ask to be final, one is, and nothing joins it."""
    tries, fit = (50, 50) if full else (10, 12)
    budgets.set_budget(ledger, "notes", room_for(fit))
    fit = 1 if final else fit
    cost_of(1)

    def work(say: Callable[[str], None]) -> None:
        with place.open() as mine:
            for _ in range(tries):
                try:
                    with mine.counting():
                        say(reserve(mine, run=str(os.getpid()), final=final).entry)
                except BudgetExceeded:
                    say("refused")

    ended = [said(*child) for child in [forked(work) for _ in range(PROCESSES)]]
    assert [code for _, code in ended] == [0] * PROCESSES, ended
    words = [word for spoken, _ in ended for word in spoken]
    accepted = [word for word in words if word != "refused"]
    assert len(words) == PROCESSES * tries
    assert len(accepted) == len(set(accepted)) == fit
    assert sorted(run.reservation.entry for run in ledger.runs("notes")) == sorted(accepted)
    assert ledger.refusals() == {("notes", "over_budget"): PROCESSES * tries - fit}
    assert ledger.verify() == []
    with place.open() as fresh:
        assert fresh.verify(ledger.head()) == []
        assert fresh.spent("notes") <= fresh.budget("notes").epsilon
        assert (fresh.used("notes") or 0) <= 1


def test_processes_that_do_everything_at_once_neither_deadlock_nor_overspend(ledger: Ledger, place: Place, full, seed):
    """Reserve, charge, finish, reconcile, import, set, verify: in any order, by 8 processes."""
    rounds = 40 if full else 8
    budgets.set_budget(ledger, "notes", room_for(9))
    cost_of(1)

    def work(number: int) -> Callable[[Callable[[str], None]], None]:
        def does(say: Callable[[str], None]) -> None:
            draw = random.Random(f"{seed} {number}")
            mine = place.open()
            entries: list[str] = []
            for _ in range(rounds):
                action = draw.choice(["reserve", "charge", "finish", "reconcile", "import", "set", "verify", "new"])
                try:
                    if action == "reserve":
                        entries.append(reserve(mine, draw.choice(["notes", "free"])).entry)
                    elif action == "charge" and entries:
                        entry = draw.choice(entries)
                        mine.charge(entry, mine.run(entry).steps + 1)
                    elif action == "finish" and entries:
                        mine.finish(draw.choice(entries), draw.choice(["interrupted", "completed"]))
                    elif action == "reconcile" and entries:
                        mine.reconcile(draw.choice(entries), "bob", "test")
                    elif action == "import" and draw.random() < 0.3:
                        event = Imported(0.01, 0.0)
                        budgets.import_run(mine, "notes", event=event, run="x", by="b", reason="c", **TERMS)
                    elif action == "set":
                        budgets.set_budget(mine, f"set {draw.randrange(3)}", budget(1.0))
                    elif action == "verify":
                        assert mine.verify() == []
                    elif action == "new":
                        mine.close()
                        mine = place.open()
                except Refused as refusal:
                    if refusal.reason == "tampered":
                        raise
            say("done")

        return does

    ended = [said(*child) for child in [forked(work(number)) for number in range(PROCESSES)]]
    assert ended == [(["done"], 0)] * PROCESSES, ended
    assert ledger.verify() == []
    assert ledger.used("notes") < 1.2  # imports are facts
    assert ledger.runs("notes")


def test_processes_that_meet_no_ledger_make_one(place: Place):
    def work(say: Callable[[str], None]) -> None:
        with place.open() as mine:
            say(mine.records.key().hex())
            reserve(mine, str(os.getpid()))

    cost_of(1)
    ended = [said(*child) for child in [forked(work) for _ in range(PROCESSES)]]
    assert [code for _, code in ended] == [0] * PROCESSES, ended
    assert len({tuple(spoken) for spoken, _ in ended}) == 1
    with place.open() as ledger:
        assert len(ledger.datasets()) == PROCESSES
        assert ledger.verify() == []


@contextmanager
def killed_after(seconds: float, work: Callable[[Callable[[str], None]], None]) -> Iterator[list[str]]:
    """What a child said before it was killed, so many seconds after its first word."""
    child, source = forked(work)
    assert select.select([source], [], [], 60)[0], "the child never began"
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    words, code = said(child, source)
    assert os.WIFSIGNALED(code), (words, code)
    yield words


def test_a_process_killed_at_any_moment_leaves_a_ledger_that_knows_all_it_did(ledger: Ledger, place: Place, full, seed):
    draw = random.Random(seed)
    budgets.set_budget(ledger, "notes", budget(50.0))
    done, begun = {}, {}
    cost_of(1)

    def work(say: Callable[[str], None]) -> None:
        with place.open() as mine:
            say("begin")
            while True:
                entry = reserve(mine).entry
                say(f"reserved {entry} 0")
                for step in range(1, 5):
                    say(f"begun {entry} {step}")
                    mine.charge(entry, step)
                    say(f"charged {entry} {step}")
                mine.finish(entry, "completed")
                say(f"finished {entry} 4")

    for kills in range(1, (40 if full else 8) + 1):
        with killed_after(draw.uniform(0, 0.15), work) as words:
            assert not [word for word in words if word.startswith("ERROR")]
        for word in words[1:]:
            what, entry, step = word.split()
            (begun if what == "begun" else done)[entry] = int(step)
        assert ledger.verify() == []
        with place.open() as fresh:
            assert fresh.verify() == []
            runs = {run.reservation.entry: run for run in fresh.runs("notes")}
        assert done.keys() <= runs.keys()
        assert len(runs) <= len(done) + kills  # a reservation of which the child could not tell any more
        for entry, steps in done.items():
            assert steps <= runs[entry].steps <= max(steps, begun.get(entry, 0))
        reserve(ledger, "other")  # no lock is left behind
    assert done
