"""``dpllm import-config``: a configuration of LLaMA-Factory, axolotl or TRL as a recipe, and what of it was left out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpllm.cli.plan import AddCommand
from dpllm.errors import ConfigError


def add_commands(add: AddCommand) -> None:
    """The command and its arguments."""
    parser = add("import-config", run, "turn a LLaMA-Factory, axolotl or TRL configuration into a recipe")
    parser.add_argument("file", help="their YAML file")
    parser.add_argument(
        "--output", metavar="RECIPE", help="write the recipe here (default: print it; the report goes to stderr)"
    )


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints or writes the recipe; reports on stderr."""
    from dpllm.recipe.imports import import_config

    found = import_config(Path(known.file))
    report = [f"{found.tool} configuration {known.file}", "Carried over:", *(f"  {line}" for line in found.carried)]
    report += ["Not carried over:", *(f"  {line}" for line in found.left)]
    report.append(
        "Choose privacy.epsilon, data.unit, train.batch_size and train.learning_rate anew; dpllm plan RECIPE advises."
    )
    print("\n".join(report), file=sys.stderr)
    if known.output is None:
        print(found.recipe, end="")
        return 0
    try:
        with open(known.output, "x", encoding="utf-8") as file:
            file.write(found.recipe)
    except FileExistsError:
        raise ConfigError(f"{known.output}: exists already, and would be lost. Type another --output.") from None
    except OSError as error:
        raise ConfigError(f"{known.output}: cannot be written ({error.strerror}). Type another --output.") from None
    return 0
