"""``dpllm plan``, ``train`` and ``import-config``: the guarantee and cost of a recipe; its run; recipes from other tools.

Planning needs no weights, no GPU and no torch; only ``--model`` imports torch, to build the model from its configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.errors import ConfigError, DpllmError
from dpllm.files import as_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from dpllm.comparison.choice import Choice
    from dpllm.privacy.plan import Plan
    from dpllm.privacy.schedule import Schedule
    from dpllm.recipe.config import RunConfig
    from dpllm.run.footprint import Footprint
    from dpllm.run.promise import Decision
    from dpllm.run.subject import Refusals

OVERRIDES = "--SECTION.KEY VALUE"
LIMITS = {
    "tpr_at_fpr_0.01": "TPR at 1% FPR",
    "tpr_at_fpr_0.001": "TPR at 0.1% FPR",
    "auc": "AUC",
    "gdp_mu": "mu of Gaussian DP",
}
Call = Callable[[argparse.Namespace, list[str]], int]
"""One command: (parsed arguments, overrides of recipe keys) -> exit code."""


AddCommand = Callable[..., argparse.ArgumentParser]
"""Adds the parser of one command: (name, call, help, content of --json; None: no such option); see ``cli._parser``."""


def take_json(parser: argparse.ArgumentParser, content: str = "what it says") -> None:
    """Declares --json."""
    parser.add_argument("--json", action="store_true", help=f"print {content} as one JSON object")


def take_recipe(parser: argparse.ArgumentParser, usage: str, text: str = ", such as recipes/lora/e2e.yaml") -> None:
    """Declares a recipe; ``load_recipe`` reads it."""
    parser.usage = f"dpllm {usage} [options] [{OVERRIDES} ...]"
    parser.add_argument("recipe", nargs="?", help=f"YAML file{text}")


def take_ledger(parser: argparse.ArgumentParser) -> None:
    """Declares --ledger."""
    parser.add_argument("--ledger", help="path or postgresql:// URL (default: a file in the user's data directory)")


CONSTANT_RATE = "with --twin: the twin's learning rate stays constant, so that its weights show more of each step"


def check_rate(args: argparse.Namespace) -> None:
    """Refuses --constant-rate without --twin."""
    if args.constant_rate and not args.twin:
        raise ConfigError(
            "--constant-rate is for an audit twin. Type --twin too, or set train.lr_scheduler for the run itself."
        )


def take_choice(parser: argparse.ArgumentParser) -> None:
    """Declares the options of a choice: the best of a secret number of runs."""
    option = parser.add_argument
    option("--choose", action="store_true", help="the best of a secret number of runs, which alone is released")
    option(
        "--mean-runs", type=float, metavar="M", help="with --choose: how many runs there are in the mean, such as 10"
    )
    text = "with --choose: settings, as KEY: [VALUE, ...]; KEY: [...], of which each run draws a combination"
    option("--over", metavar="LISTS", help=text)


def parse_choice(args: argparse.Namespace, overrides: list[str]) -> Choice:
    """The choice that --choose, --over and --mean-runs describe."""
    from dpllm.comparison.choice import EXAMPLE, plan_choice

    if args.over is None or args.mean_runs is None:
        raise ConfigError(f"a choice needs settings, and the mean number of runs. Type {EXAMPLE}")
    return plan_choice(*parse_recipe(args, overrides), args.over, args.mean_runs)


def take_final(parser: argparse.ArgumentParser) -> None:
    """Declares --final, which sets ``privacy.final`` of the recipe."""
    text = "the first and last reservation on the dataset, by its exact epsilon: no run can follow (privacy.final)"
    parser.add_argument("--final", action="store_true", help=text)


def add_commands(add: AddCommand) -> None:
    """Adds the commands and their options."""
    text = "the guarantee of a recipe and what the ledger would say; needs no weights, no GPU"
    planned = add("plan", plan, text, "plan.json, with ledger, refusals and advice,")
    text = "run a recipe (as accelerate launch recipes/train.py does)"
    trained = add("train", train, text, "the summary (the rest goes to stderr)")
    for name, parser in (("plan", planned), ("train", trained)):
        take_recipe(parser, f"{name} RECIPE")
        take_final(parser)
        parser.add_argument("--keys", action="store_true", help="list every key of a recipe, and stop")
    option = planned.add_argument
    option("--model", action="store_true", help="trained layers and memory, from the model's config only")
    option("--device", metavar="GPU", help="with --model: for an a100 or h100 of 80 GB, not for this machine")
    option(
        "--twin", action="store_true", help="epsilon of the recipe without text canaries and its audit twin together"
    )
    option("--constant-rate", action="store_true", help=CONSTANT_RATE)
    take_choice(planned)
    option = trained.add_argument
    option("--resume", action="store_true", help="go on with the interrupted run in output_dir")
    option("--overwrite", action="store_true", help="replace the run in output_dir")
    text = "turn a LLaMA-Factory, axolotl or TRL configuration into a recipe"
    option = add("import-config", import_config, text, None).add_argument
    option("file", help="their YAML file")
    option("--output", metavar="RECIPE", help="write the recipe here (default: print it; the report goes to stderr)")


def parse_recipe(args: argparse.Namespace, overrides: list[str]) -> tuple[str, dict[str, Any]]:
    """The path of the recipe that a command names, and its overrides; raises ConfigError if it names none."""
    from dpllm.recipe.section import parse_overrides

    if args.recipe is None:
        action = " ".join(filter(None, (args.command, getattr(args, "action", None))))
        raise ConfigError(f"name a recipe: dpllm {action} recipes/lora/e2e.yaml")
    return args.recipe, parse_overrides(overrides)


def load_recipe(args: argparse.Namespace, overrides: list[str]) -> RunConfig:
    """The recipe that a command names, with its overrides; raises ConfigError if there is none, or it cannot be read."""
    from dpllm.recipe.config import load_config

    return load_config(*parse_recipe(args, overrides))


def train(args: argparse.Namespace, overrides: list[str]) -> int:
    """Runs a recipe; exit code 1 if it was interrupted."""
    if args.keys:
        return _show_keys()
    if args.resume and args.overwrite:
        raise ConfigError("--resume continues a run, but --overwrite replaces it. Type one of the two.")
    config = load_recipe(args, overrides)
    from dpllm.run.directory import Run, RunDir
    from dpllm.run.loop import train as run
    from dpllm.run.promise import Start
    from dpllm.run.screen import summary

    main = os.environ.get("RANK", "0") == "0"
    start = Start(args.resume, args.overwrite)
    record = run(config, start, console=plain_console(stderr=args.json, quiet=not main))
    if args.json and main:
        print(dump(summary(Run(RunDir(Path(config.output_dir)), record, config))))
    return 0 if record.status == "completed" else 1


def _show_keys() -> int:
    from dpllm.recipe.config import RunConfig
    from dpllm.recipe.section import describe

    print(describe(RunConfig))
    return 0


def plan(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints the plan, then all reasons to refuse it."""
    if args.keys:
        return _show_keys()
    if args.recipe and (Path(args.recipe) / "config.yaml").is_file():  # the directory of a run
        args.recipe = str(Path(args.recipe) / "config.yaml")
    check_rate(args)
    if args.choose:
        choice = parse_choice(args, overrides)
        return show(
            args, choice.to_json() if args.json else _two_columns(f"Choice of {args.recipe}", choice.in_words())
        )
    if args.twin:
        from dpllm.comparison.sweep import combined_epsilon, twins

        points = twins(*parse_recipe(args, overrides), constant_rate=args.constant_rate)
    config = points[0].config if args.twin else load_recipe(args, overrides)
    if args.device and not args.model:
        raise ConfigError("--device names the GPU for which --model estimates memory. Type both.")
    from dpllm.run.promise import Start, decide
    from dpllm.run.subject import Refusals

    in_run = Path(args.recipe).resolve() == (Path(config.output_dir) / "config.yaml").resolve()
    decision = decide(config, Start(overwrite=in_run))  # for a run's own recipe: what another run of it would promise
    refusals = Refusals()
    refusals.errors += decision.refusals
    needs = _footprint(config, decision, refusals, args.device) if args.model else None
    twin = refusals.attempt(combined_epsilon, points) if args.twin else None
    if args.json:
        print(dump(_json(decision, needs, refusals.errors) | ({"twin": twin} if twin else {})))
    else:
        lines = [f"Advice: {text}" for text in decision.advice]
        if twin:
            total = "With its audit twin: epsilon {epsilon:.4f} at delta {delta:g} for both together".format(**twin)
            lines.append(f"{total}; dpllm sweep RECIPE --twin reserves and trains them as one group.")
        _show(args, decision, needs, lines)
        if sys.stdout.isatty() and decision.subject and decision.subject.rows:
            from dpllm.run.screen import tell_lengths_of_some

            tell_lengths_of_some(decision.config, decision.subject.rows.table, plain_console())
    for error in refusals.errors:
        print(f"dpllm plan: {error}", file=sys.stderr)
    return max((error.exit_code for error in refusals.errors), default=0)


