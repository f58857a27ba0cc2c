"""``dpllm synthesize``: a data set that a privately tuned model writes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from dpllm.cli.plan import AddCommand, show


def add_commands(add: AddCommand) -> None:
    """The command and its arguments."""
    parser = add("synthesize", synthesize, "generate a data set with a tuned model")
    option = parser.add_argument
    option("run", help="run directory with its card")
    option("--rows", type=int, required=True, help="number of rows to write")
    option("--output", metavar="DIR", type=Path, help="a new folder (default: RUN/synthetic)")
    option("--prompts", metavar="FILE", type=Path, help="public prompts to answer, as dpllm generate reads them")
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=1.0, help="0: greedy decoding (default: 1)")
    group.add_argument(
        "--top-p", type=float, default=1.0, help="nucleus sampling: share of probability to sample from (default: 1)"
    )
    group.add_argument(
        "--max-new-tokens", type=int, help="longest text, in tokens (default: the recipe's data.max_length)"
    )
    group.add_argument("--seed", type=int, help="the same seed gives the same rows")
    group.add_argument("--attempts", type=int, default=20, help="most texts to draw per row, on average (default: 20)")
    group = parser.add_argument_group("filters", "a dropped text is drawn again, with the same control codes")
    group.add_argument("--keep-unfinished", action="store_true", help="keep texts that did not end")
    group.add_argument("--keep-duplicates", action="store_true", help="keep duplicate texts")
    group.add_argument("--min-words", type=int, metavar="N", help="drop texts of fewer words")
    group.add_argument("--max-words", type=int, metavar="N", help="drop texts of more words")
    group.add_argument("--schema", metavar="FILE", type=Path, help="drop texts that are not JSON of this JSON Schema")
    group.add_argument(
        "--no-details", action="store_true", help="drop texts with an e-mail address, card or phone number"
    )
    group = parser.add_argument_group("quality", "figures to measure on the rows; only public ones go on their card")
    group.add_argument("--no-quality", action="store_true", help="measure nothing")
    group.add_argument("--embedding", metavar="MODEL", help="also compare mean-pooled states of this model")
    text = "write rows that may repeat private text into RUN/private/"
    option("--without-guarantee", action="store_true", help=text)


def synthesize(known: argparse.Namespace, rest: list[str]) -> int:
    """Writes the data set and says where; what is interrupted can go on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from dpllm.files import read_json
    from dpllm.publish import quality
    from dpllm.publish.synthesize import Order, synthesize
    from dpllm.run.directory import RunDir
    from dpllm.statement.synthetic import RECORD

    measure = None
    if not known.no_quality:
        measure = quality.writer(known.embedding, lambda line: print(f"not measured: {line}", file=sys.stderr))
    order = Order(**{field.name: getattr(known, field.name) for field in fields(Order)})
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("of {task.fields[drawn]} texts drawn"))
    try:
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("", total=order.rows, drawn=0)
            output = synthesize(
                RunDir(Path(known.run)),
                order,
                known.output,
                lambda taken, drawn: bar.update(task, completed=taken, drawn=drawn),
                measure,
            )
    except KeyboardInterrupt:
        print("dpllm synthesize: interrupted. The same command goes on where it stopped.", file=sys.stderr)
        return 1
    record = read_json(output / RECORD)
    if known.json:
        return show(known, record)
    dropped = ", ".join(f"{why}: {many}" for why, many in record["dropped"].items())
    print(f"{output}: {record['rows']} rows of {record['attempts']} texts drawn; dropped ({dropped}).")
    if measure:
        private = RunDir(Path(known.run)).private / quality.FOLDER
        print(f"Figures of quality that may be published are on its card; {private} has the others.")
    print("run/privacy.json is its privacy statement: rows spend nothing beyond it, and it does not cover prompts.")
    return 0
