"""The budget cannot be overspent, by nobody and in no order, and history cannot be edited unnoticed."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from dpllm import ledger as ledger_module
from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import Budget, Ledger, default_path
from dpllm.privacy.accounting import compose, dp_sgd_event, epsilon

EVENT = dp_sgd_event(1.0, 40.0, 4)  # cheap to account: epsilon is about 0.15
DELTA = 1e-5


def reserve(ledger: Ledger, dataset: str = "notes", **changes):
    claim = {
        "event": EVENT,
        "delta": DELTA,
        "unit": "patient",
        "relation": "zero_out",
        "num_steps": 4,
        "run": "a",
    }
    return ledger.reserve(dataset, **{**claim, **changes})


def cost_of(runs: int, delta: float = DELTA) -> float:
    return epsilon(compose([EVENT] * runs), delta, "zero_out")


def room_for(runs: int) -> float:
    """A budget that `runs` runs fit and one more does not."""
    return (cost_of(runs) + cost_of(runs + 1)) / 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path):
    with Ledger(path) as opened:
        yield opened


def start(code: str, *arguments: object) -> subprocess.Popen:
    head = f"""
import os, sys
from pathlib import Path
from dpllm.errors import BudgetExceeded, Refused
from dpllm.ledger import Ledger
path, arguments = Path(sys.argv[1]), sys.argv[2:]
claim = dict(event={EVENT!r}, delta={DELTA}, unit="patient", relation="zero_out", num_steps=4, run="child")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def raw(path: Path, *statements: str) -> None:
    """Edits the file as someone would who goes round dpllm."""
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def test_budget_is_set_once(ledger: Ledger):
    assert ledger.budget("notes") is None
    assert ledger.remaining("notes") is None
    ledger.set_budget("notes", 3.0, DELTA, "patient", "zero_out")
    ledger.set_budget("notes", 3.0, DELTA, "patient", "zero_out")
    assert ledger.budget("notes") == Budget(3.0, DELTA, "patient", "zero_out")
    for other in (
        (4.0, DELTA, "patient", "zero_out"),
        (3.0, 1e-4, "patient", "zero_out"),
        (3.0, DELTA, "visit", "zero_out"),
        (3.0, DELTA, "patient", "add_or_remove_one"),
    ):
        with pytest.raises(Refused, match="has a budget already"):
            ledger.set_budget("notes", *other)
    assert ledger.head()["count"] == 1
    assert ledger.remaining("notes") == 3.0


@pytest.mark.parametrize(
    "budget",
    [
        ("", 3.0, DELTA, "patient", "zero_out"),
        ("notes", 0.0, DELTA, "patient", "zero_out"),
        ("notes", float("nan"), DELTA, "patient", "zero_out"),
        ("notes", float("inf"), DELTA, "patient", "zero_out"),
        ("notes", 3.0, 0.0, "patient", "zero_out"),
        ("notes", 3.0, 1.0, "patient", "zero_out"),
        ("notes", 3.0, DELTA, "", "zero_out"),
        ("notes", 3.0, DELTA, "patient", "replace_one"),
    ],
)
def test_budget_that_bounds_nothing_is_refused(ledger: Ledger, budget):
    with pytest.raises(ConfigError):
        ledger.set_budget(*budget)
    assert ledger.head()["count"] == 0


def test_runs_compose_and_the_one_over_budget_is_refused_with_the_numbers_and_nothing_written(ledger: Ledger):
    budget = room_for(3)
    ledger.set_budget("notes", budget, DELTA, "patient", "zero_out")
    for runs in (1, 2, 3):
        claim = reserve(ledger)
        assert claim.epsilon == cost_of(1)
        assert ledger.spent("notes") == cost_of(runs)
    assert 3 * cost_of(1) > budget  # a sum of epsilons would have refused the third
    before = ledger.head()
    with pytest.raises(BudgetExceeded) as refusal:
        reserve(ledger)
    for number in (cost_of(1), cost_of(3), budget - cost_of(3), budget, cost_of(4)):
        assert f"{number:.4f}" in str(refusal.value)
    assert "'notes'" in str(refusal.value)
    assert ledger.head() == before
    assert ledger.remaining("notes") == pytest.approx(budget - cost_of(3))


def test_budget_holds_at_its_own_delta_whatever_delta_a_run_states(ledger: Ledger):
    ledger.set_budget("notes", (cost_of(1, 1e-8) + cost_of(1)) / 2, 1e-8, "patient", "zero_out")
    with pytest.raises(BudgetExceeded):
        reserve(ledger, delta=1e-3)


