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


def test_a_room_imports_only_rooms_below_it() -> None:
    assert sorted(f"{a} -> {b}" for a, b in house.upward(MODULES)) == []


def test_only_the_command_line_imports_the_lab() -> None:
    arrows = {f"{a} -> {b}" for a, b in house.arrows(MODULES) if house.room(b) == "lab"}
    assert [arrow for arrow in sorted(arrows) if not arrow.startswith(("cli", "lab"))] == []


def test_numbers_only_fall() -> None:
    """A limit is raised by a line in docs/decisions.md that says what users got for it, not by hand here."""
    found = {name: value for name, (value, _) in house.numbers(MODULES).items()}
    over = {name: found[name] for name, limit in house.LIMITS.items() if found[name] > limit}
    assert over == {}, "larger than scripts/house.py allows"
    assert set(house.ROOMS) <= set(house.LIMITS)
    assert sum(house.LIMITS[name] for name in house.ROOMS) <= house.MOST_LINES
    late = {name: found[name] for name, limit in house.LIMITS.items() if found[name] < 0.97 * limit - 5}
    assert late == {}, "fallen: enter these into LIMITS of scripts/house.py"


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"