def _footprint(config: RunConfig, decision: Decision, refusals: Refusals, gpu: str | None) -> Footprint | None:
    from dpllm.run.footprint import footprint

    needs = refusals.attempt(footprint, config, decision.plan.bands if decision.plan else 1, gpu)
    if needs:
        refusals.errors += needs.refusals
    return needs


def _show(args: argparse.Namespace, decision: Decision, needs: Footprint | None, lines: list[str]) -> None:
    console = plain_console()
    if not decision.config.privacy.enabled and decision.schedule:
        steps, batch = decision.schedule.num_steps, decision.schedule.expected_batch_size
        console.print(f"No differential privacy: {steps} steps of about {batch} units.")
    if decision.schedule or decision.subject is not None:
        console.print(_two_columns(f"Plan of {args.recipe}", _rows(decision)))
    if needs:
        from dpllm.model.adapters import trainable_text

        console.print(trainable_text(needs.kinds, needs.total))
        console.print(_two_columns("An estimate of memory", _memory(needs)))
    for line in lines:
        console.print(line, highlight=False)


def _two_columns(title: str, rows: dict[str, str]) -> Table:
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _rows(decision: Decision) -> dict[str, str]:
    schedule, plan = decision.schedule, decision.plan
    rows = {"REFUSED": "this run would not start; the reasons are below"} if decision.refusals else {}
    rows |= _promise(plan) if plan else {}
    rows |= {"beware": decision.lowered} if decision.lowered else {}
    if schedule:
        batch, largest = schedule.expected_batch_size, largest_batch(schedule)
        by_row = plan and (plan.sampling == "example" or plan.neighbouring_relation == "zero_out_public_graph")
        counted = "rows" if by_row else "units"
        rows |= {
            "public size N": f"{schedule.dataset_size} {counted}, of which {schedule.canary_slots} are canary slots",
            "sampling rate q": f"{schedule.sampling_rate:.6f}: each joins each step by its own coin"
            + (", when it is its group's turn" if plan and plan.coefficients else ""),
            "steps T": str(schedule.num_steps),
            "logical batch": f"B = {batch} {counted} expected, at most {largest} in 99.9% of the steps",
        }
    elif decision.subject is not None:
        rows["public size"] = f"{decision.subject.num_units} without canary slots"
    if plan:
        rows["clipping"] = f"{plan.clipping}, C = {plan.max_grad_norm:g}"
        rows["noise multiplier sigma"] = f"{plan.noise_multiplier:g}"
        if plan.coefficients:
            turns = f"{plan.bands} groups take turns, at rate {plan.group_rate:.6f}"
            earlier = f"{8 * (plan.bands - 1)} bytes of earlier noise per trained parameter"
            rows["banded noise"] = f"{plan.bands} bands; {turns}; {earlier}"
        rows["ledger"] = str(decision.ledger or "no ledger there yet: nothing is spent, and no budget is set")
    if decision.subject and decision.subject.graph:
        rows["rows kept"] = str(decision.subject.graph)
    if decision.subject and decision.subject.reads:
        rows["data"] = decision.subject.reads
        rows["first example" if decision.config.data.public else "an example"] = decision.subject.example
    return rows


