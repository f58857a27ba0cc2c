"""``dpllm plan``, ``train`` and ``import-config``: what a recipe promises, costs and needs; its run; one out of another tool's.

To plan takes no weights, no GPU and no torch; ``--model`` alone imports it, to build the model from its configuration.
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
"""One command: of the arguments that the parser knows, and the overrides of a recipe's keys, to an exit code."""


AddCommand = Callable[..., argparse.ArgumentParser]
"""Makes the parser of one command, of its name, call and help, with --json for what ``json`` names; see ``cli._parser``."""


def take_json(parser: argparse.ArgumentParser, what: str = "what it says") -> None:
    """Declares --json."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as one JSON object")


def take_recipe(parser: argparse.ArgumentParser, usage: str, text: str = ", such as recipes/lora/e2e.yaml") -> None:
    """Declares a recipe; ``load_recipe`` reads it."""
    parser.usage = f"dpllm {usage} [options] [{OVERRIDES} ...]"
    parser.add_argument("recipe", nargs="?", help=f"YAML file{text}")


def take_ledger(parser: argparse.ArgumentParser) -> None:
    """Declares the ledger that is opened."""
    parser.add_argument("--ledger", help="path or postgresql:// URL (default: a file in the user's data directory)")


CONSTANT_RATE = "with --twin: the twin's learning rate stays constant, so that its weights show more of each step"


def check_rate(known: argparse.Namespace) -> None:
    """Refuses --constant-rate without a twin to train so."""
    if known.constant_rate and not known.twin:
        raise ConfigError(
            "--constant-rate is of an audit twin. Type --twin too, or set train.lr_scheduler for the run itself."
        )


def take_choice(parser: argparse.ArgumentParser) -> None:
    """Declares what the best of a secret number of runs is chosen from."""
    option = parser.add_argument
    option("--choose", action="store_true", help="the best of a secret number of runs, which alone is released")
    option(
        "--mean-runs", type=float, metavar="M", help="with --choose: how many runs there are in the mean, such as 10"
    )
    text = "with --choose: settings, as KEY: [VALUE, ...]; KEY: [...], of which each run draws a combination"
    option("--over", metavar="LISTS", help=text)


def parse_choice(known: argparse.Namespace, rest: list[str]) -> Choice:
    """What --choose asks for."""
    from dpllm.comparison.choice import EXAMPLE, plan_choice

    if known.over is None or known.mean_runs is None:
        raise ConfigError(f"a choice needs settings, and how many runs there are in the mean. Type {EXAMPLE}")
    return plan_choice(*parse_recipe(known, rest), known.over, known.mean_runs)


def take_final(parser: argparse.ArgumentParser) -> None:
    """Declares --final, which sets ``privacy.final`` of the recipe."""
    text = "the first and last reservation on the dataset, by its exact epsilon: no run can follow (privacy.final)"
    parser.add_argument("--final", action="store_true", help=text)


def add_commands(add: AddCommand) -> None:
    """The commands and their arguments."""
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
        "--twin",
        action="store_true",
        help="epsilon of the recipe without text canaries and its audit twin together",
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


def parse_recipe(known: argparse.Namespace, rest: list[str]) -> tuple[str, dict[str, Any]]:
    """The path of the recipe that a command names, and its overrides; a ConfigError where it names none."""
    from dpllm.recipe.section import parse_overrides

    if known.recipe is None:
        action = " ".join(filter(None, (known.command, getattr(known, "action", None))))
        raise ConfigError(f"name a recipe: dpllm {action} recipes/lora/e2e.yaml")
    return known.recipe, parse_overrides(rest)


def load_recipe(known: argparse.Namespace, rest: list[str]) -> RunConfig:
    """The recipe that a command names, with its overrides; a ConfigError where it names none, or one that cannot be read."""
    from dpllm.recipe.config import load_config

    return load_config(*parse_recipe(known, rest))


def train(known: argparse.Namespace, rest: list[str]) -> int:
    """Runs a recipe; exit code 1 where it was interrupted."""
    if known.keys:
        return _show_keys()
    if known.resume and known.overwrite:
        raise ConfigError("--resume goes on with a run, and --overwrite replaces it. Type one of the two.")
    config = load_recipe(known, rest)
    from dpllm.run.directory import Run, RunDir
    from dpllm.run.loop import train as run
    from dpllm.run.promise import Start
    from dpllm.run.screen import summary

    main = os.environ.get("RANK", "0") == "0"
    start = Start(known.resume, known.overwrite)
    record = run(config, start, console=plain_console(stderr=known.json, quiet=not main))
    if known.json and main:
        print(dump(summary(Run(RunDir(Path(config.output_dir)), record, config))))
    return 0 if record.status == "completed" else 1


def _show_keys() -> int:
    from dpllm.recipe.config import RunConfig
    from dpllm.recipe.section import describe

    print(describe(RunConfig))
    return 0


def plan(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints the plan, then what would refuse it."""
    if known.keys:
        return _show_keys()
    if known.recipe and (Path(known.recipe) / "config.yaml").is_file():  # the directory of a run
        known.recipe = str(Path(known.recipe) / "config.yaml")
    check_rate(known)
    if known.choose:
        choice = parse_choice(known, rest)
        return show(
            known, choice.to_json() if known.json else _two_columns(f"Choice of {known.recipe}", choice.in_words())
        )
    if known.twin:
        from dpllm.comparison.sweep import together, twins

        points = twins(*parse_recipe(known, rest), constant_rate=known.constant_rate)
    config = points[0].config if known.twin else load_recipe(known, rest)
    if known.device and not known.model:
        raise ConfigError("--device says for which GPU --model counts memory. Type both.")
    from dpllm.run.promise import Start, decide
    from dpllm.run.subject import Refusals

    own = Path(known.recipe).resolve() == (Path(config.output_dir) / "config.yaml").resolve()
    seen = decide(config, Start(overwrite=own))  # of a recipe that lies in a run: what another run of it would promise
    found = Refusals()
    found.errors += seen.refusals
    needs = _footprint(config, seen, found, known.device) if known.model else None
    both = found.attempt(together, points) if known.twin else None
    if known.json:
        print(dump(_json(seen, needs, found.errors) | ({"twin": both} if both else {})))
    else:
        lines = [f"Advice: {text}" for text in seen.advice]
        if both:
            total = "With its audit twin: epsilon {epsilon:.4f} at delta {delta:g} for both together".format(**both)
            lines.append(f"{total}; dpllm sweep RECIPE --twin reserves and trains them as one group.")
        _show(known, seen, needs, lines)
        if sys.stdout.isatty() and seen.subject and seen.subject.rows:
            from dpllm.run.screen import tell_lengths_of_some

            tell_lengths_of_some(seen.config, seen.subject.rows.table, plain_console())
    for error in found.errors:
        print(f"dpllm plan: {error}", file=sys.stderr)
    return max((error.exit_code for error in found.errors), default=0)


