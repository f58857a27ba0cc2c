"""The command line: quick where it can be, exit codes as documented, overrides wherever they stand."""

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import fresh, write_recipe

import dpllm
from dpllm import errors
from dpllm.cli import _parser, main
from dpllm.ledger import open_ledger

# Each command in a process of its own, whose standard output, or error too, nobody reads any more.
UNREAD = """
import json, os, sys
import dpllm.releases.describe  # read once for all
from dpllm.cli import main
both, *commands = json.loads(sys.argv[1])
for number, words in enumerate(commands):
    if not os.fork():
        there, back = os.pipe()
        os.close(there)
        for stream in (1, 2) if both else (1,):
            os.dup2(back, stream)
        sys.exit(main(words))
    sys.stderr.flush()
    print(os.waitstatus_to_exitcode(os.wait()[1]), *words)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    runs = [fresh("--help") for _ in range(2)]
    for answer, loaded, _ in runs:
        assert (answer.returncode, loaded) == (0, [])
    assert min(seconds for *_, seconds in runs) < 1.0  # twice the bar of half a second, for a busy machine
    for command in ("plan", "train", "audit", "compare", "card", "ledger", "env"):
        assert command in runs[0][0].stdout


def test_only_the_noise_of_a_missing_kernel_is_silenced(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
    logger.warning("something that matters")
    assert caplog.messages == ["something that matters"]


def test_no_command_prints_the_help_and_keys_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "train"):
        assert main([command, "--keys"]) == 0
        assert "--privacy.epsilon (default 8.0)" in capsys.readouterr().out
    assert main([]) == 0
    assert "usage: dpllm" in capsys.readouterr().out


def test_overrides_may_stand_anywhere(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = plan(capsys, recipe, "--train.steps", 7, "--privacy.epsilon=20")
    assert (expected["num_steps"], expected["target_epsilon"]) == (7, 20.0)
    assert plan(capsys, "--train.steps", 7, recipe, "--privacy.epsilon=20") == expected
    assert plan(capsys, "--train.steps=7", recipe, "--privacy.epsilon", 20) == expected
    assert main(["--train.steps", "7", "plan", "--json", str(recipe), "--privacy.epsilon", "20"]) == 0
    assert json.loads(capsys.readouterr().out) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan"], "name a recipe"), (["train"], "name a recipe"), (["plan", "."], "is a directory"),
        (["plan", "RECIPE", "--jsn"], "--jsn"), (["plan", "RECIPE", "more"], "more"),
        (["audit", "run", "--train.steps", "3"], "holds no run"),
        (["train", "RECIPE", "--resume", "--overwrite"], "one of the two"),
        (["plan", "RECIPE", "--train.steps"], "--train.steps VALUE"), (["plan", "absent.yaml"], "no such recipe"),
    ],
)  # fmt: skip
def test_wrong_commands_are_one_line_and_code_2(recipe: Path, capsys: Any, arguments: list[str], named: str) -> None:
    assert main([argument.replace("RECIPE", str(recipe)) for argument in arguments]) == 2
    assert named in one_line(capsys, arguments[0])


def one_line(capsys: pytest.CaptureFixture[str], command: str) -> str:
    message = capsys.readouterr().err
    assert message.startswith(f"dpllm {command}: ")
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    "words",
    [
        ["verify"],
        ["plan", "RECIPE", "--output_dir"],
        ["synthesize", "--rows", "3"],
        ["train", "RECIPE", "--data.train"],
    ],
    ids=" ".join,
)
def test_a_path_that_is_too_long_is_one_line(recipe: Path, capsys: Any, words: list[str]) -> None:
    """As a text typed where its file's name belongs: longer than any name may be."""
    assert main([*(word.replace("RECIPE", str(recipe)) for word in words), "long " * 60]) == 1
    assert "File name too long" in one_line(capsys, words[0])