def test_a_run_that_costs_exactly_the_budget_fits(ledger: Ledger):
    ledger.set_budget("notes", cost_of(2), DELTA, "patient", "zero_out")
    reserve(ledger)
    reserve(ledger)
    with pytest.raises(BudgetExceeded):
        reserve(ledger, event=dp_sgd_event(1.0, 100.0, 1), num_steps=1)


def test_every_state_of_a_run_counts_in_full(ledger: Ledger):
    ledger.set_budget("notes", room_for(4), DELTA, "patient", "zero_out")
    for status, steps in (("completed", 4), ("interrupted", 1), ("refused", 0)):
        claim = reserve(ledger)
        for step in range(1, steps + 1):
            ledger.charge(claim.entry, step)
        ledger.finish(claim.entry, status)
    reserve(ledger)
    assert ledger.spent("notes") == cost_of(4)
    with pytest.raises(BudgetExceeded):
        reserve(ledger)


def test_datasets_do_not_share_a_budget(ledger: Ledger):
    for dataset in ("b", "a", "Robert'); DROP TABLE entries;--"):
        ledger.set_budget(dataset, room_for(1), DELTA, "patient", "zero_out")
        reserve(ledger, dataset)
        with pytest.raises(BudgetExceeded):
            reserve(ledger, dataset)
    assert ledger.datasets() == sorted(["a", "b", "Robert'); DROP TABLE entries;--"])
    assert [entry.kind for entry in ledger.history("a")] == ["budget", "reserve"]


def test_epsilons_of_different_units_or_relations_never_add(ledger: Ledger):
    ledger.set_budget("notes", 100.0, DELTA, "patient", "zero_out")
    reserve(ledger, "free")
    for dataset in ("notes", "free"):
        for other in ({"unit": "visit"}, {"relation": "add_or_remove_one"}):
            with pytest.raises(Refused, match="another quantity"):
                reserve(ledger, dataset, **other)
    with pytest.raises(Refused, match="another quantity"):
        ledger.set_budget("free", 100.0, DELTA, "visit", "zero_out")
    assert ledger.head()["count"] == 2


def test_without_a_budget_runs_are_charged_without_limit_and_count_when_one_is_set(ledger: Ledger):
    assert ledger.spent("notes") == 0.0
    reserve(ledger, delta=1e-6)
    reserve(ledger, delta=DELTA)
    assert ledger.spent("notes") == cost_of(2)
    assert ledger.spent("notes", 1e-8) == cost_of(2, 1e-8)
    ledger.set_budget("notes", room_for(1), DELTA, "patient", "zero_out")
    assert ledger.remaining("notes") == 0.0
    with pytest.raises(BudgetExceeded):
        reserve(ledger)


def test_no_run_reserves_more_steps_than_its_event_pays_for(ledger: Ledger):
    for num_steps in (5, -1):
        with pytest.raises(ConfigError):
            reserve(ledger, num_steps=num_steps)
    with pytest.raises(ConfigError):
        reserve(ledger, event={"type": "free"})
    with pytest.raises(Refused, match="no finite epsilon"):
        reserve(ledger, event=dp_sgd_event(0.02, 1e-6, 4))
    assert ledger.head()["count"] == 0


def test_steps_are_charged_one_by_one_and_never_beyond_the_reservation(ledger: Ledger):
    entry = reserve(ledger).entry
    assert ledger.steps(entry) == 0
    for wrong in (0, 2, -1):
        with pytest.raises(Refused):
            ledger.charge(entry, wrong)
    for step in (1, 2, 3, 4):
        ledger.charge(entry, step)
        with pytest.raises(Refused, match=f"step {step} "):
            ledger.charge(entry, step)
    assert ledger.steps(entry) == 4
    with pytest.raises(Refused, match="reserved 4 steps"):
        ledger.charge(entry, 5)
    assert ledger.steps(entry) == 4


def test_interrupted_runs_go_on_and_finished_ones_do_not(ledger: Ledger):
    entry, other = reserve(ledger).entry, reserve(ledger).entry
    ledger.charge(entry, 1)
    ledger.finish(entry, "interrupted")
    ledger.charge(entry, 2)
    ledger.finish(entry, "completed")
    for step in (2, 3):
        with pytest.raises(Refused, match="is completed"):
            ledger.charge(entry, step)
    with pytest.raises(Refused):
        ledger.finish(entry, "interrupted")
    ledger.charge(other, 1)
    commits = [e.content() for e in ledger.history("notes") if e.kind == "commit"]
    assert [(c["steps"], c["status"]) for c in commits] == [(1, "interrupted"), (2, "completed")]


