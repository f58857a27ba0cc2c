"""A directory in which the commands of the documentation can be typed: recipes of the same names, small enough to run.

Comes in: the repository's recipes, and those that pages show. Goes out: a prepared directory with runs, of which every page
gets a copy of its own. Recipes are kept but for the model (a tiny one with random weights), the repository's data (a few
rows) and the numbers of steps and canaries. runs/long was stopped after its second step.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import entropy
import tiny
import yaml
from docs_pages import ROOT, Block, Command
from ledger_stores import adopt

from dpllm.cli import main
from dpllm.ledger import default_path
from dpllm.privacy.banded import LearningRate

Json = dict[str, Any]
# Words that a page may use for things of the reader's own.
STANDS_FOR = {"RUN": "runs/e2e-lora", "BASELINE": "runs/e2e-baseline", "RECIPE": "recipes/lora/e2e.yaml"}
SMALL: Json = {
    "model": {"name_or_path": "models/gpt2", "revision": None},
    "train": {"batch_size": 8, "steps": 2, "epochs": None},
}
SMALL_DATA: Json = {
    "train": "data/train.jsonl",
    "eval": "data/eval.jsonl",
    "eval_public": True,
    "revision": None,
    "columns": {"prompt": "meaning_representation", "completion": "human_reference"},
}
SMALL_CANARIES: Json = {"groups": {1: 20, 4: 4}, "references": 100}


@dataclass
class Workspace:
    """The directory of one page. A run that was prepared appears in it when a command first names it."""

    root: Path
    prepared: Path
    brought: set[str] = field(default_factory=set)
    names: Json = field(default_factory=lambda: {"__name__": "__docs__"})

    def run(self, command: Command) -> tuple[int, str]:
        """Exit code and output of one command."""
        words = [STANDS_FOR.get(word, word) for word in command.words]
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            os.environ[name] = value
            return 0, ""
        if words[0] != "dpllm" or not command.is_plain:
            shell = ["bash", "-c", command.text]
            done = subprocess.run(shell, cwd=self.root, capture_output=True, text=True, timeout=900)
            return done.returncode, done.stdout + done.stderr
        training = words[1] in {"train", "sweep"} and "--resume" not in words
        self.bring(words, keep=not training)
        return dpllm_(words[1:])

    def python(self, block: Block) -> None:
        """Executes a block of Python; it sees what earlier blocks of the page have named."""
        self.bring(block.text.replace('"', " ").split(), keep=True)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block.text, f"line {block.line}", "exec"), self.names)

    def bring(self, words: list[str], *, keep: bool) -> None:
        """Copies prepared runs that are named; before a training, takes away the prepared run that it would replace."""
        if keep:
            for prepared in sorted((self.prepared / "runs").iterdir()):
                name = f"runs/{prepared.name}"
                named = any(word.split("=")[-1].rstrip("/").startswith(name) for word in words)
                if named and name not in self.brought:
                    shutil.copytree(prepared, self.root / name)
                    self.brought.add(name)
            return
        recipe = next((word for word in words if word.endswith(".yaml")), None)
        output = yaml.safe_load((self.root / recipe).read_text())["output_dir"] if recipe else None
        if "--output_dir" in words:
            output = words[words.index("--output_dir") + 1]
        if output in self.brought and (self.prepared / output).exists():
            shutil.rmtree(self.root / output)
        self.brought.add(str(output))


def dpllm_(words: list[str]) -> tuple[int, str]:
    """``dpllm WORDS`` in this process, with keys and coins from the tests' seed: exit code, and what it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), entropy.from_seed(*words):
        try:
            code = main(words)
        except SystemExit as error:
            code = int(error.code or 0) if isinstance(error.code, int | None) else 1
    return code, output.getvalue()


def small_recipe(text: str, *, data: bool) -> Json:
    """A recipe with tiny settings; everything else is as it stands there. ``data``: its data are replaced too."""
    recipe: Json = yaml.safe_load(text)
    for section, changes in {**SMALL, **({"data": SMALL_DATA} if data else {})}.items():
        recipe[section] = {**recipe.get(section, {}), **changes}
    audit = recipe.setdefault("audit", {})
    audit |= {"gradient_canaries": min(12, audit.get("gradient_canaries", 0))}
    if audit.get("canaries"):
        audit["canaries"] = SMALL_CANARIES
    if str(yaml.safe_load(text)["data"]["train"]).startswith("builtin:"):
        recipe["data"]["public"] = True
    for key in ("r", "last_blocks"):
        if key in recipe["adapter"]:
            recipe["adapter"][key] = 1
    return recipe


