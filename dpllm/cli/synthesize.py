"""``dpllm synthesize``: a data set that a privately tuned model writes, or that private records vote for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.cli.describe import OF_DATA, number_or_auto, take_data
from dpllm.cli.plan import AddCommand, show, take_final
from dpllm.errors import ConfigError

if TYPE_CHECKING:
    from dpllm.publish.ordered import Order
    from dpllm.publish.quality import Tell
    from dpllm.recipe.config import RunConfig

OF_ORDER = ("epsilon", "delta", "tokens", "batch", "temperature", "top_k", "prompt", "describe")
KEYS = {**OF_DATA, "model": "model.name_or_path"}
"""Setting of inference -> the key of the recipe that it sets."""
OF_INFERENCE = (*KEYS, *(name for name in OF_ORDER if name != "temperature"), "dry_run")
OF_TRAINING = (
    "prompts",
    "top_p",
    "max_new_tokens",
    "seed",
    "attempts",
    "keep_duplicates",
)


def add_commands(add: AddCommand) -> None:
    """The command and its arguments."""
    parser = add("synthesize", synthesize, "generate a data set, with a tuned model or by private inference")
    parser.usage = (
        "dpllm synthesize RUN --rows N [options]\n       dpllm synthesize DATA|RECIPE --by inference --model NAME --epsilon E "
        "--rows N [options] [--SECTION.KEY VALUE ...]"
    )
    option = parser.add_argument
    option("source", metavar="run", help="run directory with its card; by inference: data, or a recipe (.yaml)")
    option(
        "--by", choices=("training", "inference"), default="training", help="inference: records vote, nothing trains"
    )
    option("--rows", type=int, required=True, help="number of rows to write")
    option("--output", metavar="DIR", type=Path, help="a new folder (default: RUN/synthetic; by inference: synthetic)")
    option("--prompts", metavar="FILE", type=Path, help="public prompts to answer, as dpllm generate reads them")
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, default=1.0, help="0: greedy decoding, of a tuned model (default: 1)"
    )
    group.add_argument("--top-p", type=float, help="nucleus sampling: share of probability to sample from (default: 1)")
    group.add_argument(
        "--max-new-tokens", type=int, help="longest text, in tokens (default: the recipe's data.max_length)"
    )
    group.add_argument("--seed", type=int, help="the same seed gives the same rows")
    group.add_argument("--attempts", type=int, help="most texts to draw per row, on average (default: 20)")
    group = parser.add_argument_group(
        "filters", "a dropped text of a tuned model is drawn again, with the same control codes"
    )
    group.add_argument("--keep-unfinished", action="store_true", help="keep texts that did not end")
    group.add_argument("--keep-duplicates", action="store_true", default=None, help="keep duplicate texts")
    group.add_argument("--min-words", type=int, metavar="N", help="drop texts of fewer words")
    group.add_argument("--max-words", type=int, metavar="N", help="drop texts of more words")
    group.add_argument(
        "--no-details", action="store_true", help="drop texts with an e-mail address, card or phone number"
    )
    group = parser.add_argument_group("quality", "figures to measure on the rows; only public ones go on their card")
    group.add_argument("--no-quality", action="store_true", help="measure nothing")
    _add_inference(parser.add_argument_group("inference", "records vote for each token (docs/concepts/inference.md)"))


def _add_inference(group: Any) -> None:
    option = group.add_argument
    option(
        "--model",
        metavar="NAME",
        help="directory or Hub id of the model that reads the records (default: the recipe's)",
    )
    option("--epsilon", type=float, help="epsilon of all rows together")
    text = "below 1/N (default: the budget's, or as in a run)"
    option("--delta", type=number_or_auto, help=text)
    option("--tokens", type=int, help="longest text, in tokens (default: 96)")
    option("--batch", type=int, help="units that vote for one text (default: as few as epsilon allows)")
    option("--top-k", type=int, help="draw from so many tokens that the public prompt expects (default: all)")
    option("--prompt", metavar="TEXT", help="in which a record stands at {text}; without it, the public prompt")
    option("--describe", metavar="FILE", type=Path, help="released shares of data.control, of dpllm describe")
    take_data(group)
    take_final(group)
    option("--dry-run", action="store_true", default=None, help="show what it would promise, and spend nothing")


def synthesize(known: argparse.Namespace, rest: list[str]) -> int:
    """Writes the data set and says where; what is interrupted can go on."""
    others = OF_TRAINING if known.by == "inference" else OF_INFERENCE
    wrong = [f"--{name.replace('_', '-')}" for name in others if getattr(known, name) is not None]
    wrong += rest if known.by == "training" else []
    if wrong:
        way = "Type --by inference" if known.by == "training" and wrong[0] not in rest else "Leave it out"
        instead = {"--max-new-tokens": "Type --tokens"}.get(wrong[0], way)
        raise ConfigError(f"{wrong[0]}: is of no use --by {known.by}. {instead}; see dpllm synthesize --help.")
    try:
        return _infer(known, rest) if known.by == "inference" else _with_model(known)
    except KeyboardInterrupt:
        print("dpllm synthesize: interrupted. The same command goes on where it stopped.", file=sys.stderr)
        return 1


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("of {task.fields[drawn]} texts drawn"))
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total, drawn=0)
        yield lambda taken, drawn: bar.update(task, completed=taken, drawn=drawn)


def _not_measured(known: argparse.Namespace) -> Tell | None:
    return None if known.no_quality else lambda line: print(f"not measured: {line}", file=sys.stderr)


def _say_measured(private: Path) -> None:
    print(f"Figures of quality that may be published are on its card; {private} has the others.")


def _infer(known: argparse.Namespace, rest: list[str]) -> int:
    from dpllm.card.inference import RECORD
    from dpllm.files import read_json
    from dpllm.publish.inference import infer, private_of
    from dpllm.publish.ordered import FILTERS, Order
    from dpllm.recipe.config import around
    from dpllm.recipe.section import parse_overrides

    keys = {key: value for name, key in KEYS.items() if (value := getattr(known, name)) is not None}
    config = around(known.source, keys | parse_overrides(rest), "dpllm synthesize")
    order = Order.of(known.rows, {name: getattr(known, name) for name in (*OF_ORDER, *FILTERS)})
    output = known.output or Path("synthetic")
    if known.dry_run:
        return _dry_run(known, config, order)
    with _bar(order.rows) as told:
        infer(config, order, output, told, _not_measured(known))
    record = read_json(output / RECORD)
    if known.json:
        return show(known, record)
    dropped = ", ".join(f"{why}: {many}" for why, many in record["dropped"].items())
    print(f"{output}: {record['rows']} rows of {record['texts']} texts; dropped ({dropped}).")
    if not known.no_quality:
        _say_measured(private_of(output))
    cost = f"Epsilon {record['epsilon']:.4f} at delta {record['delta']:g}, charged to {record['dataset']}."
    total = ((record["lineage"] or {}).get("composed") or {}).get("epsilon")
    print(f"{cost} {_with_base(total)}dpllm verify {output} checks it.")
    return 0


def _with_base(total: float | None) -> str:
    return "" if total is None else f"With the model, which learned the same data: epsilon {total:.4f}. "


def _dry_run(known: argparse.Namespace, config: RunConfig, order: Order) -> int:
    """What inference would promise."""
    from dpllm.publish.inference import offer_of

    made, before, said = offer_of(config, order)
    total = before.composed.epsilon if before and before.composed else None
    about = {
        "batch_size": made.ballot.batch_size,
        "clip": made.ballot.clip,
        "range": made.ballot.range,
        "event": made.ballot.event(order.tokens).to_json(),
        "epsilon": made.epsilon,
        "delta": made.delta,
        "with_base": total,
        "texts": made.texts,
    }
    promise = f"At most {made.texts:,} rows at epsilon {made.epsilon:.4f} and delta {made.delta:g} together: "
    votes = f"{made.ballot.batch_size} units vote for each token by at most {made.ballot.clip:.3g}, {order.tokens} draws a text."
    end = f"{_with_base(total)}Nothing was spent."
    show(known, about if known.json else promise + votes, end)
    if said:
        raise said
    return 0


def _with_model(known: argparse.Namespace) -> int:
    from dpllm.card.synthetic import RECORD
    from dpllm.files import read_json
    from dpllm.publish.quality import FOLDER
    from dpllm.publish.synthesize import Order, synthesize
    from dpllm.run.directory import RunDir

    given = {one.name: value for one in fields(Order) if (value := getattr(known, one.name)) is not None}
    order, run = Order(**given), RunDir(Path(known.source))
    with _bar(order.rows) as told:
        output = synthesize(run, order, known.output, told, _not_measured(known))
    record = read_json(output / RECORD)
    if known.json:
        return show(known, record)
    dropped = ", ".join(f"{why}: {many}" for why, many in record["dropped"].items())
    print(f"{output}: {record['rows']} rows of {record['attempts']} texts drawn; dropped ({dropped}).")
    if not known.no_quality:
        _say_measured(run.private / FOLDER)
    print("run/privacy.json is its privacy statement: rows spend nothing beyond it, and it does not cover prompts.")
    return 0
