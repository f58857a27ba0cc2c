"""The house: which room may import which, how large it may be, and what an import of dpllm must not load.

``scripts/house`` prints what is measured here.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from programs import run_program

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import house

MODULES = house.read()


def test_a_room_imports_only_rooms_below_it() -> None:
    assert sorted(f"{a} -> {b}" for a, b in house.upward(MODULES)) == []


def test_the_page_draws_the_house_that_stands() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "architecture.md").read_text("utf-8")
    assert f"\n{house.drawing(MODULES)}\n" in page, "scripts/house draws it anew"


READERS = {"text.data", "text.sources", "text.tokens", "text.in_memory"}
"""Modules that read rows, which may be private."""
ON_BEHALF = {"releases.draft", "releases.leaks", "releases.quality"}
"""Of releases what publish may call: these reserve nothing, and give it figures, sentences or a refusal, but never a row."""


def imported(room: str) -> set[tuple[str, str]]:
    """What the modules of a room import, with outside packages: (module, imported)."""
    outside = {
        (name, part)
        for name, module in MODULES.items()
        for node in house.ast.walk(module.tree)
        if isinstance(node, house.ast.Import | house.ast.ImportFrom)
        for part in ([alias.name for alias in node.names] if isinstance(node, house.ast.Import) else [node.module])
    }
    inside = {(name, other) for name, module in MODULES.items() for other in house.imports(module, MODULES)}
    return {(name, other) for name, other in outside | inside if house.room(name) == room}


def test_publish_spends_nothing_and_reads_no_private_row() -> None:
    runs = {"run.loop", "run.promise", "run.build", "run.subject", "run.own_loop"}
    wrong = {
        (name, other)
        for name, other in imported("publish")
        if house.room(other) in {"ledger", "canaries", "auditing"}
        or (house.room(other) == "releases" and other not in ON_BEHALF)
        or other in runs | READERS
    }
    assert wrong == set()
    behalf = {(name, other) for name, other in imported("releases") if name in ON_BEHALF}
    assert {(name, other) for name, other in behalf if house.room(other) == "ledger"} == set()


def test_statement_asks_no_network() -> None:
    network = {"huggingface_hub", "urllib", "socket", "requests", "httpx", "http", "datasets", "transformers"}
    named = {
        (name, other) for name, other in imported("statement") if {other, other.partition(".")[0]} & (network | READERS)
    }
    assert named == set()


def test_each_file_belongs_to_one_feature() -> None:
    homeless = [module.path for module in MODULES.values() if house.feature(module) is None and module.lines > 10]
    assert homeless == [], "name them in a feature of scripts/house.py"
    held = {house.feature(module) for module in MODULES.values()}
    assert [part.name for part in house.FEATURES if part not in held] == []
    named = [pattern for part in house.FEATURES for pattern in part.files]
    assert [item for item in named if not any(fnmatch(module.path, item) for module in MODULES.values())] == []
    assert all(part.users_get.endswith(".") for part in house.FEATURES)


def test_numbers_only_fall() -> None:
    """A limit is raised by a line in docs/decisions.md that says what users got for it, not by hand here."""
    limits = {**house.LIMITS, **{part.name: part.lines for part in house.FEATURES}, "lines": house.MOST_LINES}
    table = house.numbers(MODULES)
    assert {name: table[name] for name, limit in limits.items() if table[name][0] > limit} == {}, (
        "above scripts/house.py"
    )
    late = {name: table[name][0] for name, limit in limits.items() if table[name][0] < 0.97 * limit - 5}
    assert late == {}, "fallen: enter these into scripts/house.py"


def test_a_text_times_a_condition_is_golf() -> None:
    source = "a = 's' * (n != 1)\nb = ['x'] * bool(x)\nc = (x,) * (a or b)\nd = '-' * 80\ne = 2 * it.known\nf = [0] * len(x)\n"
    module = house.Module("some", "some.py", source, 6, house.ast.parse(source))
    assert list(house.golf(module)) == ["some:1", "some:2", "some:3"]


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import dpllm", {"torch", "numpy", "pydantic"}),
        ("from dpllm.cli import main; main(['--help'])", {"torch", "transformers", "numpy", "pydantic"}),
        ("from dpllm.cli import main; main(['plan', '--help'])", {"torch", "transformers", "numpy"}),
    ],
)
def test_nothing_heavy_is_loaded(code: str, heavy: set[str]) -> None:
    program = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('LOADED', *({heavy} & sys.modules.keys()))"
    )
    assert run_program("-c", program).splitlines()[-1] == "LOADED"
