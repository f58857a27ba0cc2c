"""The command line: parse, call one function, print.

Comes in: arguments. Goes out: an exit code (0 done, 2 wrong command or recipe, 3 refused, 4 an audit contradicts the
guarantee, 1 anything else). Heavy imports happen inside the commands, so that ``dpllm --help`` stays quick.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dpllm
from dpllm.errors import AuditContradiction, ConfigError, DpllmError

OVERRIDES = "--SECTION.KEY VALUE"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
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
        wrong = unknown + (overrides if known.command not in {"plan", "train"} else [])
        if wrong:
            raise ConfigError(f"unknown argument {wrong[0]}. Type dpllm {known.command} --help.")
        command: Callable[[argparse.Namespace, list[str]], int] = known.call
        return command(known, overrides)
    except DpllmError as error:
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
        ("plan", _plan, "what a recipe promises and what the ledger would say: no weights, no GPU"),
        ("train", _train, "run a recipe (as accelerate launch recipes/train.py does)"),
    ):
        sub = add(name, call, text)
        sub.usage = f"dpllm {name} RECIPE [options] [{OVERRIDES} ...]"
        sub.add_argument("recipe", nargs="?", help="YAML file, such as recipes/lora/e2e.yaml")
        sub.add_argument("--config", help="the same as RECIPE")
        sub.add_argument("--keys", action="store_true", help="list every key of a recipe, and stop")
        if name == "plan":
            sub.add_argument("--json", action="store_true", help="print plan.json")
        else:
            sub.add_argument("--resume", action="store_true", help="go on with the interrupted run in output_dir")
            sub.add_argument("--overwrite", action="store_true", help="replace the run in output_dir")
    sub = add("audit", _audit, "attack a run: canary exposure, extraction, membership, an epsilon lower bound")
    sub.add_argument("run", help="run directory")
    sub = add("compare", _compare, "with and without differential privacy, side by side")
    sub.add_argument("baseline", help="run directory without differential privacy")
    sub.add_argument("run", help="run directory with differential privacy")
    sub.add_argument("--output", help="where table and figure go (default: RUN/private/compare)")
    sub = add("card", _card, "write the model card into RUN/export")
    sub.add_argument("run", help="run directory")
    sub = add("ledger", _ledger, "the privacy budget of each dataset, across all runs")
    sub.add_argument("action", choices=["show", "init"], help="show: a table; init: set a dataset's budget, once")
    sub.add_argument("dataset", nargs="?", help="name of the dataset")
    sub.add_argument("--ledger", help="path of the ledger (default: in the user's data directory)")
    sub.add_argument("--epsilon", type=float, help="init: budget")
    sub.add_argument("--delta", type=float, help="init: delta of the budget")
    sub.add_argument("--unit", default="example", help="init: privacy unit (default: example)")
    sub.add_argument(
        "--relation", default="zero_out", choices=["zero_out", "add_or_remove_one"], help="init: neighbouring relation"
    )
    add("env", _env, "versions and hardware, for a bug report")
    return parser


def _load(known: argparse.Namespace, rest: list[str]) -> Any:
    from dpllm.config import load_config, parse_overrides

    path = known.config or known.recipe
    if known.config and known.recipe:
        raise ConfigError(f"two recipes given: {known.config} and {known.recipe}. Name one.")
    if path is None:
        raise ConfigError(f"name a recipe: dpllm {known.command} recipes/lora/e2e.yaml")
    return load_config(path, parse_overrides(rest))


def _plan(known: argparse.Namespace, rest: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from dpllm import data, ledger
    from dpllm.config import describe_keys
    from dpllm.privacy import guards
    from dpllm.privacy.plan import RELATION_IN_WORDS, make_plan, make_schedule

    if known.keys:
        print(describe_keys())
        return 0
    config = _load(known, rest)
    guards.check_config(config)
    with tempfile.TemporaryDirectory() as cache:
        num_units = config.data.public_size or data.count_units(config.data, Path(cache))
    if not config.privacy.enabled:
        schedule = make_schedule(config, num_units)
        steps, batch = schedule.num_steps, schedule.expected_batch_size
        if known.json:
            print(json.dumps(asdict(schedule), indent=2, sort_keys=True))
            return 0
        print(f"No differential privacy: {steps} steps of about {batch} units, on data declared public.")
        return 0
    plan = make_plan(config, num_units, ledger.default_path().parent / "calibration")
    if known.json:
        print(json.dumps(plan.to_json(), indent=2, sort_keys=True))
        return 0
    schedule = plan.schedule
    table = Table(title=f"Plan of {known.config or known.recipe}", show_header=False)
    rows = {
        "epsilon": f"{plan.epsilon:.4f} (target {plan.target_epsilon:g})",
        "delta": f"{plan.delta:g} (1/N is {1 / schedule.dataset_size:.2g})",
        "privacy unit": "example: one row"
        if plan.max_examples_per_unit is None
        else f"user-level: column {plan.unit}, at most {plan.max_examples_per_unit} rows of each",
        "neighbouring relation": f"{plan.neighbouring_relation}: {RELATION_IN_WORDS[plan.neighbouring_relation]}",
        "public size N": f"{schedule.dataset_size} units, of which {schedule.canary_slots} are canary slots",
        "sampling rate q": f"{schedule.sampling_rate:.6f}: each unit joins each step by its own coin",
        "steps T": str(schedule.num_steps),
        "expected batch B": f"{schedule.expected_batch_size} units",
        "clipping": f"{plan.clipping}, {'first C' if plan.adaptive else 'C'} = {plan.max_grad_norm:g}",
        "noise multiplier": f"{plan.noise_multiplier:g}"
        + (
            f": {plan.adaptive.gradient_noise_multiplier:.5g} on gradients, {plan.adaptive.count_noise_multiplier:.5g} on the "
            "count that moves C"
            if plan.adaptive
            else ""
        ),
        "accountant": f"{plan.accountant['name']} {plan.accountant['version']}",
        "ledger": _ledger_outlook(config, plan),
    }
    for key, value in rows.items():
        table.add_row(key, value)
    Console().print(table)
    return 0


def _ledger_outlook(config: Any, plan: Any) -> str:
    from dpllm import data, ledger

    path = Path(config.privacy.ledger) if config.privacy.ledger else ledger.default_path()
    name = config.privacy.dataset or data.dataset_name(config.data)
    if not path.exists():
        return f"{name}: nothing spent yet, no budget set"
    with ledger.Ledger(path) as book:
        budget = book.budget(name)
        delta = budget.delta if budget else plan.delta
        spent = book.spent(name, delta)
        after = book.spent(name, delta, planned=(plan.event, plan.neighbouring_relation))
    limit = f"budget {budget.epsilon:g}" if budget else "no budget set"
    verdict = "; THIS RUN WOULD BE REFUSED" if budget and after > budget.epsilon else ""
    return f"{name}: spent {spent:.3f}, after this run {after:.3f} at delta {delta:g} ({limit}){verdict}"


def _train(known: argparse.Namespace, rest: list[str]) -> int:
    if known.keys:
        return _plan(known, rest)
    if known.resume and known.overwrite:
        raise ConfigError("--resume goes on with a run, and --overwrite replaces it. Type one of the two.")
    config = _load(known, rest)
    from dpllm.train import train

    record = train(config, resume=known.resume, overwrite=known.overwrite)
    return 0 if record["status"] == "completed" else 1


def _audit(known: argparse.Namespace, rest: list[str]) -> int:
    from rich.console import Console

    from dpllm.audit.run import audit
    from dpllm.audit.summary import table
    from dpllm.rundir import RunDir

    report = audit(RunDir(Path(known.run)))
    Console().print(table(report))
    if report["verdict"] == "falsified":
        raise AuditContradiction(report["verdict_reason"])
    return 0


def _compare(known: argparse.Namespace, rest: list[str]) -> int:
    from rich.console import Console

    from dpllm.report.compare import compare
    from dpllm.rundir import RunDir

    output = Path(known.output) if known.output else None
    comparison = compare(RunDir(Path(known.baseline)), RunDir(Path(known.run)), output)
    Console().print(comparison.table())
    return 0


def _card(known: argparse.Namespace, rest: list[str]) -> int:
    from dpllm.report.card import write_card
    from dpllm.rundir import RunDir

    print(write_card(RunDir(Path(known.run))))
    return 0


def _ledger(known: argparse.Namespace, rest: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from dpllm import ledger

    path = Path(known.ledger) if known.ledger else ledger.default_path()
    if known.action == "init":
        if known.dataset is None or known.epsilon is None or known.delta is None:
            raise ConfigError("name dataset and budget: dpllm ledger init NAME --epsilon 8 --delta 1e-5")
        with ledger.Ledger(path) as book:
            book.set_budget(known.dataset, known.epsilon, known.delta, known.unit, known.relation)
        print(f"{known.dataset}: budget epsilon {known.epsilon:g} at delta {known.delta:g} per {known.unit}, in {path}")
        return 0
    if not path.exists():
        raise ConfigError(f"{path}: no ledger there yet; the first private run makes one. Name another with --ledger.")
    with ledger.Ledger(path) as book:
        table = Table(
            "dataset",
            "run",
            "steps",
            "status",
            "epsilon",
            "delta",
            title=f"Ledger {path}",
            caption=_ledger_caption(book),
        )
        for name in [known.dataset] if known.dataset else book.datasets():
            for run, steps, status in book.runs(name):
                cost = (f"{run.epsilon:.3f}", f"{run.delta:g}")
                table.add_row(name, run.run, f"{steps}/{run.num_steps}", status, *cost)
            budget = book.budget(name)
            limit = f"of {budget.epsilon:g}" if budget else "no budget set"
            delta = f"{budget.delta:g}" if budget else ""
            table.add_row(
                name, "[bold]all runs, composed[/]", "", limit, f"{book.spent(name):.3f}", delta, end_section=True
            )
        Console().print(table)
    return 0


def _ledger_caption(book: Any) -> str:
    problems = book.verify()
    head = book.head()
    return problems[0] if problems else f"{head['count']} entries, chain unbroken, head {head['hash'][:12]}"


def _env(known: argparse.Namespace, rest: list[str]) -> int:
    from dpllm import environment

    print(json.dumps({"versions": environment.versions(), "hardware": environment.hardware()}, indent=2))
    return 0
