"""The command line: parse, call one function, print.

Comes in: arguments. Goes out: an exit code (0 done, 2 wrong command or recipe, 3 refused, 4 an audit contradicts the
guarantee, 1 anything else). Each module is a group of commands: ``add_commands`` says what they take, and a function for each
does it. Heavy imports happen inside these functions, so that ``dpllm --help`` stays quick.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence

import dpllm
from dpllm.cli import audit, canaries, compare, describe, epsilon, labels, ledger, plan, publish, synthesize
from dpllm.cli.plan import Call, take_json
from dpllm.errors import ConfigError, DpllmError, EndedElsewhere

# What a command no longer takes -> what to type instead.
RETIRED = {
    "plan --after": "adaptive clipping is retired, whose figures it read; privacy.clipping automatic needs no C to be tuned",
    "plan --compare": "it gave no guarantee; dpllm plan --json has epsilon by each accountant, as `accountants`",
    "plan --figure": "plan prints and draws nothing; --json has every figure of the table",
    **{f"{command} --config": "type the recipe itself" for command in ("plan", "train", "sweep", "canaries")},
    "plan --sweep": "it planned what several dpllm plan commands plan; type one for each value, as --privacy.epsilon 3",
    "epsilon --trials": "the epsilon of one run does not cover choosing the best of several; let the ledger charge every run",
    "epsilon --select": "it belonged to --trials, which is retired too; let the ledger charge every run",
    "audit --mechanism": "every run checks its engine before it starts; set audit.gradient_canaries: 500, then audit the run",
    "audit --leakage": "it attacked a gradient, which a released model does not show; examples/gradient_leakage.py does it",
    "synthesize --engine": "vLLM was never tested with it; leave it out, and transformers draws the texts, 64 at a time",
    "ledger open": "a budget stays planned or adaptive; dpllm ledger init can change it before the first run",
    "ledger --gate": "a budget is adaptive unless dpllm ledger init has --planned",
    "ledger --reference": "the filter's order follows from --epsilon and --delta; leave it out",
    "ledger --runs": "type --planned RECIPE ...",
    "generate --beams": "a sample is drawn, not searched for; --temperature 0 takes the likeliest token each time",
    "merge --dtype": "the weights are written as the recipe loads the base; model.save_pretrained writes any other dtype",
    "push --replace": "other files make the card fail there; remove them with hf repo-files delete, or name another repository",
    "ledger --served": "dpllm verify DIR --ledger FILE says whether the ledger holds a served model's run",
    "ledger plot": "it had no effect; dpllm ledger show says what is left, and dpllm ledger metrics tells Prometheus",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 1 where nobody reads any more what it prints, as before ``| head -1``."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(
                stream, io.TextIOWrapper
            ):  # a stranger's file may have a name that this terminal cannot write
                stream.reconfigure(errors="backslashreplace")
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()  # at exit, Python would say that it fails, and nobody could say otherwise
    except BrokenPipeError:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # what they still hold is written at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 1


def _run(arguments: list[str]) -> int:
    if fix := RETIRED.get(" ".join(arguments[:2])):  # an action that the parser does not know
        print(f"dpllm {arguments[0]}: {arguments[1]} is retired: {fix}.", file=sys.stderr)
        return 2
    parser = _parser()
    arguments, overrides = _split(arguments)
    known, unknown = parser.parse_known_args(arguments)
    if known.command is None:
        parser.print_help()
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Waiting threads spin for some microseconds, then sleep. Asleep at once, a step of SmolLM2-135M took 1.5 times as long on two
    # idle cores; with GNU's default, a step beside another busy process took two to three times as long (docs/measurements.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        wrong = unknown + (
            overrides
            if known.command not in {"plan", "train", "describe", "canaries", "audit", "sweep", "synthesize"}
            else []
        )
        if wrong:
            name = wrong[0].partition("=")[0]
            if fix := RETIRED.get(f"{known.command} {name}"):
                raise ConfigError(f"{name} is retired: {fix}.")
            raise ConfigError(f"unknown argument {wrong[0]}. Type dpllm {known.command} --help.")
        if known.command not in {"train", "sweep", "env"} and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "a launcher started several processes, and each would do all the work and write the same files. Type dpllm "
                f"{known.command} without a launcher."
            )
        call: Call = known.call
        return call(known, overrides)
    except EndedElsewhere as error:
        return error.exit_code
    except DpllmError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0" and error.exit_code in {2, 3}:
            return error.exit_code  # before the group stands; the first process of the machine says the same
        print(f"dpllm {known.command}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        where = f"{error.filename}: {error.strerror}"
        print(f"dpllm {known.command}: {where}. Name another path, or fix this one.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dpllm {known.command}: stopped at once; run.json has the state of the run.", file=sys.stderr)
        return 1


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes overrides (``--section.key value``, ``--output_dir value``) out, wherever they stand."""
    commands, overrides = [], []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name = word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""
        if "." in name or name == "output_dir":
            overrides.append(word)
            if "=" not in word and rest:
                overrides.append(rest.pop(0))
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

    for module in (plan, describe, labels, canaries, audit, compare, publish, synthesize, epsilon):
        module.add_commands(add)
    ledger.add_arguments(add("ledger", ledger.run, "the privacy budget of each dataset, across all runs", None))
    add("env", _env, "versions and hardware, for a bug report")
    return parser


def _env(known: argparse.Namespace, rest: list[str]) -> int:
    from dpllm.model import environment

    print(json.dumps({"versions": environment.versions(), "hardware": environment.hardware()}, indent=2))
    return 0
