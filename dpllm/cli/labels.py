"""``dpllm randomize-labels``: preference labels flipped by coins, and charged to the ledger."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpllm.cli.plan import AddCommand, show, take_ledger
from dpllm.errors import ConfigError


def add_commands(add: AddCommand) -> None:
    """The command and its arguments."""
    parser = add(
        "randomize-labels", randomize, "flip preference labels by coins, so that each is private at the source"
    )
    parser.add_argument("data", help="file, glob, directory or Hub id of preference pairs")
    parser.add_argument(
        "--epsilon", type=float, required=True, help="of one label, which flips with 1 / (1 + e^epsilon)"
    )
    parser.add_argument("--unit", help="column that says whose label it is (default: each label is somebody else's)")
    parser.add_argument("--max-labels", type=int, metavar="K", help="with --unit: most labels of one unit, K epsilon")
    parser.add_argument("--dataset", help="name of the data in the ledger, whose labels get an account of their own")
    parser.add_argument("--again", action="store_true", help="draw labels once more, at the same cost once more")
    take_ledger(parser)
    text = "the new file, with its record beside it (default: NAME.randomized.jsonl beside a local file)"
    parser.add_argument("--output", type=Path, help=text)


def randomize(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints what was charged and where the labels lie; exit code 3 where the ledger refuses it."""
    from dpllm.recipe.config import around
    from dpllm.run.labels import randomize as flip
    from dpllm.run.labels import record_of

    if (known.unit is None) != (known.max_labels is None):
        raise ConfigError("--unit and --max-labels go together: K labels of one unit cost K times epsilon. Type both.")
    keys = {"model.name_or_path": "none", "data.format": "preference", "train.objective": "dpo"}
    given = {"data.unit": known.unit, "data.max_examples_per_unit": known.max_labels}
    given |= {"privacy.dataset": known.dataset, "privacy.ledger": known.ledger}
    config = around(known.data, {**keys, **{k: v for k, v in given.items() if v is not None}}, "dpllm randomize-labels")
    path = Path(known.data)
    folder = path.parent if path.exists() else Path()
    output = known.output or folder / f"{path.name.partition('.')[0].replace(':', '-')}.randomized.jsonl"
    found = flip(config, known.epsilon, output, again=known.again)
    whole = f", and {found.unit_epsilon:g} for each {found.unit} of up to {found.max_labels}" if known.unit else ""
    told = (
        f"{output}: each label was flipped with probability {found.probability:.4g}, which is epsilon {found.epsilon:g} for "
        f"one label{whole}. Charged to {found.dataset}, which now holds epsilon {found.account_epsilon:g} for one {found.unit} "
        "and is added to nothing else. Prompts and answers are as they were, and not protected by this.",
        f"To train on it: --data.train {output} --data.label_record {record_of(output)}",
    )
    return show(known, found.to_json() if known.json else told[0], *told[1:])