def prepare(root: Path, recipes_by_name: Mapping[str, str], *, every_page: bool) -> Path:
    """Recipes, models, data, a ledger, and the runs that pages take for granted: trained, audited, with cards.

    Args:
        root: An empty directory.
        recipes_by_name: Recipes that pages show, by file name.
        every_page: More than the first page will be typed: shown recipes have to make a plan.
    """
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        text, target = path.read_text(encoding="utf-8"), root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.name != "accelerate":
            text = yaml.safe_dump(small_recipe(text, data=True))
        target.write_text(text, encoding="utf-8")
    for name, text in recipes_by_name.items():
        (root / name).write_text(yaml.safe_dump(small_recipe(text, data=False)), encoding="utf-8")
    shutil.copy(ROOT / "recipes" / "train.py", root / "recipes")
    tiny.save_model(root / "models" / "gpt2", max_position_embeddings=512, num_hidden_layers=1)
    shutil.copytree(root / "models" / "gpt2", root / "gpt2")  # as a published adapter names it
    write_data(root)
    with environment(root), contextlib.chdir(root):
        for line in (
            "train recipes/lora/e2e.yaml",
            "train recipes/baseline/e2e.yaml",
            "audit runs/e2e-baseline",
            "audit runs/e2e-lora",
            "card runs/e2e-baseline",
            "card runs/e2e-lora",
            *(f"plan {name}" for name in (recipes_by_name if every_page else ())),
        ):
            code, output = dpllm_(line.split())
            assert code == 0, output
        with stopped_after(2):
            keys = "--output_dir runs/long --train.checkpoint_every 20 --train.steps 4"
            assert dpllm_(f"train recipes/lora/e2e.yaml {keys}".split())[0] == 1
        shutil.copy("runs/e2e-lora/private/canaries.json", "planted.jsonl")
        shutil.copytree("runs/e2e-lora/export", "my-adapter", ignore=lambda *_: ["audit", "README.md", "privacy.json"])
    return root


def write_data(root: Path) -> None:
    """Rows for the recipes, and the files of the reader's own that pages name."""
    pairs = [{"meaning_representation": tiny.NAMES[n % 10], "human_reference": tiny.sentence(n)} for n in range(120)]
    letters = [
        {"text": tiny.sentence(1000 + n), "patient_id": f"P{n // 2:03d}", "label": label, "age": 30 + n % 40}
        for n, label in enumerate(("yes", "no") * 40)
    ]
    for name, rows in {
        "data/train.jsonl": pairs[:60],
        "data/eval.jsonl": pairs[60:],
        "letters.jsonl": letters[:70],
        "letters-eval.jsonl": letters[70:],
        "mail.jsonl": [{"text": tiny.sentence(4000 + n), "people": [f"P{n}", f"P{n + 1}"]} for n in range(80)],
        "trained.jsonl": [{"text": tiny.sentence(n)} for n in range(2000, 2050)],
        "other.jsonl": [{"text": tiny.sentence(n)} for n in range(3000, 3050)],
    }.items():
        tiny.write_rows(root / name, rows)
    (root / "prompts.txt").write_text("Karin\nLasse\nMalin\n")  # no row's prompt: these are private


@contextlib.contextmanager
def stopped_after(steps: int) -> Iterator[None]:
    """Ctrl-C while the given step runs."""
    rate = LearningRate.at

    def interrupt(settings: Any, step: int, num_steps: int) -> float:
        if step == steps - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return rate(settings, step, num_steps)

    with mock.patch.object(LearningRate, "at", interrupt):
        yield


@contextlib.contextmanager
def opened(prepared: Path, root: Path) -> Iterator[Workspace]:
    """A copy of what was prepared, without its runs, as the current directory."""
    shutil.copytree(prepared, root, ignore=lambda folder, _: ["runs"] if Path(folder) == prepared else [])
    with environment(root), contextlib.chdir(root):
        adopt(default_path())
        yield Workspace(root, prepared)


@contextlib.contextmanager
def environment(root: Path) -> Iterator[None]:
    """The user's data directory, the current dpllm on the path, and one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with mock.patch.dict(os.environ, XDG_DATA_HOME=str(root / "data_home"), PATH=path, COLUMNS="120"):
        yield
    torch.set_num_threads(threads)
