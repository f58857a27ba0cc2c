"""``dpllm verify``: recompute every number that a card states."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm verify``."""
    parser.add_argument("run", help="run directory")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command; returns its exit code."""
    raise NotImplementedError("verify")