def _promise(plan: Plan) -> dict[str, str]:
    from dpllm.privacy.plan import RELATION_IN_WORDS
    from dpllm.statement.formatting import limit_text

    accountants = ", ".join(f"{name} {_epsilon(value)}" for name, value in plan.accountants.items())
    unit = "example: one row"
    if plan.max_examples_per_unit is not None:
        by_unit = plan.sampling == "unit" and plan.neighbouring_relation != "zero_out_public_graph"
        drawing = "drawn together" if by_unit else "drawn one by one"
        unit = f"user-level: column {plan.unit}, at most {plan.max_examples_per_unit} rows of each, {drawing}"
    values = plan.limits.to_json()
    limits = [f"{words} {limit_text(name, values[name])}" for name, words in LIMITS.items() if values[name] is not None]
    return {
        "epsilon": f"{plan.epsilon:.4f} (target {plan.target_epsilon:g})",
        "delta": f"{plan.delta:g} (1/N is {1 / plan.dataset_size:.2g})",
        "by accountant": f"{accountants} (stated: {plan.accountant.name} {plan.accountant.version})",
        "privacy unit": unit,
        "neighbouring relation": f"{plan.neighbouring_relation}: {RELATION_IN_WORDS[plan.neighbouring_relation]}",
        "limits on an attacker": "membership inference, at most: " + ", ".join(limits)
        if limits
        else "none can be certified",
    }


