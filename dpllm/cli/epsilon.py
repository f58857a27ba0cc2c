"""``dpllm epsilon``: the guarantee of DP-SGD with given parameters, or the noise for a given epsilon, without a recipe."""

from __future__ import annotations

import argparse
import math
from fractions import Fraction
from typing import Any

from dpllm.cli.plan import AddCommand, dump, plain_console
from dpllm.errors import ConfigError, Refused
from dpllm.files import as_json

LARGEST = 1e12  # maximum number of units or steps
LIMITS_IN_WORDS = {
    "tpr_at_fpr_0.001": "true positive rate at 0.1% false positives, at most",
    "tpr_at_fpr_0.01": "true positive rate at 1% false positives, at most",
    "auc": "area under the ROC curve, at most",
    "gdp_mu": "mu of Gaussian DP, as a summary",
}


def add_commands(add: AddCommand) -> None:
    """Adds the command and its options."""
    parser = add("epsilon", run, "what DP-SGD with given numbers guarantees, or the noise for a given epsilon")
    option = parser.add_argument
    option("--dataset-size", type=int, required=True, metavar="N", help="units in the dataset, N")
    option("--batch-size", type=int, required=True, metavar="B", help="expected batch size")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", metavar="E", help="expected passes over the data, such as 3 or 0.5")
    length.add_argument("--steps", type=int, metavar="T", help="number of steps")
    noise = parser.add_mutually_exclusive_group(required=True)
    noise.add_argument(
        "--noise-multiplier", type=float, metavar="S", help="noise divided by the clipping norm; prints epsilon"
    )
    noise.add_argument("--epsilon", type=float, metavar="EPS", help="target epsilon; prints the noise multiplier")
    option("--delta", default="auto", metavar="D", help="below 1/N; auto: 1/(10 N), rounded down to a digit")
    option("--group-size", type=int, default=1, metavar="K", help="number of units protected together (default: 1)")
    option("--bands", type=int, default=1, metavar="B", help="of banded noise, and groups in turn (default: 1)")
    option(
        "--relation",
        default="zero_out",
        choices=["zero_out", "add_or_remove_one"],
        help="neighbouring relation (default: zero_out)",
    )
    option(
        "--accountant",
        metavar="NAME",
        help="prv: compute it by Opacus's PRV accountant too (imports torch); PLD is stated",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints epsilon, a table, an attacker's limits, and the guarantee in prose."""
    from dpllm.statement.formatting import epsilon_in_prose

    answer = answer_to(args)
    answer["statement"] = epsilon_in_prose(answer)
    if args.json:
        print(dump(answer))
    else:
        _show(answer)
    return 0


def answer_to(args: argparse.Namespace) -> dict[str, Any]:
    """Every number of the answer, infinite ones as None.

    Raises:
        ConfigError: A number is out of range, or the numbers contradict each other.
        Refused: Delta is not below 1/N, or the batch is larger than the data.
    """
    from dpllm.privacy import accounting, events, limits
    from dpllm.privacy.plan import CURVE_DELTAS, noise_multiplier_for, steps_event
    from dpllm.privacy.schedule import make_schedule

    size, batch, group, relation = args.dataset_size, args.batch_size, args.group_size, args.relation
    steps, delta, bands, sigma = _steps(args), _delta(args), args.bands, args.noise_multiplier
    schedule = make_schedule(size, batch, steps)
    if sigma is None:
        sigma = noise_multiplier_for(args.epsilon, delta, schedule, relation, bands, group_size=group)
    event = steps_event(sigma, schedule, group, bands)
    if args.accountant is not None:  # refuses accountants that do not support it, such as gdp
        accounting.epsilon(event, delta, relation, args.accountant)
    epochs = math.ceil(Fraction(steps * batch, size) if args.epochs is None else Fraction(args.epochs))
    shuffled = events.SelfComposed(epochs, events.Gaussian(sigma / group))
    answer = {
        "epsilon": accounting.epsilon(event, delta, relation),
        "delta": delta,
        "accountant": "pld",
        "relation": relation,
        "dataset_size": size,
        "batch_size": batch,
        "sampling_rate": schedule.sampling_rate,
        "num_steps": steps,
        "noise_multiplier": sigma,
        "target_epsilon": args.epsilon,
        "group_size": group,
        "bands": bands,
        "accountants": accounting.epsilon_by_accountant(event, delta, relation, prv=args.accountant == "prv"),
        "curve": accounting.curve(event, relation, sorted({*CURVE_DELTAS, delta}, reverse=True)),
        "limits": limits.attacker_limits_of(event, relation),
        "one_unit": None,
        "shuffled": {"epsilon": accounting.epsilon(shuffled, delta, relation), "epochs": epochs}
        if bands == 1
        else None,
        "event": event.to_json(),
        "software": accounting.versions(),
    }
    if group > 1:
        answer["one_unit"] = accounting.epsilon(steps_event(sigma, schedule, 1, bands), delta, relation)
    return dict(as_json(answer))


def _steps(args: argparse.Namespace) -> int:
    size, batch = args.dataset_size, args.batch_size
    numbers = {"--dataset-size": size, "--batch-size": batch, "--steps": args.steps, "--group-size": args.group_size}
    numbers["--bands"] = args.bands
    for name, value in numbers.items():
        if value is not None and not 1 <= value <= LARGEST:
            raise ConfigError(f"{name}: gives no epsilon. Type a number from 1 to {LARGEST:.0e}.")
    if args.epsilon is not None and not (math.isfinite(args.epsilon) and args.epsilon > 0):
        raise ConfigError(f"--epsilon is {args.epsilon}, which no noise can meet. Type a finite number above 0.")
    if batch > size:
        raise Refused(
            f"--batch-size {batch} is larger than --dataset-size {size}, so the sampling rate would exceed 1. Type --batch-size "
            f"{size} or less; a tenth of it or less is usual."
        )
    if args.bands > 1 and args.group_size > 1:
        raise Refused(
            "--bands keeps the steps of one unit apart, but several units together can take part in neighbouring steps, which "
            "no accountant covers. Type --group-size 1 or --bands 1."
        )
    if args.bands * batch > size:
        raise Refused(
            f"--bands {args.bands} makes groups smaller than --batch-size {batch}, so the sampling rate within a group would "
            f"exceed 1. Type --bands {size // batch} or less."
        )
    if args.steps is not None:
        return int(args.steps)
    try:
        epochs = Fraction(args.epochs)
    except (ValueError, ZeroDivisionError):
        epochs = Fraction(0)
    if epochs <= 0:
        raise ConfigError(f"--epochs is {args.epochs!r}. Type a number above 0, such as 3.")
    steps: int = math.ceil(epochs * size / batch)  # exact: int(epochs / q) in floating point is often off by one
    return steps


def _delta(args: argparse.Namespace) -> float:
    from dpllm.privacy.plan import resolved_delta

    try:
        requested = args.delta if args.delta == "auto" else float(args.delta)
    except ValueError:
        raise ConfigError(
            f"--delta is {args.delta!r}. Type auto, or a number above 0 and below 1/N, such as 1e-6."
        ) from None
    return resolved_delta(requested, 1.0, args.dataset_size, "--delta")


def _show(answer: dict[str, Any]) -> None:
    from rich.table import Table

    from dpllm.statement.formatting import bound_or_infinite as up
    from dpllm.statement.formatting import limit_text

    console = plain_console()
    epsilon = up(answer["epsilon"])
    if answer["target_epsilon"] is not None:
        console.print(f"noise multiplier {answer['noise_multiplier']:g}, with which epsilon is {epsilon}")
    else:
        console.print(f"epsilon {epsilon}")
    console.print(f"at delta {answer['delta']:g}, q {answer['sampling_rate']:.6g}, {answer['num_steps']} steps\n")
    table = Table("", "delta", "epsilon", title="Epsilon, rounded up")
    for delta, value in answer["curve"]:
        table.add_row(f"by {answer['accountant']}", f"{delta:g}", up(value))
    table.add_section()
    for name, value in answer["accountants"].items():
        if name != answer["accountant"]:
            table.add_row(f"by {name}", f"{answer['delta']:g}", up(value))
    if answer["one_unit"] is not None:
        table.add_row("of one unit alone", f"{answer['delta']:g}", up(answer["one_unit"]))
    if answer["shuffled"] is not None:
        table.add_row("if shuffled, not sampled", f"{answer['delta']:g}", up(answer["shuffled"]["epsilon"]))
    console.print(table)
    bounds = Table("limit on an attacker", "", title="What follows for membership tests")
    for name, words in LIMITS_IN_WORDS.items():
        bounds.add_row(words, limit_text(name, answer["limits"][name]))
    console.print(bounds)
    console.print()
    console.print(answer["statement"], highlight=False)
