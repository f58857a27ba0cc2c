"""``dpllm describe``, ``classify`` and ``randomize-labels``: releases of private data without a training run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.cli.plan import AddCommand, show, take_final, take_ledger
from dpllm.errors import ConfigError
from dpllm.privacy.releases import OPTIONS

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dpllm.releases.describe import Offer


def number_or_auto(text: str) -> Any:
    """Parses --delta."""
    return text if text == "auto" else float(text)


def add_commands(add: AddCommand) -> None:
    """Adds the commands and their options."""
    parser = add("describe", describe, "release statistics of private data, charged to the ledger")
    parser.usage = "dpllm describe DATA|RECIPE --epsilon E STATISTIC ... [options] [--SECTION.KEY VALUE ...]"
    parser.add_argument("data", help="file, glob, directory or Hub id; or a recipe (.yaml), for its data and ledger")
    parser.add_argument("--epsilon", type=float, required=True, help="epsilon of all statistics of this call together")
    text = "delta, below 1/N; auto: as in a run (default: the budget's, or 1e-9)"
    parser.add_argument("--delta", type=number_or_auto, metavar="DELTA", help=text)
    group = parser.add_argument_group("statistics", "equal parts of epsilon; asking twice costs twice")
    for name, (takes, _, text) in OPTIONS.items():
        typed: Any = lambda value, name=name: (name, value)  # noqa: E731
        action: Any = {"action": "append", "type": typed, "metavar": takes}
        action = action if takes else {"action": "append_const", "const": (name, "")}
        group.add_argument(f"--{name}", dest="statistics", help=text, **action)
    group.add_argument("--at", default=".5,.9,.99", metavar="Q,Q", help="which quantiles (default: .5,.9,.99)")
    group = parser.add_argument_group(
        "clusters and classifiers", "of texts as a public model reads them; one of them a call"
    )
    group.add_argument("--clusters", type=int, default=0, metavar="K", help="sizes and centres of K clusters")
    group.add_argument("--predict", default="", metavar="COLUMN", help="a linear classifier of a column's values")
    group.add_argument("--values", default="", metavar="A,B", help="values to tell apart; others are other")
    take_data(parser)
    take_final(parser)
    text = "public model, or sentence encoder, that reads texts or counts tokens (default: the recipe's)"
    parser.add_argument("--model", metavar="MODEL", help=text)
    text = "a file, or for clusters and classifiers a folder (default: describe.json, clusters, classifier)"
    parser.add_argument("--output", type=Path, help=text)
    parser.add_argument("--dry-run", action="store_true", help="show costs and errors, and spend nothing")
    parser = add(
        "classify", classify, "give each row of a file the label or cluster of a released classifier or clusters"
    )
    parser.add_argument("folder", type=Path, help="as dpllm describe --predict or --clusters wrote it")
    parser.add_argument("data", help="file, glob, directory or Hub id")
    parser.add_argument("--model", metavar="MODEL", help="where its model lies (default: as the folder names it)")
    text = "flip preference labels by coins, so that each is private at the source"
    parser = add("randomize-labels", randomize, text)
    parser.add_argument("data", help="file, glob, directory or Hub id of preference pairs")
    text = "of one label, which flips with 1 / (1 + e^epsilon)"
    parser.add_argument("--epsilon", type=float, required=True, help=text)
    parser.add_argument("--unit", help="column that says whose label it is (default: each label is somebody else's)")
    parser.add_argument("--max-labels", type=int, metavar="K", help="with --unit: most labels of one unit, K epsilon")
    parser.add_argument("--dataset", help="name of the data in the ledger, whose labels get an account of their own")
    parser.add_argument("--again", action="store_true", help="draw labels once more, at the same cost once more")
    take_ledger(parser)
    text = "the new file, with its record beside it (default: NAME.randomized.jsonl beside a local file)"
    parser.add_argument("--output", type=Path, help=text)


def take_data(parser: Any) -> None:
    """Declares the unit column, and the account of the ledger that is charged."""
    parser.add_argument("--unit", help="column that says whose row it is (default: the recipe's, or each row)")
    parser.add_argument("--max-examples-per-unit", type=int, metavar="N", help="most rows of one unit that count")
    parser.add_argument("--dataset", help="name of the data in the ledger")
    take_ledger(parser)


def describe(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints the releases, or with --dry-run their cost; exit code 3 if the ledger refuses them."""
    from dpllm.recipe.config import OF_MODEL, around
    from dpllm.recipe.section import parse_overrides

    embedded = bool(args.clusters or args.predict)
    if embedded and args.statistics:
        raise ConfigError(
            "statistics have their own file, and share their own epsilon. Type another dpllm describe for them."
        )
    if not embedded and not args.statistics:
        examples = ", ".join(example for _, example, _ in OPTIONS.values())
        raise ConfigError(f"no statistic is asked for. Type {examples}.")
    keys = {key: value for name, key in OF_MODEL.items() if (value := getattr(args, name)) is not None}
    keys |= parse_overrides(overrides)
    if Path(args.data).suffix not in (".yaml", ".yml") and "model.name_or_path" not in keys:
        if embedded or "lengths" in dict(args.statistics):
            raise ConfigError(
                "a public model reads texts and counts tokens, but none is named. Type --model MODEL, or a recipe."
            )
        keys["model.name_or_path"] = "none"
    config = around(args.data, keys, "dpllm describe")
    cost, create = (args.epsilon, args.delta), not args.dry_run
    if embedded:
        from dpllm.releases import embeddings  # and torch
        from dpllm.text.data import value_name

        values = tuple(map(value_name, args.values.split(","))) if args.values else ()  # as the data's are read
        request = embeddings.EmbeddingRequest(args.clusters, args.predict, values)
        return _release(args, embeddings.offered(config, request, *cost, create=create), request.kind)
    from dpllm.releases import describe as statistics
    from dpllm.releases.asked import parse

    requests = [parse(kind, text, args.at) for kind, text in args.statistics]
    return _release(args, statistics.offered(config, requests, *cost, create=create), "describe.json")