@pytest.mark.parametrize(
    "command",
    [
        *(f"plan RECIPE --{key} LOOP" for key in ("data.train", "data.eval", "model.adapter", "privacy.ledger")),
        *(f"plan RECIPE --data.train {source}" for source in ("L*P", "[RECIPE,LOOP]")),
        *("plan RECIPE --model.name_or_path ./LOOP", "plan LOOP"),
        *("train RECIPE --output_dir LOOP", "train RECIPE --output_dir LOOP/run"),
        "train RECIPE --model.name_or_path builtin:tiny --train.sample_prompts LOOP",
        *("describe LOOP --epsilon 1 --units", "audit LOOP", "card LOOP", "verify LOOP", "compare LOOP LOOP"),
        *("push LOOP alice/notes", "generate LOOP", "ledger verify --ledger LOOP"),
    ],
)
def test_a_link_to_itself_is_one_line(recipe: Path, capsys: Any, monkeypatch: Any, command: str) -> None:
    monkeypatch.chdir(recipe.parent)
    Path("LOOP").symlink_to("LOOP")
    assert main([word.replace("RECIPE", str(recipe)) for word in command.split()]) in (1, 2)
    one_line(capsys, command.split()[0])
    assert Path("LOOP").is_symlink()


@pytest.mark.parametrize("both", [False, True])
def test_a_command_that_nobody_reads_ends_without_a_traceback(recipe: Path, both: bool) -> None:
    """As before ``| head -1``: the exit code is 1, which rich and Python's documentation have too."""
    ledger = ["--ledger", str(recipe.with_name("ledger.sqlite"))]
    with open_ledger(ledger[1]) or contextlib.nullcontext():
        pass
    plan = ["plan", str(recipe)]
    numbers = ["--dataset-size", "99", "--batch-size", "9", "--steps", "9", "--noise-multiplier", "2"]
    commands: list[list[str]] = [[], ["--help"], ["--version"], ["plan", "--keys"], ["train", "--help"], plan]
    if not both:
        commands += [[*plan, "--json"], ["epsilon", *numbers]]
        commands += [["ledger", *words, *ledger] for words in (["verify"], ["show"], ["show", "--json"])]
        commands += [["describe", str(recipe), "--epsilon", "1", "--units", "--dry-run"]]
    env = {**os.environ, "PYTHONUNBUFFERED": "", "PYTHONPATH": str(Path(dpllm.__file__).parents[1])}
    typed = [sys.executable, "-c", UNREAD, json.dumps([both, *commands])]
    answer = subprocess.run(typed, env=env, capture_output=True, text=True, timeout=120)
    assert answer.stderr == ""
    assert answer.stdout.splitlines() == [" ".join(["1", *words]) for words in commands]


@pytest.mark.parametrize("arguments", [["fly"], ["ledger", "burn"], ["ledger", "init", "notes"], ["audit"]])
def test_what_argparse_refuses_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ConfigError, 2), (errors.DataError, 2), (errors.Refused, 3), (errors.BudgetExceeded, 3),
        (errors.AuditContradiction, 4), (errors.DpllmError, 1),
    ],
)  # fmt: skip
def test_every_kind_of_error_has_its_code(kind: Any, code: int, monkeypatch: Any, capsys: Any) -> None:
    def fail(*_: object) -> int:
        raise kind("what, why, and what to type")

    monkeypatch.setattr("dpllm.cli._env", fail)
    assert main(["env"]) == code
    assert capsys.readouterr().err == "dpllm env: what, why, and what to type\n"


# What prints a sentence or a path, or has a format of its own.
ACTIONS = ("init", "adopt", "except", "reconcile", "import", "export", "metrics")
NO_TABLE = {"card", "import-config", "merge", *(f"ledger {action}" for action in ACTIONS)}


def every_command(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for name, sub in action.choices.items():
            yield from every_command(sub, f"{path} {name}".strip())
    if not inner:
        yield path, parser


@pytest.mark.parametrize("name", dict(every_command(_parser())))
def test_every_command_with_a_table_has_json(name: str) -> None:
    parser = dict(every_command(_parser()))[name]
    takes = any("--json" in action.option_strings for action in parser._actions)
    assert takes or name in NO_TABLE, f"dpllm {name} prints a table without --json, or belongs to NO_TABLE"


def test_env_names_versions_and_no_user(capsys: pytest.CaptureFixture[str]) -> None:
    import getpass
    import platform

    printed = []
    for words in (["env"], ["env", "--json"]):
        assert main(words) == 0
        printed.append(capsys.readouterr().out)
    text = printed[0]
    assert printed[1] == text
    value = json.loads(text)
    assert value["versions"]["dpllm"] == dpllm.__version__
    assert value["hardware"]["cpu_cores"] == os.cpu_count()
    assert platform.node() not in text or len(platform.node()) < 4
    assert str(Path.home()) not in text
    assert f"/{getpass.getuser()}/" not in text
