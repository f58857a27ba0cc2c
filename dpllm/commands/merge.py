"""``dpllm merge``: weights with the adapter merged in."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm merge``."""
    parser.add_argument("run", help="run directory")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command; returns its exit code."""
    raise NotImplementedError("merge")