def _footprint(config: RunConfig, seen: Decision, found: Refusals, gpu: str | None) -> Footprint | None:
    from dpllm.run.footprint import footprint

    needs = found.attempt(footprint, config, seen.plan.bands if seen.plan else 1, gpu)
    if needs:
        found.errors += needs.refusals
    return needs


def _show(known: argparse.Namespace, seen: Decision, needs: Footprint | None, lines: list[str]) -> None:
    console = plain_console()
    if not seen.config.privacy.enabled and seen.schedule:
        steps, batch = seen.schedule.num_steps, seen.schedule.expected_batch_size
        console.print(f"No differential privacy: {steps} steps of about {batch} units.")
    if seen.schedule or seen.subject is not None:
        console.print(_two_columns(f"Plan of {known.recipe}", _rows(seen)))
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


def _rows(seen: Decision) -> dict[str, str]:
    """Everything of a decision that could be computed, by name."""
    schedule, plan = seen.schedule, seen.plan
    rows = {"REFUSED": "this run would not start; the reasons are below"} if seen.refusals else {}
    rows |= _promise(plan) if plan else {}
    rows |= {"beware": seen.lowered} if seen.lowered else {}
    if schedule:
        batch, most = schedule.expected_batch_size, largest_batch(schedule)
        by_row = plan and (plan.sampling == "example" or plan.neighbouring_relation == "zero_out_public_graph")
        counted = "rows" if by_row else "units"
        rows |= {
            "public size N": f"{schedule.dataset_size} {counted}, of which {schedule.canary_slots} are canary slots",
            "sampling rate q": f"{schedule.sampling_rate:.6f}: each joins each step by its own coin"
            + (", when it is its group's turn" if plan and plan.coefficients else ""),
            "steps T": str(schedule.num_steps),
            "logical batch": f"B = {batch} {counted} expected, at most {most} in 99.9% of the steps",
        }
    elif seen.subject is not None:
        rows["public size"] = f"{seen.subject.num_units} without canary slots"
    if plan:
        rows["clipping"] = f"{plan.clipping}, C = {plan.max_grad_norm:g}"
        rows["noise multiplier sigma"] = f"{plan.noise_multiplier:g}"
        if plan.coefficients:
            turns = f"{plan.bands} groups take turns, at rate {plan.group_rate:.6f}"
            earlier = f"{8 * (plan.bands - 1)} bytes of earlier noise per trained parameter"
            rows["banded noise"] = f"{plan.bands} bands; {turns}; {earlier}"
        rows["ledger"] = str(seen.ledger or "no ledger there yet: nothing is spent, and no budget is set")
    if seen.subject and seen.subject.graph:
        rows["rows kept"] = str(seen.subject.graph)
    if seen.subject and seen.subject.reads:
        rows["data"] = seen.subject.reads
        rows["first example" if seen.config.data.public else "an example"] = seen.subject.example
    return rows


