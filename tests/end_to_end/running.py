"""How the tests of whole runs start commands: recipes from a small default one, in this process unless it must die."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import entropy
import pytest
import tiny
import yaml

import dpllm
from dpllm.cli import main
from dpllm.ledger import Ledger
from dpllm.ledger.values import Run
from dpllm.privacy.engine import StepEngine
from dpllm.recipe import names
from dpllm.recipe.config import load_config

Json = dict[str, Any]
CANARIES = {"groups": {1: 20, 4: 4}, "references": 100, "digits": 12}
SENTINEL = "Sigrid Forsberg owes 4711"
NUM_ROWS = 40
STEPS = 4
_calls: Counter[str] = Counter()


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def dpllm_(*arguments: object) -> Answer:
    """``dpllm ARGUMENTS`` in this process."""
    words = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), entropy.from_seed(*_of_this_call(words)):
        code = main(words)
    return Answer(code, out.getvalue(), err.getvalue())


def _of_this_call(words: list[str]) -> tuple[str, int]:
    """The same in any order of tests and on any number of processes: whose command this is, and which one.

    A command in a test's own folder is that test's; any other is named by its words, as that of a fixture.
    """
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    folder = "/" + re.sub(r"\W", "_", test.partition("::")[2])[:30]  # as pytest names tmp_path
    own = any(folder in word for word in words)
    name = test if own else " ".join(re.sub(r".*/pytest-\d+/(popen-gw\d+/)?", "", word) for word in words)
    _calls[name] += 1
    return name, _calls[name]


def done(*arguments: object) -> Answer:
    """The same, which must succeed."""
    answer = dpllm_(*arguments)
    assert answer.code == 0, answer.err
    return answer


def refused(command: str, *arguments: object, code: int = 2) -> str:
    """The message of a refusal, without a word of a row: one line on standard error, or one for each that ``plan`` finds."""
    answer = dpllm_(command, *arguments)
    assert answer.code == code, answer
    lines = answer.err.splitlines()
    assert all(line.startswith(f"dpllm {command}: ") for line in lines), answer.err
    assert len(lines) == 1 or command == "plan", answer.err
    assert not answer.out or command in ("plan", "train", "sweep")
    assert not any(word in answer.out + answer.err for word in SENTINEL.split())
    return answer.err


def unverified(*arguments: object) -> str:
    """What ``dpllm verify`` prints of something that does not verify."""
    answer = dpllm_("verify", *arguments)
    assert answer.code == 4, answer
    return answer.out


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Code in a process of its own, with the very package that is tested."""
    paths = [str(Path(dpllm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


def fails_in_step(patch: pytest.MonkeyPatch, number: int) -> list[int]:
    """The engine's so-manyth step ends in an error, once it is charged; returns the steps begun, later runs' too."""
    step, begun = StepEngine.step, list[int]()

    def begin(engine: StepEngine, *batches: Any) -> Any:
        begun.append(len(begun) + 1)
        if begun[-1] == number:
            raise RuntimeError
        return step(engine, *batches)

    patch.setattr(StepEngine, "step", begin)
    return begun


def train_until(patch: pytest.MonkeyPatch, number: int, recipe: Path, *options: object) -> list[int]:
    """Training that fails in its so-manyth step; returns the steps begun, later runs' too."""
    begun = fails_in_step(patch, number)
    with pytest.raises(RuntimeError):
        dpllm_("train", recipe, *options)
    return begun


def as_trained(run: Path) -> None:
    """Makes the record say that the run trained with the recipe that lies there now."""
    record = json.loads((run / "run.json").read_text("utf-8"))
    record["manifest"]["config.yaml"] = names.of_training(load_config(run / "config.yaml"))
    (run / "run.json").write_text(json.dumps(record), encoding="utf-8")


def calls(
    patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any] = lambda *arguments, **_: arguments
) -> list[Any]:
    """Grows by what is noted of the arguments of each call of a function or method, before it goes on as ever."""
    call, noted = getattr(owner, name), list[Any]()

    def watched(*arguments: Any, **more: Any) -> Any:
        noted.append(note(*arguments, **more))
        return call(*arguments, **more)

    patch.setattr(owner, name, watched)
    return noted


def results(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Grows by what each call returns."""
    call, returned = getattr(owner, name), list[Any]()

    def watched(*arguments: Any, **more: Any) -> Any:
        returned.append(call(*arguments, **more))
        return returned[-1]

    patch.setattr(owner, name, watched)
    return returned


def edit_json(path: Path, **changes: Any) -> Json:
    """Changes keys of a JSON object in a file; returns it as it was."""
    value: Json = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**value, **changes}), encoding="utf-8")
    return value


def edit_recipe(run: Path, section: str, **changes: Any) -> Path:
    """Changes a section of a run's recipe, as if the run had trained with it; its ledger, which would contradict, is not here."""
    value = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    value["privacy"]["ledger"] = str(run / "no.sqlite")
    value[section] |= changes
    (run / "config.yaml").write_text(yaml.safe_dump(value), encoding="utf-8")
    as_trained(run)
    return run


def rows(count: int = NUM_ROWS, start: int = 0) -> list[Json]:
    return [{"text": f"{SENTINEL}. {tiny.sentence(number)}"} for number in range(start, start + count)]


@dataclass(frozen=True)
class Place:
    """A folder with data, a recipe, a ledger and a run directory."""

    root: Path
    base: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def train(self) -> Path:
        return self.root / "data" / "train.jsonl"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.sqlite"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def card(self) -> str:
        return (self.run / "export" / "README.md").read_text("utf-8")

    def does(self, *commands: str) -> str:
        """Types commands one after the other, of the recipe or of the run; returns what the last one printed."""
        of_recipe = ("plan", "train")
        return [done(word, self.recipe if word in of_recipe else self.run).out for word in commands][-1]

    def json(self, name: str) -> Json:
        return dict(json.loads((self.run / name).read_text("utf-8"), parse_constant=_no_constant))

    def lines(self, name: str) -> list[Json]:
        """Of a file of the run with one JSON object a line."""
        return [json.loads(line, parse_constant=_no_constant) for line in (self.run / name).read_text().splitlines()]

    def runs(self, dataset: str = "notes") -> list[Run]:
        """The runs of a dataset, as the ledger holds them."""
        with Ledger(self.ledger) as ledger:
            return list(ledger.runs(dataset))

    def head(self) -> Any:
        """The head of the ledger's chain; None where there is no ledger."""
        if not self.ledger.exists():
            return None
        with Ledger(self.ledger) as ledger:
            return ledger.head()

    def write(self, changes: Mapping[str, Any] | None = None) -> Path:
        """Writes the recipe; ``changes`` maps dotted keys to values."""
        value: Json = {
            "model": {"name_or_path": str(self.base)},
            "adapter": {"method": "lora", "r": 2},
            "data": {"train": str(self.train), "max_length": 128},
            "privacy": {"epsilon": 8.0, "ledger": str(self.ledger), "dataset": "notes"},
            "train": {"steps": STEPS, "batch_size": 8, "tokens_per_pass": 512},
            "output_dir": str(self.run),
        }
        for key, new in (changes or {}).items():
            *parents, last = key.split(".")
            here = value
            for parent in parents:
                here = here.setdefault(parent, {})
            here[last] = new
        self.recipe.write_text(yaml.safe_dump(value), encoding="utf-8")
        return self.recipe


def make_place(root: Path, base: Path, changes: Mapping[str, Any] | None = None) -> Place:
    place = Place(root, base)
    root.mkdir(parents=True, exist_ok=True)
    tiny.write_rows(place.train, rows())
    place.write(changes)
    return place


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, but SQLite's own journals."""
    names = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(("-wal", "-shm")))
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def charged(place: Place) -> tuple[int, int]:
    """Reservations, and steps of the last one."""
    with Ledger(place.ledger) as ledger:
        entries = [link.facts["entry"] for link in ledger.history("notes") if link.kind == "reserve"]
        return len(entries), ledger.run(entries[-1]).steps