def test_a_reservation_of_another_ledger_is_unknown(ledger: Ledger, tmp_path: Path):
    with Ledger(tmp_path / "other.sqlite") as other:
        entry = reserve(other).entry
    for use in (lambda: ledger.charge(entry, 1), lambda: ledger.steps(entry), lambda: ledger.finish(entry, "refused")):
        with pytest.raises(ConfigError, match="no reservation"):
            use()


def test_ledger_survives_closing_and_values_are_frozen(ledger: Ledger, path: Path):
    claim = reserve(ledger, config_hash="abc")
    ledger.charge(claim.entry, 1)
    with Ledger(path) as again:
        assert again.steps(claim.entry) == 1
        assert again.head() == ledger.head()
        assert again.history("notes")[0].content()["event"] == EVENT
        assert again.history("notes")[0].content()["config_hash"] == "abc"
    with pytest.raises(FrozenInstanceError):
        claim.num_steps = 100


def test_a_rival_that_reserves_during_the_composition_is_seen(ledger: Ledger, path: Path, monkeypatch):
    ledger.set_budget("notes", room_for(1), DELTA, "patient", "zero_out")
    rivals = []

    def slow_epsilon(event, delta, relation):
        if event["type"] == "composed" and not rivals:
            rivals.append("started")
            with Ledger(path) as rival:
                reserve(rival)
        return epsilon(event, delta, relation)

    monkeypatch.setattr(ledger_module, "epsilon", slow_epsilon)
    with pytest.raises(BudgetExceeded):
        reserve(ledger)
    assert ledger.spent("notes") == cost_of(1)


def test_processes_that_reserve_at_once_get_exactly_what_fits(path: Path):
    budget = room_for(7)
    code = """
accepted = 0
for _ in range(5):
    with Ledger(path) as ledger:
        ledger.set_budget("notes", float(arguments[0]), claim["delta"], "patient", "zero_out")
        try:
            ledger.reserve("notes", **claim)
            accepted += 1
        except BudgetExceeded:
            pass
print(accepted)
"""
    workers = [start(code, path, budget) for _ in range(4)]
    accepted = [int(worker.communicate()[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert sum(accepted) == 7
    with Ledger(path) as ledger:
        assert ledger.spent("notes") == cost_of(7)
        assert ledger.head()["count"] == 8
        assert ledger.verify() == []


def test_two_processes_resuming_one_run_share_no_step(ledger: Ledger, path: Path):
    total = 200
    entry = reserve(ledger, event=dp_sgd_event(1.0, 50.0, total), num_steps=total).entry
    code = """
with Ledger(path) as ledger:
    for step in range(ledger.steps(arguments[0]) + 1, 201):
        try:
            ledger.charge(arguments[0], step)
        except Refused:
            break
        print(step)
"""
    workers = [start(code, path, entry) for _ in range(2)]
    charged = [int(line) for worker in workers for line in worker.communicate()[0].split()]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert sorted(charged) == list(range(1, ledger.steps(entry) + 1))
    assert ledger.steps(entry) == total


def test_a_crashed_run_stays_charged_and_can_be_resumed(ledger: Ledger, path: Path):
    ledger.set_budget("notes", room_for(1), DELTA, "patient", "zero_out")
    code = """
ledger = Ledger(path)
entry = ledger.reserve("notes", **claim).entry
ledger.charge(entry, 1)
print(entry, flush=True)
os._exit(9)
"""
    worker = start(code, path)
    entry = worker.communicate()[0].strip()
    assert worker.returncode == 9
    assert ledger.spent("notes") == cost_of(1)
    assert ledger.steps(entry) == 1
    with pytest.raises(BudgetExceeded):
        reserve(ledger)
    with pytest.raises(Refused):
        ledger.charge(entry, 1)
    ledger.charge(entry, 2)
    assert ledger.verify() == []


def test_a_crash_while_writing_leaves_nothing_half_done(ledger: Ledger, path: Path):
    code = """
ledger = Ledger(path)
ledger._db.execute("BEGIN IMMEDIATE")
ledger._append("reserve", "notes", {"entry": "half"})
os._exit(9)
"""
    start(code, path).communicate()
    assert ledger.head()["count"] == 0
    reserve(ledger)
    assert ledger.verify() == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET payload = '{}'",
        "DELETE FROM entries",
        "INSERT OR REPLACE INTO entries SELECT seq, kind, dataset, '{}', prev_hash, hash FROM entries",
        "UPDATE progress SET steps = 0",
        "UPDATE progress SET steps = 3",
        "DELETE FROM progress",
        "INSERT OR REPLACE INTO progress SELECT entry, seq, 0, 0 FROM progress",
    ],
)
def test_history_and_progress_only_grow(ledger: Ledger, path: Path, statement):
    ledger.charge(reserve(ledger).entry, 1)
    with pytest.raises(sqlite3.IntegrityError, match="only grows"):
        raw(path, statement)
    assert ledger.verify() == []


NO_GUARDS = [f"DROP TRIGGER {name}" for name in ledger_module.TRIGGERS]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET payload = replace(payload, '40.0', '99.0') WHERE seq = 2",
        "UPDATE entries SET payload = payload || ' ' WHERE seq = 2",
        "UPDATE entries SET payload = x'00ff' WHERE seq = 2",
        "UPDATE entries SET dataset = 'other' WHERE seq = 2",
        "UPDATE entries SET kind = 'note' WHERE seq = 3",
        "UPDATE entries SET hash = prev_hash WHERE seq = 2",
        "DELETE FROM entries WHERE seq = 1",
        "DELETE FROM entries WHERE seq = 2",
        "DELETE FROM entries WHERE seq = 3",
        "DELETE FROM entries",
        "UPDATE progress SET steps = 0",
        "UPDATE progress SET steps = 40",
        "DELETE FROM progress",
        "UPDATE entries SET seq = seq + 10",
    ],
)
def test_tampering_is_found_and_nothing_more_is_reserved(ledger: Ledger, path: Path, statement):
    ledger.set_budget("notes", 100.0, DELTA, "patient", "zero_out")
    first = reserve(ledger)
    reserve(ledger)
    ledger.charge(first.entry, 1)
    ledger.finish(first.entry, "interrupted")
    head = ledger.head()
    assert ledger.verify() == ledger.verify(head) == []
    create = [sql for (sql,) in sqlite3.connect(path).execute("SELECT sql FROM sqlite_master WHERE type = 'trigger'")]
    raw(path, *NO_GUARDS, statement, *create)
    assert ledger.verify()
    with pytest.raises(Refused, match="changed by something other than dpllm"):
        reserve(ledger)


