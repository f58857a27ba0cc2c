"""``dpllm sweep``: several epsilons as one tuning group."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm sweep``."""
    parser.add_argument("recipe", nargs="?", help="YAML file")
    parser.add_argument("--config", help="the same as RECIPE")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command; returns its exit code."""
    raise NotImplementedError("sweep")