def _promise(plan: Plan) -> dict[str, str]:
    from dpllm.privacy.plan import RELATION_IN_WORDS

    beside = ", ".join(f"{name} {_epsilon(value)}" for name, value in plan.accountants.items())
    unit = "example: one row"
    if plan.max_examples_per_unit is not None:
        whole = plan.sampling == "unit" and plan.neighbouring_relation != "zero_out_public_graph"
        how = "drawn together" if whole else "drawn one by one"
        unit = f"user-level: column {plan.unit}, at most {plan.max_examples_per_unit} rows of each, {how}"
    known = plan.limits.to_json()
    limits = [f"{words} {value:.3g}" for name, words in LIMITS.items() if (value := known[name]) is not None]
    return {
        "epsilon": f"{plan.epsilon:.4f} (target {plan.target_epsilon:g})",
        "delta": f"{plan.delta:g} (1/N is {1 / plan.dataset_size:.2g})",
        "by accountant": f"{beside} (stated: {plan.accountant.name} {plan.accountant.version})",
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
    """The smallest number of units that a step exceeds with probability 0.1% at most; the logical batch is Binomial(N, q)."""
    from scipy import stats

    return int(stats.binom.ppf(0.999, schedule.dataset_size, schedule.sampling_rate))


def _json(seen: Decision, needs: Footprint | None, refusals: list[DpllmError]) -> dict[str, Any]:
    """plan.json's fields, as far as they could be computed, and what stands beside them."""
    from dpllm.privacy.plan import LATER

    plan = seen.plan.to_json() if seen.plan else {}
    fields: dict[str, Any] = {
        **(asdict(seen.schedule) if seen.schedule else {}),
        **{name: value for name, value in plan.items() if name not in LATER},
        "largest_batch": largest_batch(seen.schedule) if seen.schedule else None,
        "ledger": asdict(seen.ledger) if seen.ledger else None,
        "refusals": [{"exit_code": error.exit_code, "message": str(error)} for error in refusals],
        "advice": seen.advice,
    }
    if seen.subject and seen.subject.graph:
        fields["graph"] = asdict(seen.subject.graph)
    if needs:
        memory = {**asdict(needs.memory), "total": needs.memory.total} if needs.memory else None
        fields["model"] = {**asdict(needs), "refusals": [str(error) for error in needs.refusals], "memory": memory}
    return fields


def import_config(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints or writes the recipe; reports on stderr what was carried over and what was not."""
    from dpllm.recipe import imports

    imported = imports.import_config(Path(known.file))
    report = [
        f"{imported.tool} configuration {known.file}",
        "Carried over:",
        *(f"  {line}" for line in imported.carried),
    ]
    report += ["Not carried over:", *(f"  {line}" for line in imported.left)]
    report.append(
        "Choose privacy.epsilon, data.unit, train.batch_size and train.learning_rate anew; dpllm plan RECIPE advises."
    )
    print("\n".join(report), file=sys.stderr)
    if known.output is None:
        print(imported.recipe, end="")
        return 0
    with writing(known.output), open(known.output, "x", encoding="utf-8") as file:
        file.write(imported.recipe)
    return 0


@contextmanager
def writing(output: str) -> Iterator[None]:
    """Turns what the system refuses while the file that --output names is written into an error of the command."""
    try:
        yield
    except FileExistsError:
        raise ConfigError(f"{output}: exists already, and would be lost. Type another --output.") from None
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error.strerror}). Type another --output.") from None


def show(known: argparse.Namespace, value: dict[str, Any] | RenderableType, *lines: str) -> int:
    """Prints values where ``known.json`` asks for them, else what rich prints and lines below it; exit code 0."""
    if known.json:
        assert isinstance(value, dict)
        print(dump(value))
        return 0
    console = plain_console()
    console.print(value)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def plain_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Where every command prints: names, paths and texts stand there as they are, with nothing in them that rich reads."""
    from rich.console import Console

    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False)


def dump(value: dict[str, Any]) -> str:
    """JSON for standard output; an epsilon that cannot be certified is null."""
    return json.dumps(as_json(value), indent=2, sort_keys=True, allow_nan=False)
