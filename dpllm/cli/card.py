"""``dpllm card``: the model card of a run."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm card``."""
    parser.add_argument("run", help="run directory")
    parser.add_argument("--sign", metavar="KEY", help="sign privacy.json with an OpenSSH key, or through ssh-agent")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command; returns its exit code."""
    from dpllm.card.card import write_card
    from dpllm.run.directory import RunDir

    card = write_card(RunDir(Path(known.run)))
    print(card)
    if known.sign:
        from dpllm.verification.sign import sign

        print(sign(card.parent, Path(known.sign)))
    return 0
