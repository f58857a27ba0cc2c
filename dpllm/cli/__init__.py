"""The command line: parse, call one function, print.

Comes in: arguments. Goes out: an exit code (0 done, 2 wrong command or recipe, 3 refused, 4 an audit contradicts the
guarantee, 1 anything else). Each module is a group of commands: ``add_commands`` declares their options, and one function runs
each. Heavy imports are inside these functions, so that ``dpllm --help`` stays quick.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence

import dpllm
from dpllm.cli import audit, compare, describe, epsilon, ledger, plan, publish
from dpllm.cli.plan import Call, take_json
from dpllm.errors import ConfigError, DpllmError, EndedElsewhere


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 1 if its output is closed early, as by ``| head -1``."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(
                stream, io.TextIOWrapper
            ):  # a file's name may have characters that this terminal cannot print
                stream.reconfigure(errors="backslashreplace")
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()  # a failure at exit could not be caught
    except BrokenPipeError:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # their buffers are written at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 1


def _run(arguments: list[str]) -> int:
    parser = _parser()
    arguments, overrides = _split(arguments)
    args, unknown = parser.parse_known_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Waiting threads spin for some microseconds, then sleep. If they slept at once, a step of SmolLM2-135M took 1.5 times as long
    # on two idle cores; with GNU's default, a step took two to three times as long next to a busy process (docs/measurements.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        wrong = unknown + (
            overrides if args.command not in {"plan", "train", "describe", "audit", "sweep", "synthesize"} else []
        )
        if wrong:
            raise ConfigError(f"unknown argument {wrong[0]}. Type dpllm {args.command} --help.")
        if args.command not in {"train", "env"} and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "a launcher started several processes, but each would do all the work and write the same files. Type dpllm "
                f"{args.command} without a launcher."
            )
        if getattr(args, "final", False):
            overrides += ["--privacy.final", "true"]
        call: Call = args.call
        return call(args, overrides)
    except EndedElsewhere as error:
        return error.exit_code
    except DpllmError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0" and error.exit_code in {2, 3}:
            return error.exit_code  # before the process group exists, local rank 0 reports the same error
        print(f"dpllm {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        reason = f"{error.filename}: {error.strerror}"
        print(f"dpllm {args.command}: {reason}. Name another path, or fix this one.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dpllm {args.command}: stopped at once; run.json has the state of the run.", file=sys.stderr)
        return 1


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the overrides (``--section.key value``, ``--output_dir value``), at any position, from the other arguments."""
    commands, overrides = [], []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        name = word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""
        if "." in name or name == "output_dir":
            overrides.append(word)
            if "=" not in word and remaining:
                overrides.append(remaining.pop(0))
        else:
            commands.append(word)
    return commands, overrides


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpllm",
        allow_abbrev=False,
        description="Fine-tune causal language models with differential privacy, audit them, publish the card.",
    )
    parser.add_argument("--version", action="version", version=f"dpllm {dpllm.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, call: Call, text: str, json: str | None = "what it says") -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(call=call)
        if json:
            take_json(sub, json)
        return sub

    for module in (plan, describe, audit, compare, publish, epsilon):
        module.add_commands(add)
    ledger.add_arguments(add("ledger", ledger.run, "the privacy budget of each dataset, across all runs", None))
    add("env", _env, "versions and hardware, for a bug report")
    return parser


def _env(args: argparse.Namespace, overrides: list[str]) -> int:
    from dpllm.model import processes

    print(json.dumps({"versions": processes.versions(), "hardware": processes.hardware()}, indent=2))
    return 0
