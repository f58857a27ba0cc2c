"""``dpllm generate``: sample text from a tuned model."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm generate``."""
    parser.add_argument("run", help="run directory")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command; returns its exit code."""
    raise NotImplementedError("generate")
