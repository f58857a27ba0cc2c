"""What a message tells people to type is an option of the command that says it."""

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
# Commands -> the modules whose messages they print; those of dpllm/cli/NAME.py are of the commands that it adds.
MODULES_OF: dict[tuple[str, ...], tuple[str, ...]] = {
    ("audit",): ("auditing",),
    ("card",): ("card/registry.py",),
    ("compare",): ("comparison/compare.py", "comparison/shown.py", "comparison/tasks.py"),
    ("plan", "sweep"): ("comparison/choice.py",),
    ("sweep",): ("comparison/choose.py", "comparison/sweep.py"),
    ("plan",): ("run/footprint.py",),
    (*RECIPES, "sweep", "describe", "synthesize"): ("ledger/admission.py",),
    ("ledger init",): ("ledger/budgets.py", "ledger/dataset_policy.py"),
    ("train",): (
        *("ledger/store.py", "model/memory.py", "privacy/plan.py", "run/build.py", "run/checkpoint.py"),
        *("run/failures.py", "run/loop.py", "run/record.py", "text/data.py", "text/tokens.py"),
    ),
    ("ledger init", "ledger import", "ledger adopt", "ledger reconcile", "ledger except"): ("ledger/values.py",),
    RECIPES: (
        *("model/adapters.py", "recipe/section.py", "run/advice.py", "run/base_model.py", "run/promise.py"),
        *("run/subject.py", "statement", "text/layouts.py", "text/rendering.py"),
    ),
    ("epsilon", "plan", "train", "synthesize", "describe"): ("privacy/accounting.py", "privacy/privacy_loss.py"),
    ("describe",): ("privacy/releases.py", "releases/asked.py", "releases/describe.py", "releases/embeddings.py"),
    ("synthesize",): (
        *("privacy/clipped_logits.py", "publish/synthesize.py", "recipe/config.py", "releases/draft.py"),
        *("releases/inference.py", "releases/inference_budget.py"),
    ),
    ("generate",): ("publish/generate.py", "text/prompts.py"),
    ("merge",): ("publish/merge.py",),
    ("push",): ("publish/push.py",),
    ("train", "merge"): ("run/directory.py",),
    ("randomize-labels",): ("releases/labels.py",),
    ("ledger metrics",): ("telemetry/metrics.py",),
    ("randomize-labels", "describe"): ("ledger/ledger.py",),
    ("verify",): ("verification",),
    ("card", "verify"): ("verification/sign.py",),
}
PRINTED_BY = {module: commands for commands, modules in MODULES_OF.items() for module in modules}
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
    """(module, line, text) of every message; values in a message stand as …, and docstrings are left out."""
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
    """Options in a text that the command named before them, or else every command that prints it, does not take."""
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
