"""``dpllm merge``: weights with the adapter merged in."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm merge``."""
    parser.add_argument("run", help="run directory of a finished run with its card")
    parser.add_argument("--output", metavar="DIR", help="where the merged model goes (default: RUN/merged)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the written weights (default: the base model's)",
    )


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Writes the merged model and says where."""
    from dpllm.publish.merge import merge
    from dpllm.run.directory import RunDir

    place = merge(RunDir(Path(known.run)), Path(known.output) if known.output else None, dtype=known.dtype)
    print(f"{place}: a merged copy with the same guarantee (post-processing). dpllm verify {place} checks it.")
    return 0
