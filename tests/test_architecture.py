"""The house: which room may import which, how large it may be, and what an import of dpllm must not load.

``scripts/house`` prints what is measured here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import house

MODULES = house.read()
# Imports that lead upward today, and have to go: lines are only taken out.
ARROWS = {
    "auditing.run -> lab.shadows",
    "auditing.summary -> lab.shadow_attacks",
    "canaries.canaries -> run.directory",
    "canaries.source -> auditing.scores",
    "model.loading -> run.processes",
    "model.memory -> run.environment",
    "model.memory -> run.processes",
    "model.sharding -> run.processes",
    "privacy.engine -> model.sharding",
    "privacy.plan -> canaries.canaries",
    "run.build -> auditing.scores",
    "run.promise -> statement.lineage",
    "run.record -> statement.lineage",
    "run.record -> statement.published_recipe",
    "statement.sign -> verification.reading",
    "statement.sign -> verification.values",
    "telemetry.live -> run.directory",
    "telemetry.metrics -> run.directory",
    "telemetry.metrics -> statement.formatting",
    "verification.check_audits -> lab.mechanism",
}
# What exceeds its limit in house.LIMITS today, or has none: numbers only fall.
TODAY = {
    "lines": 32119,
    "code lines": 20638,
    "lines of lab": 2923,
    "modules": 180,
    "longest module": 499,
    "longest function": 106,
    "most parameters": 11,
    "functions over 60 lines": 17,
    "functions over 8 parameters": 7,
    "upward arrows": 20,
    "rooms in cycles": 10,
}


def test_a_room_imports_only_rooms_below_it() -> None:
    found = {f"{a} -> {b}" for a, b in house.upward(MODULES)}
    assert sorted(found - ARROWS) == [], "new imports of a room above"
    assert sorted(ARROWS - found) == [], "gone: take these out of ARROWS"


def test_only_the_command_line_imports_the_lab() -> None:
    found = {f"{a} -> {b}" for a, b in house.arrows(MODULES) if house.room(b) == "lab" and house.room(a) != "cli"}
    assert sorted(found - ARROWS) == []


def test_numbers_only_fall() -> None:
    found = {name: value for name, (value, _) in house.numbers(MODULES).items()}
    allowed = {name: max(TODAY.get(name, 0), house.LIMITS.get(name, 0)) for name in found}
    assert {name: value for name, value in found.items() if value > allowed[name]} == {}
    late = {name: found[name] for name, value in TODAY.items() if found[name] < 0.95 * value}
    assert late == {}, "fallen: enter these into TODAY"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import dpllm", {"torch", "numpy", "pydantic"}),
        ("from dpllm.cli import main; main(['--help'])", {"torch", "transformers", "numpy"}),
        ("from dpllm.cli import main; main(['plan', '--help'])", {"torch", "transformers", "numpy"}),
    ],
)
def test_nothing_heavy_is_loaded(code: str, heavy: set[str]) -> None:
    program = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('LOADED', *({heavy} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"
