"""``dpllm plan``: what a recipe promises, costs and needs, and what would refuse it; without weights, a GPU or torch.

``--model`` alone imports torch, to build the model from its configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.cli.recipes import finite, load_recipe
from dpllm.errors import ConfigError, DpllmError

if TYPE_CHECKING:
    from rich.console import Console

    from dpllm.forecast.footprint import Footprint
    from dpllm.recipe.config import RunConfig
    from dpllm.run.promise import Decision


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this command takes beside a recipe."""
    parser.add_argument(
        "--json", action="store_true", help="print plan.json with ledger, refusals and advice, as one object"
    )
    parser.add_argument(
        "--model", action="store_true", help="what trains, noise, memory and time, from the model's config alone"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="plan every combination; may be given several times",
    )
    parser.add_argument(
        "--after", metavar="RUN", help="an earlier run, whose released clip fraction the advice may use"
    )


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints the plan, then what would refuse it."""
    from dpllm.recipe.config import RunConfig
    from dpllm.recipe.section import describe

    if known.keys:
        print(describe(RunConfig))
        return 0
    config = load_recipe(known, rest)
    if known.sweep and (known.model or known.after):
        raise ConfigError("--sweep plans many recipes, and --model and --after look at one. Type one of them.")
    if known.sweep:
        return _sweep(known, rest, config)
    from dpllm.forecast.advice import advise, released_by
    from dpllm.run.directory import RunDir
    from dpllm.run.promise import Start, decide

    released = released_by(RunDir(Path(known.after))) if known.after else None
    seen = decide(config, Start())
    refusals = list(seen.refusals)
    needs = _footprint(config, seen, refusals) if known.model else None
    advice = advise(config, seen.plan, released) if seen.plan else []
    if known.json:
        print(_dump(_json(seen, needs, advice, refusals)))
    else:
        _show(known, seen, needs, advice)
    for error in refusals:
        print(f"dpllm plan: {error}", file=sys.stderr)
    return max((error.exit_code for error in refusals), default=0)


def _footprint(config: RunConfig, seen: Decision, refusals: list[DpllmError]) -> Footprint | None:
    if seen.schedule is None:
        return None
    from dpllm.forecast.footprint import footprint

    try:
        needs = footprint(config, seen.schedule, seen.plan)
    except DpllmError as error:
        refusals.append(error)
        return None
    refusals += needs.refusals
    return needs


def _show(known: argparse.Namespace, seen: Decision, needs: Footprint | None, advice: list[str]) -> None:
    from rich.console import Console

    from dpllm.forecast import table

    console = Console()
    if not seen.config.privacy.enabled and seen.schedule:
        steps, batch = seen.schedule.num_steps, seen.schedule.expected_batch_size
        console.print(f"No differential privacy: {steps} steps of about {batch} units.")
    if seen.schedule or seen.subject is not None:
        console.print(table.plan_table(seen, f"Plan of {known.config or known.recipe}"))
    for part in table.footprint_tables(needs) if needs else ():
        console.print(part)
    for text in advice:
        _say(console, f"Advice: {text}")


def _sweep(known: argparse.Namespace, rest: list[str], config: RunConfig) -> int:
    from rich.console import Console

    from dpllm.forecast import signal, table
    from dpllm.forecast.sweep import parse_sweeps, sweep
    from dpllm.recipe.section import parse_overrides
    from dpllm.run.promise import decide

    sweeps = parse_sweeps(known.sweep)
    points = sweep(known.config or known.recipe, parse_overrides(rest), sweeps)
    own = decide(config).plan
    suggestion = signal.suggest(own) if own else None
    if known.json:
        rows = [{**asdict(point), "values": dict(zip(sweeps, point.values, strict=True))} for point in points]
        print(_dump({"sweep": rows, "suggestion": asdict(suggestion) if suggestion else None}))
    else:
        console = Console()
        console.print(table.sweep_table(list(sweeps), points))
        for text, same in groupby((point for point in points if point.refusal), lambda point: point.refusal):
            _say(console, f"Refused ({'; '.join(', '.join(map(str, point.values)) for point in same)}): {text}")
        if suggestion:
            _say(console, table.suggestion_text(suggestion))
    return 0


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=False)


def _json(seen: Decision, needs: Footprint | None, advice: list[str], refusals: list[DpllmError]) -> dict[str, Any]:
    """plan.json's fields, as far as they could be computed, and what stands beside them."""
    from dpllm.forecast.batches import batches_of

    fields: dict[str, Any] = {}
    if seen.schedule:
        fields |= asdict(seen.schedule)
    if seen.plan:
        fields |= seen.plan.to_json()
    fields |= {
        "batches": asdict(batches_of(seen.config, seen.schedule)) if seen.schedule else None,
        "ledger": asdict(seen.ledger) if seen.ledger else None,
        "refusals": [{"exit_code": error.exit_code, "message": str(error)} for error in refusals],
        "advice": advice,
    }
    if needs:
        model = asdict(needs)
        model["refusals"] = [str(error) for error in needs.refusals]
        model["memory"] = {**model["memory"], "total": needs.memory.total} if needs.memory else None
        fields["model"] = model
    return fields


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(finite(value), indent=2, sort_keys=True, allow_nan=False)
