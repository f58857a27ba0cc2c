"""What a message tells people to type is an option of the command that says it."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import dpllm
from dpllm import cli

ROOT = Path(dpllm.__file__).parent
RECIPES = ("plan", "train")
# Who prints the messages of a module; those of dpllm/cli/NAME.py are of the commands that it adds.
PRINTED_BY: dict[str, tuple[str, ...]] = {
    "auditing": ("audit",),
    "card/registry.py": ("card",),
    "comparison/compare.py": ("compare",),
    "comparison/shown.py": ("compare",),
    "comparison/choice.py": ("plan", "sweep"),
    "comparison/choose.py": ("sweep",),
    "comparison/sweep.py": ("sweep",),
    "comparison/tasks.py": ("compare",),
    "run/footprint.py": ("plan",),
    "ledger/admission.py": (*RECIPES, "sweep", "describe", "synthesize"),
    "ledger/budgets.py": ("ledger init",),
    "ledger/dataset_policy.py": ("ledger init",),
    "ledger/store.py": ("train",),
    "ledger/values.py": ("ledger init", "ledger import", "ledger adopt", "ledger reconcile", "ledger except"),
    "model/adapters.py": RECIPES,
    "model/memory.py": ("train",),
    "privacy/plan.py": ("train",),
    "privacy/privacy_loss.py": ("epsilon", "plan", "train", "synthesize", "describe"),
    "privacy/accounting.py": ("epsilon", "plan", "train", "synthesize", "describe"),
    "privacy/releases.py": ("describe",),
    "privacy/clipped_logits.py": ("synthesize",),
    "releases/draft.py": ("synthesize",),
    "publish/generate.py": ("generate",),
    "releases/inference.py": ("synthesize",),
    "publish/merge.py": ("merge",),
    "releases/inference_budget.py": ("synthesize",),
    "publish/push.py": ("push",),
    "publish/synthesize.py": ("synthesize",),
    "recipe/config.py": ("synthesize",),
    "recipe/section.py": RECIPES,
    "run/advice.py": RECIPES,
    "run/base_model.py": RECIPES,
    "run/build.py": ("train",),
    "run/loop.py": ("train",),
    "run/checkpoint.py": ("train",),
    "releases/describe.py": ("describe",),
    "run/directory.py": ("train", "merge"),
    "releases/embeddings.py": ("describe",),
    "run/failures.py": ("train",),
    "releases/labels.py": ("randomize-labels",),
    "run/promise.py": RECIPES,
    "run/record.py": ("train",),
    "run/subject.py": RECIPES,
    "statement": RECIPES,
    "telemetry/metrics.py": ("ledger metrics",),
    "ledger/ledger.py": ("randomize-labels", "describe"),
    "releases/asked.py": ("describe",),
    "text/rendering.py": RECIPES,
    "text/layouts.py": RECIPES,
    "text/prompts.py": ("generate",),
    "text/data.py": ("train",),
    "text/tokens.py": ("train",),
    "verification": ("verify",),
    "verification/sign.py": ("card", "verify"),
}
EITHER = {"run/directory.py", "verification/sign.py"}  # each function of them is of one of the two
LAUNCHERS = {"--num_processes", "--nproc_per_node"}  # of accelerate and torchrun
OVERRIDES = {"plan", "train", "describe", "audit", "sweep", "synthesize"}


def commands(parser: argparse.ArgumentParser, name: str = "") -> dict[str, set[str]]:
    """Every command with its options; an action of a command is one."""
    options = {name: set(parser._option_string_actions)} if name else {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                options |= commands(sub, f"{name} {word}".strip())
    return options


OPTIONS = commands(cli._parser())


def messages() -> list[tuple[str, int, str]]:
    """(module, line, text) of what is said; values in a message stand as …, and docstrings are not said."""
    texts = []
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in inner:
                continue
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            texts.append((path.relative_to(ROOT).as_posix(), node.lineno, text))
    return texts


def who(module: str) -> tuple[str, ...]:
    return PRINTED_BY.get(module) or PRINTED_BY.get(module.split("/")[0], ())


def accepts(command: str, option: str) -> bool:
    name = option.lstrip("-").split(".")[0]
    key = "." in option or name == "output_dir"
    return option in OPTIONS[command] or (key and command in OVERRIDES)


def wrong(text: str, printed_by: tuple[str, ...], enough: Callable[[Iterable[bool]], bool] = all) -> list[str]:
    """Options in a text that neither the command named last before them nor else every command that prints it takes."""
    matches = []
    for sentence in re.split(r"(?<=[.;:)])\s", text):
        named: str | None = None
        for word in re.finditer(r"dpllm ([a-z-]+)(?: ([a-z]+))?|(?<![\w-])(--[a-z][\w-]*(?:\.\w+)*)", sentence):
            if word[3] is None:
                pair = f"{word[1]} {word[2]}"
                named = pair if pair in OPTIONS else word[1] if word[1] in OPTIONS else None
            elif word[3] not in LAUNCHERS and not enough(
                accepts(command, word[3]) for command in ([named] if named else printed_by)
            ):
                matches.append(word[3])
            elif word[3] not in LAUNCHERS and not named and not printed_by:
                matches.append(f"{word[3]} (by nobody known)")
    return matches


def of_commands(module: str) -> bool:
    return module.startswith("cli/")


LIBRARY = [
    message
    for message in messages()
    if not of_commands(message[0]) and re.search(r"(?<![\w-])--[a-z].* |.* --[a-z]", message[2])
]


def test_advice_of_the_library_names_options_of_the_command_that_prints_it() -> None:
    assert len(LIBRARY) > 120
    bad = []
    for module, line, text in LIBRARY:
        if matches := wrong(text, who(module), any if module in EITHER else all):
            bad.append(f"{module}:{line}: {matches}")
    assert bad == []


@pytest.mark.parametrize(
    ("text", "printed_by", "matches"),
    [
        ("too many. Lower train.steps or --tokens.", ("epsilon",), ["--tokens"]),
        ("too many. Lower --batch.", ("synthesize",), []),
        ("Type --privacy.epsilon 3.", ("plan",), []),
        ("Type --privacy.epsilon 3.", ("epsilon",), ["--privacy.epsilon"]),
        ("Type dpllm card RUN --sign KEY.", ("verify",), []),
        ("Type dpllm card RUN --sine KEY.", ("verify",), ["--sine"]),
        ("Type dpllm ledger adopt --by NAME", ("plan",), []),
    ],
)
def test_the_test_sees_options_that_are_not_there(text: str, printed_by: tuple[str, ...], matches: list[str]) -> None:
    assert wrong(text, printed_by) == matches


def test_a_command_names_only_options_that_some_command_takes() -> None:
    """Modules of the command line print for several commands: an option is one of theirs."""
    options = set().union(*OPTIONS.values())
    matches = {
        (module, option)
        for module, _, text in messages()
        if of_commands(module)
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*(?![\w.-])", text)
        if option not in options | {"--output_dir", "--version"}
    }
    assert matches == set()