def classify(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints one JSON object for each row."""
    import json

    from dpllm.releases.embeddings import classify as classified

    for number, label in enumerate(classified(args.folder, args.data, args.model), 1):
        print(json.dumps({"row": number, "label": label}, ensure_ascii=False))
    return 0


def _release(args: argparse.Namespace, offered: AbstractContextManager[Offer], default: str) -> int:
    from rich.table import Table

    output = args.output or Path(default)
    with offered as offer:
        statistics = offer.statistics if args.dry_run else offer.release(output)
    cost = f"Together epsilon {statistics.epsilon:.4f} at delta {statistics.delta:g}"
    cost += f" per {statistics.unit} of {statistics.dataset}"
    column, end = "released (95% error)", f", charged to the ledger; all of it is in {output}."
    if args.dry_run:
        column = "95% error"
        end = f". Ledger: {offer.seen or 'none there yet'}. Nothing was spent."
    table = Table("statistic", column, "mechanism", "epsilon")
    for released in statistics.releases:
        table.add_row(released.statistic, released.words(), released.mechanism, released.cost)
    show(args, statistics.to_json() if args.json else table, *offer.notes, cost + end)
    if args.dry_run and offer.seen and offer.seen.error:
        raise offer.seen.error
    return 0


def randomize(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints the cost and the path of the new file; exit code 3 if the ledger refuses it."""
    from dpllm.recipe.config import OF_DATA, around
    from dpllm.releases.labels import RECIPE
    from dpllm.releases.labels import randomize as flip
    from dpllm.run.subject import record_of

    if (args.unit is None) != (args.max_labels is None):
        raise ConfigError("--unit and --max-labels go together: K labels of one unit cost K times epsilon. Type both.")
    values = vars(args) | {"max_examples_per_unit": args.max_labels}
    keys = {key: values[name] for name, key in OF_DATA.items() if values[name] is not None}
    config = around(args.data, keys | RECIPE, "dpllm randomize-labels")
    path = Path(args.data)
    folder = path.parent if path.exists() else Path()
    output = args.output or folder / f"{path.name.partition('.')[0].replace(':', '-')}.randomized.jsonl"
    draw = flip(config, args.epsilon, output, again=args.again)
    unit_cost = f", and {draw.unit_epsilon:g} for each {draw.unit} of up to {draw.max_labels}" if args.unit else ""
    lines = (
        f"{output}: each label was flipped with probability {draw.probability:.4g}, which is epsilon {draw.epsilon:g} for "
        f"one label{unit_cost}. Charged to {draw.dataset}, which now holds epsilon {draw.account_epsilon:g} for one {draw.unit} "
        "and is added to nothing else. Prompts and answers are as they were, and not protected by this.",
        f"To train on it: --data.train {output} --data.label_record {record_of(output)}",
    )
    return show(args, draw.to_json() if args.json else lines[0], *lines[1:])