def _epsilon(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 1e6 else f"{value:.3e}"


def _memory(needs: Footprint) -> dict[str, str]:
    from rich.filesize import decimal

    if needs.memory is None:
        return {"basis": needs.basis}
    parts = ", ".join(f"{name.replace('_', ' ')} {decimal(size)}" for name, size in vars(needs.memory).items() if size)
    total = f"about {decimal(needs.memory.total)}, with {needs.packing} in one forward pass"
    return {"memory": f"{total}: {parts}", "basis": needs.basis}


def largest_batch(schedule: Schedule) -> int:
    """The smallest number of units that a step exceeds with probability at most 0.1%; the logical batch is Binomial(N, q)."""
    from scipy import stats

    return int(stats.binom.ppf(0.999, schedule.dataset_size, schedule.sampling_rate))


def _json(decision: Decision, needs: Footprint | None, refusals: list[DpllmError]) -> dict[str, Any]:
    from dpllm.privacy.plan import LATER

    plan = decision.plan.to_json() if decision.plan else {}
    fields: dict[str, Any] = {
        **(asdict(decision.schedule) if decision.schedule else {}),
        **{name: value for name, value in plan.items() if name not in LATER},
        "largest_batch": largest_batch(decision.schedule) if decision.schedule else None,
        "ledger": asdict(decision.ledger) if decision.ledger else None,
        "refusals": [{"exit_code": error.exit_code, "message": str(error)} for error in refusals],
        "advice": decision.advice,
    }
    if decision.subject and decision.subject.graph:
        fields["graph"] = asdict(decision.subject.graph)
    if needs:
        memory = {**asdict(needs.memory), "total": needs.memory.total} if needs.memory else None
        fields["model"] = {**asdict(needs), "refusals": [str(error) for error in needs.refusals], "memory": memory}
    return fields


def import_config(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints or writes the recipe; reports on stderr which keys were carried over and which were not."""
    from dpllm.recipe import imports

    imported = imports.import_config(Path(args.file))
    report = [
        f"{imported.tool} configuration {args.file}",
        "Carried over:",
        *(f"  {line}" for line in imported.carried),
    ]
    report += ["Not carried over:", *(f"  {line}" for line in imported.omitted)]
    report.append(
        "Choose privacy.epsilon, data.unit, train.batch_size and train.learning_rate anew; dpllm plan RECIPE advises."
    )
    print("\n".join(report), file=sys.stderr)
    if args.output is None:
        print(imported.recipe, end="")
        return 0
    with writing(args.output), open(args.output, "x", encoding="utf-8") as file:
        file.write(imported.recipe)
    return 0


@contextmanager
def writing(output: str) -> Iterator[None]:
    """Raises system errors of writing --output as ConfigError."""
    try:
        yield
    except FileExistsError:
        raise ConfigError(f"{output}: already exists, and would be lost. Type another --output.") from None
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error.strerror}). Type another --output.") from None


def show(args: argparse.Namespace, value: dict[str, Any] | RenderableType, *lines: str) -> int:
    """Prints values as JSON with --json, else a table or text, with the lines below it; returns exit code 0."""
    if args.json:
        assert isinstance(value, dict)
        print(dump(value))
        return 0
    console = plain_console()
    console.print(value)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def plain_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """The console of every command, which prints text literally, without rich's markup and emoji."""
    from rich.console import Console

    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False)


def dump(value: dict[str, Any]) -> str:
    """JSON for standard output; an epsilon that cannot be certified is null."""
    return json.dumps(as_json(value), indent=2, sort_keys=True, allow_nan=False)
