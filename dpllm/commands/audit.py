"""``dpllm audit``: attacks on a finished run, or on the mechanism of a recipe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dpllm.errors import AuditContradiction, ConfigError

if TYPE_CHECKING:
    from dpllm.audit.mechanism import MechanismReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is audited."""
    parser.add_argument("run", help="run directory; with --mechanism a recipe will do")
    parser.add_argument(
        "--mechanism",
        action="store_true",
        help="sampler, clipping, noise and sum of the engine under the Plan's numbers, on a small model (a minute)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints what was found; exit code 4 where it contradicts the stated guarantee."""
    from rich.console import Console

    if known.mechanism:
        from dpllm.audit import mechanism

        found = _mechanism(Path(known.run), rest)
        if known.json:
            print(json.dumps(found.to_json(), indent=2, sort_keys=True, allow_nan=False))
        else:
            Console().print(mechanism.table(found))
        word, reason = mechanism.verdict(found)
    else:
        from dpllm.audit.run import audit
        from dpllm.audit.summary import table
        from dpllm.rundir import RunDir

        if rest:
            raise ConfigError(f"{rest[0]}: a finished run is audited as it was trained. Leave the key out.")
        report = audit(RunDir(Path(known.run)))
        if known.json:
            print(json.dumps(report, indent=2, sort_keys=True, allow_nan=False))
        else:
            Console().print(table(report))
        word, reason = report["verdict"], report["verdict_reason"]
    if word == "falsified":
        raise AuditContradiction(reason)
    return 0


def _mechanism(path: Path, rest: list[str]) -> MechanismReport:
    from dpllm.audit.mechanism import audit_mechanism, read_plan
    from dpllm.config import load_config, parse_overrides
    from dpllm.rundir import RunDir, read_json

    if not path.is_dir():
        return audit_mechanism(load_config(path, parse_overrides(rest)))
    if rest:
        raise ConfigError(f"{rest[0]}: the mechanism of a run is audited as it was planned. Leave the key out.")
    run = RunDir(path)
    return audit_mechanism(run.load_config(), plan=read_plan(read_json(run.plan)))
