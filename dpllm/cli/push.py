"""``dpllm push``: upload export/ to the Hub, once it verifies."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm push``."""
    parser.add_argument("run", help="run directory")
    parser.add_argument("repository", help="OWNER/NAME on the Hub; made if it does not exist")
    parser.add_argument("--dry-run", action="store_true", help="list what would be uploaded, and contact nobody")
    parser.add_argument("--private", action="store_true", help="make the repository a private one")
    parser.add_argument(
        "--without-guarantee",
        action="store_true",
        help="publish a run that gives no guarantee, although its data are not declared public",
    )
    parser.add_argument(
        "--replace", action="store_true", help="remove files of the repository that export/ does not hold"
    )
    parser.add_argument("--ledger", metavar="FILE", help="where the ledger or an export of it lies now")
    parser.add_argument("--json", action="store_true", help="print the list as one JSON object")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Runs the command; returns its exit code."""
    from dpllm.publish.push import push
    from dpllm.run.directory import RunDir

    done = push(
        RunDir(Path(known.run)),
        known.repository,
        dry_run=known.dry_run,
        private=known.private,
        without_guarantee=known.without_guarantee,
        replace=known.replace,
        ledger=known.ledger,
    )
    if known.json:
        print(json.dumps(done.to_json(), indent=2, sort_keys=True))
        return 0
    for file in done.files:
        print(f"{file.size:>12,}  {file.sha256}  {file.path}")
    for path in done.stale:
        print(f"{'removed':>12}  {path}")
    for line in done.unsearched:
        print(f"{'not searched':>12}  {line}")
    total = sum(file.size for file in done.files)
    where = f"uploaded to {done.url}" if done.url else f"would go to {done.repository}; nothing was uploaded"
    print(f"{len(done.files)} files, {total:,} bytes, {where}")
    return 0
