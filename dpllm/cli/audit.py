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
    """Adds the command and its options."""
    parser = add("audit", run, "attack a run: canary exposure, extraction, membership, an epsilon lower bound")
    option = parser.add_argument
    option("run", help="run directory; a model trained elsewhere")
    option(
        "--positive-control",
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


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints the audit; exit code 4 if it contradicts the stated guarantee."""
    path = Path(args.run)
    is_run = (path / "config.yaml").exists()
    _check_options(args, overrides, is_run=is_run)
    if is_run:
        return _run(args, path)
    if args.canaries:
        return _elsewhere(args, path)
    raise ConfigError(f"{path}: {_no_run(path)}")


def _check_options(args: argparse.Namespace, overrides: list[str], *, is_run: bool) -> None:
    """Refuses options of two audits at once, or of another audit, which would be ignored silently."""
    if overrides and Path(args.run).is_dir():
        raise ConfigError(f"{overrides[0]}: a finished run is audited as it was trained. Leave the key out.")
    audits = [name for name in ("canaries", "members", "positive_control", "shadows") if getattr(args, name)]
    if audits[1:] and audits[0] in ("canaries", "members"):
        first, second = (f"--{name.replace('_', '-')}" for name in audits[:2])
        raise ConfigError(f"{first} and {second} ask for two separate audits. Type one of the two.")
    if args.shadows is not None and args.shadows < 1:
        raise ConfigError(f"--shadows {args.shadows}: needs runs to compare with. Type 4 or more, or leave it out.")
    if is_run and (foreign := [name for name in ELSEWHERE if getattr(args, name) is not None]):
        raise ConfigError(
            f"--{foreign[0]} is for a model trained elsewhere, but {args.run} is a run of dpllm, which records it. Leave it "
            "out, or name a directory with an adapter and no config.yaml."
        )


def _no_run(path: Path) -> str:
    """The message for a directory without a run, with the command to type instead."""
    runs = sorted(child.name for child in path.iterdir() if (child / "config.yaml").exists()) if path.is_dir() else []
    if runs:
        return f"holds no run itself, but {', '.join(runs[:5])}. Type: dpllm audit {path / runs[0]}"
    if (path.parent / "config.yaml").exists():
        return f"is a part of a run. Type: dpllm audit {path.parent}"
    if (path / "adapter_config.json").exists() or (path / "config.json").exists():
        return "is a model trained elsewhere, so the audit needs to know which canaries were planted in it. Add --canaries FILE."
    return f"holds no run (no config.yaml; below {Path.cwd()}). Type the output_dir of a run that was trained."


def _run(args: argparse.Namespace, path: Path) -> int:
    from dpllm.auditing import run as audits
    from dpllm.auditing import terminal
    from dpllm.run.directory import RunDir, open_run

    run = RunDir(path)
    if args.members:
        from dpllm.auditing.members import audit_run_members

        opened = open_run(run)
        members = audit_run_members(opened, audits.load_models(opened))
        return _show(args, members, terminal.members_table(members), f"Private: {run.private / 'audit_members.json'}")
    control = RunDir(Path(args.positive_control)) if args.positive_control else None
    report = audits.audit(run, positive_control=control, shadows=args.shadows or 0, console=plain_console(stderr=True))
    line = f"Written to {run.audit_dir(report.published)}"
    if (run.export / CARD).exists() and report.published:
        line += f". The card states the audit before this one: type dpllm card {args.run}"
    return _show(args, report.to_json(), terminal.table(report), line)


def _elsewhere(args: argparse.Namespace, path: Path) -> int:
    from dpllm.auditing import outside, terminal

    claim = outside.outside_claim(args.epsilon, args.delta, args.unit or "example")
    report = outside.audit_outside(path, Path(args.canaries), base=args.base, claim=claim, fmt=args.format or "text")
    return _show(args, report.to_json(), terminal.table(report))


def _show(args: argparse.Namespace, report: dict[str, Any], table: RenderableType, *lines: str) -> int:
    """Prints a report as JSON or as a table; exit code 4 if it contradicts the stated guarantee."""
    show(args, report if args.json else table, *lines)
    if report.get("verdict") == "falsified":
        raise AuditContradiction(report.get("verdict_reason") or report["reason"])
    return 0
