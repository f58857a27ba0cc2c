"""The command line: parse, call one function, print.

Comes in: arguments. Goes out: an exit code (0 done, 2 wrong command or recipe, 3 refused, 4 an audit contradicts the
guarantee, 1 anything else). Every command is a module here with ``add_arguments(parser)`` and ``run(known, overrides)``.
Heavy imports happen inside ``run``, so that ``dpllm --help`` stays quick.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

import dpllm
from dpllm.cli import audit, canaries, card, compare, epsilon, generate, ledger, merge, plan, push, sweep, verify
from dpllm.cli.recipes import load_recipe
from dpllm.errors import ConfigError, DpllmError, EndedElsewhere

OVERRIDES = "--SECTION.KEY VALUE"
# What a command no longer takes -> what to type instead.
RETIRED = {
    "plan --compare": "it promised nothing; dpllm plan --json has epsilon by each accountant, as `accountants`",
    "plan --figure": "plan prints and draws nothing; --sweep with --json has every figure of the table",
    "epsilon --trials": "the epsilon of one run does not cover choosing the best of several; let the ledger charge every run",
    "epsilon --select": "it belonged to --trials, which is retired too; let the ledger charge every run",
    "ledger open": "the rule of a budget stays; for an adaptive one, dpllm ledger init --gate adaptive before the first run",
    "ledger plot": "it decided nothing; dpllm ledger show says what is left, and dpllm ledger metrics lets Prometheus draw it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if mend := RETIRED.get(" ".join(arguments[:2])):  # an action that the parser does not know
        print(f"dpllm {arguments[0]}: {arguments[1]} is retired: {mend}.", file=sys.stderr)
        return 2
    parser = _parser()
    arguments, overrides = _split(arguments)
    known, unknown = parser.parse_known_args(arguments)
    if known.command is None:
        parser.print_help()
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Waiting threads sleep: spinning ones made a step 20 times slower beside another busy process on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        wrong = unknown + (overrides if known.command not in {"plan", "train", "canaries", "audit", "sweep"} else [])
        if wrong:
            name = wrong[0].partition("=")[0]
            if mend := RETIRED.get(f"{known.command} {name}"):
                raise ConfigError(f"{name} is retired: {mend}.")
            raise ConfigError(f"unknown argument {wrong[0]}. Type dpllm {known.command} --help.")
        if known.command not in {"train", "sweep", "env"} and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "a launcher started several processes, each of which would do all of it and write the same files. "
                f"Type dpllm {known.command} without a launcher."
            )
        command: Callable[[argparse.Namespace, list[str]], int] = known.call
        return command(known, overrides)
    except EndedElsewhere as error:
        return error.exit_code
    except DpllmError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0" and error.exit_code in {2, 3}:
            return error.exit_code  # before the group stands; the first process of the machine says the same
        print(f"dpllm {known.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"dpllm {known.command}: stopped at once; run.json says what stands.", file=sys.stderr)
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

    def add(name: str, call: Callable[[argparse.Namespace, list[str]], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(call=call)
        return sub

    for name, call, text in (
        ("plan", plan.run, "what a recipe promises and what the ledger would say: no weights, no GPU"),
        ("train", _train, "run a recipe (as accelerate launch recipes/train.py does)"),
    ):
        sub = add(name, call, text)
        sub.usage = f"dpllm {name} RECIPE [options] [{OVERRIDES} ...]"
        sub.add_argument("recipe", nargs="?", help="YAML file, such as recipes/lora/e2e.yaml")
        sub.add_argument("--config", help="the same as RECIPE")
        sub.add_argument("--keys", action="store_true", help="list every key of a recipe, and stop")
        if name == "plan":
            plan.add_arguments(sub)
        else:
            sub.add_argument("--resume", action="store_true", help="go on with the interrupted run in output_dir")
            sub.add_argument(
                "--make-up-lost-steps",
                action="store_true",
                help="with --resume: reserve and repeat the steps that were charged and lost in a crash",
            )
            sub.add_argument("--overwrite", action="store_true", help="replace the run in output_dir")
    for name, module, text in (
        ("canaries", canaries, "draw what a recipe plants for its audit, before training"),
        ("audit", audit, "attack a run: canary exposure, extraction, membership, an epsilon lower bound"),
        ("compare", compare, "two or more runs side by side: utility, leakage, cost, privacy"),
        ("sweep", sweep, "train a recipe at several epsilons as one tuning group, and compare"),
        ("card", card, "write the model card into RUN/export, and sign it"),
        ("verify", verify, "recompute every number that a card states"),
        ("push", push, "upload RUN/export to the Hub, once it verifies"),
        ("generate", generate, "sample text from a tuned model"),
        ("merge", merge, "write weights with the adapter merged in, with the same card"),
        ("epsilon", epsilon, "what DP-SGD with given numbers guarantees, or the noise for a given epsilon"),
        ("ledger", ledger, "the privacy budget of each dataset, across all runs"),
    ):
        module.add_arguments(add(name, module.run, text))
    add("env", _env, "versions and hardware, for a bug report")
    return parser


def _train(known: argparse.Namespace, rest: list[str]) -> int:
    if known.keys:
        return plan.run(known, rest)
    if known.resume and known.overwrite:
        raise ConfigError("--resume goes on with a run, and --overwrite replaces it. Type one of the two.")
    if known.make_up_lost_steps and not known.resume:
        raise ConfigError("--make-up-lost-steps belongs to --resume. Type both.")
    config = load_recipe(known, rest)
    from dpllm.run.loop import train

    record = train(config, resume=known.resume, overwrite=known.overwrite, make_up_lost_steps=known.make_up_lost_steps)
    return 0 if record["status"] == "completed" else 1


def _env(known: argparse.Namespace, rest: list[str]) -> int:
    from dpllm.model import environment

    print(json.dumps({"versions": environment.versions(), "hardware": environment.hardware()}, indent=2))
    return 0