def test_missing_guards_are_found(ledger: Ledger, path: Path):
    raw(path, "DROP TRIGGER entries_update")
    assert "entries_update" in ledger.verify()[0]


def test_a_cut_or_rewritten_chain_contradicts_an_earlier_head(ledger: Ledger, path: Path, tmp_path: Path):
    reserve(ledger)
    early = ledger.head()
    reserve(ledger)
    late = ledger.head()
    assert late["count"] == 2
    assert ledger.verify(early) == ledger.verify(late) == []
    with Ledger(tmp_path / "rewritten.sqlite") as rewritten:
        reserve(rewritten)
        assert rewritten.verify() == []
        assert rewritten.verify(early)
        assert rewritten.verify(late)


def test_every_link_hangs_on_the_one_before(ledger: Ledger):
    reserve(ledger)
    reserve(ledger)
    links = ledger.history("notes")
    assert links[0].prev_hash == "0" * 64
    assert links[1].prev_hash == links[0].hash == links[0].expected_hash()
    assert ledger.head() == {"hash": links[1].hash, "count": 2}
    assert json.loads(links[0].payload)["num_steps"] == 4


def test_file_is_private_and_durable(ledger: Ledger, path: Path):
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ledger._sql("PRAGMA journal_mode") == [("wal",)]
    assert ledger._sql("PRAGMA synchronous") == [(2,)]
    assert ledger._sql("PRAGMA busy_timeout") == [(60_000,)]


def test_what_cannot_be_a_ledger_is_one_clear_error(tmp_path: Path):
    (tmp_path / "text").write_text("not a database, " * 100)
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE songs (title)")
    with Ledger(tmp_path / "newer.sqlite") as newer:
        newer._sql("UPDATE meta SET value = '99'")
    for name in ("text", ".", "text/below", "other.sqlite", "newer.sqlite"):
        with pytest.raises(ConfigError, match=r"privacy\.ledger") as error:
            Ledger(tmp_path / name)
        assert str(tmp_path) in str(error.value)
        assert "\n" not in str(error.value)
    assert [row[0] for row in db.execute("SELECT name FROM sqlite_master")] == ["songs"]


def test_a_file_damaged_in_the_middle_is_an_error_of_ours(path: Path):
    with Ledger(path) as ledger:
        for _ in range(20):
            reserve(ledger)
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises((ConfigError, Refused)), Ledger(path) as ledger:
        reserve(ledger)


def test_default_path_is_in_the_users_data_directory(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_path() == tmp_path / ".local" / "share" / "dpllm" / "ledger.sqlite"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_path() == tmp_path / "data" / "dpllm" / "ledger.sqlite"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_path() == tmp_path / "Library" / "Application Support" / "dpllm" / "ledger.sqlite"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("APPDATA", str(tmp_path / "roaming"))
    assert default_path() == tmp_path / "roaming" / "dpllm" / "ledger.sqlite"
