"""``dpllm audit``: attacks on a finished run, or on a model trained elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.cli.plan import AddCommand, plain_console, show
from dpllm.errors import AuditContradiction, ConfigError
from dpllm.files import CARD

if TYPE_CHECKING:
    from rich.console import RenderableType

ELSEWHERE = ("base", "canaries", "format", "epsilon", "delta", "unit")


def add_commands(add: AddCommand) -> None:
    """The command and what it takes."""
    parser = add("audit", run, "attack a run: canary exposure, extraction, membership, an epsilon lower bound")
    option = parser.add_argument
    option("run", help="run directory; a model trained elsewhere")
    option(
        "--twin",
        metavar="RUN",
        help="audited run of the same recipe without privacy, on which the attack should succeed",
    )
    option("--shadows", type=int, metavar="K", help="train K shadow runs for LiRA (public data)")
    option(
        "--members",
        action="store_true",
        help="membership inference on real rows: the run's own training and evaluation data; private",
    )
    option = parser.add_argument_group("a model trained elsewhere (PEFT adapter or model directory)").add_argument
    option("--base", metavar="NAME", help="its base model")
    option("--canaries", metavar="FILE", help="which canaries were planted in it")
    option(
        "--format",
        choices=("text", "prompt_completion", "messages"),
        help="format of the canaries in training (default: text)",
    )
    option("--epsilon", type=float, help="the claimed epsilon for one unit, if any")
    option("--delta", type=float, help="its delta")
    option("--unit", default=None, help="its unit (default: example)")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints what was found; exit code 4 where it contradicts the stated guarantee."""
    path = Path(known.run)
    is_run = (path / "config.yaml").exists()
    _check_options(known, rest, is_run=is_run)
    if is_run:
        return _run(known, path)
    if known.canaries:
        return _elsewhere(known, path)
    raise ConfigError(f"{path}: {_no_run(path)}")


def _check_options(known: argparse.Namespace, rest: list[str], *, is_run: bool) -> None:
    """Options of two audits at once, or of another one, which would be left out without a word."""
    if rest and Path(known.run).is_dir():
        raise ConfigError(f"{rest[0]}: a finished run is audited as it was trained. Leave the key out.")
    asked = [name for name in ("canaries", "members", "twin", "shadows") if getattr(known, name)]
    if asked[1:] and asked[0] in ("canaries", "members"):
        raise ConfigError(f"--{asked[0]} and --{asked[1]} ask for two separate audits. Type one of the two.")
    if known.shadows is not None and known.shadows < 1:
        raise ConfigError(f"--shadows {known.shadows}: needs runs to compare with. Type 4 or more, or leave it out.")
    if is_run and (elsewhere := [name for name in ELSEWHERE if getattr(known, name) is not None]):
        raise ConfigError(
            f"--{elsewhere[0]} is for a model trained elsewhere, but {known.run} is a run of dpllm, which records it. Leave it "
            "out, or name a directory with an adapter and no config.yaml."
        )


def _no_run(path: Path) -> str:
    """What else may stand there, and what to type then."""
    inside = sorted(child.name for child in path.iterdir() if (child / "config.yaml").exists()) if path.is_dir() else []
    if inside:
        return f"holds no run itself, but {', '.join(inside[:5])}. Type: dpllm audit {path / inside[0]}"
    if (path.parent / "config.yaml").exists():
        return f"is a part of a run. Type: dpllm audit {path.parent}"
    if (path / "adapter_config.json").exists() or (path / "config.json").exists():
        return "is a model trained elsewhere, so the audit needs to know which canaries were planted in it. Add --canaries FILE."
    return f"holds no run (no config.yaml; below {Path.cwd()}). Type the output_dir of a run that was trained."


def _run(known: argparse.Namespace, path: Path) -> int:
    from dpllm.auditing import run as audits
    from dpllm.auditing import terminal
    from dpllm.run.directory import RunDir, open_run

    run = RunDir(path)
    if known.members:
        from dpllm.auditing.members import audit_run_members

        opened = open_run(run)
        found = audit_run_members(opened, audits.load_models(opened))
        return _show(known, found, terminal.members_table(found), f"Private: {run.private / 'audit_members.json'}")
    twin = RunDir(Path(known.twin)) if known.twin else None
    report = audits.audit(run, twin=twin, shadows=known.shadows or 0, console=plain_console(stderr=True))
    told = f"Written to {run.audit_dir(report.published)}"
    if (run.export / CARD).exists() and report.published:
        told += f". The card states the audit before this one: type dpllm card {known.run}"
    return _show(known, report.to_json(), terminal.table(report), told)


def _elsewhere(known: argparse.Namespace, path: Path) -> int:
    from dpllm.auditing import outside, terminal

    claim = outside.outside_claim(known.epsilon, known.delta, known.unit or "example")
    report = outside.audit_outside(path, Path(known.canaries), base=known.base, claim=claim, fmt=known.format or "text")
    return _show(known, report.to_json(), terminal.table(report))


def _show(known: argparse.Namespace, report: dict[str, Any], table: RenderableType, *lines: str) -> int:
    """Prints a report for machines or for people; exit code 4 where it contradicts the stated guarantee."""
    show(known, report if known.json else table, *lines)
    if report.get("verdict") == "falsified":
        raise AuditContradiction(report.get("verdict_reason") or report["reason"])
    return 0
