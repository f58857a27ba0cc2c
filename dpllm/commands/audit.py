"""``dpllm audit``: attacks on a finished run, on a model trained elsewhere, or on the mechanism of a recipe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.errors import AuditContradiction, ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from dpllm.config import RunConfig
    from dpllm.privacy.plan import Plan

ELSEWHERE = ("base", "canaries", "non_members", "format", "epsilon", "delta", "unit", "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is audited."""
    parser.add_argument("run", help="run directory; a recipe with --mechanism or --leakage; a model trained elsewhere")
    parser.add_argument("--attack", metavar="NAME", help="this attack alone; nothing is written, no bound is computed")
    parser.add_argument(
        "--twin", metavar="RUN", help="audited run of the same recipe without privacy: where the attack has to succeed"
    )
    parser.add_argument(
        "--scores-only", action="store_true", help="only what one pass of scoring shows; the models generate nothing"
    )
    parser.add_argument(
        "--shadows", type=int, metavar="K", help="train K shadow runs for LiRA and RMIA (public data, or an exception)"
    )
    parser.add_argument(
        "--members",
        nargs="?",
        const="",
        metavar="FILE",
        help="membership of real rows: the run's own training and evaluation data, or of FILE; private",
    )
    parser.add_argument("--non-members", metavar="FILE", help="with --members FILE: rows that were not trained on")
    parser.add_argument(
        "--mechanism",
        action="store_true",
        help="sampler, clipping, noise and sum of the engine under the Plan's numbers, on a small model (a minute)",
    )
    parser.add_argument(
        "--leakage", action="store_true", help="what one step's gradient gives away, raw against clipped and noised"
    )
    other = parser.add_argument_group("a model trained elsewhere (PEFT adapter or model directory)")
    other.add_argument("--base", metavar="NAME", help="its base model")
    other.add_argument("--canaries", metavar="FILE", help="which canaries were planted in it")
    other.add_argument(
        "--format",
        choices=("text", "prompt_completion", "messages"),
        help="how canaries read in training (default: text)",
    )
    other.add_argument("--epsilon", type=float, help="the epsilon that is claimed for one unit, if any")
    other.add_argument("--delta", type=float, help="its delta")
    other.add_argument("--unit", default=None, help="its unit (default: example)")
    other.add_argument("--output", metavar="DIR", help="where the report goes; it is private (default: printed only)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints what was found; exit code 4 where it contradicts the stated guarantee."""
    if known.mechanism or known.leakage:
        return _before_training(known, rest)
    if rest:
        raise ConfigError(f"{rest[0]}: a finished run is audited as it was trained. Leave the key out.")
    path = Path(known.run)
    if not (path / "config.yaml").exists() and (known.canaries or known.members is not None):
        return _elsewhere(known, path)
    if given := [name for name in ELSEWHERE if getattr(known, name) is not None]:
        option = "--" + given[0].replace("_", "-")
        raise ConfigError(
            f"{option} is for a model trained elsewhere, and {path} is a run of dpllm, which says that itself. Leave it "
            "out, or name a directory with an adapter and no config.yaml."
        )
    return _run(known, path)


def _run(known: argparse.Namespace, path: Path) -> int:
    """A run directory of this package."""
    from dpllm.audit import run as audits
    from dpllm.audit import terminal
    from dpllm.rundir import RunDir

    run = RunDir(path)
    if known.members is not None:
        if known.members:
            raise ConfigError(
                f"--members {known.members}: the run names its own training and evaluation data. Type --members alone, or "
                "name a directory with an adapter and no config.yaml."
            )
        from dpllm.audit.rows.members import audit_run_members

        found = audit_run_members(run, audits.load_models(run, run.load_config())).to_json()
        _show(known, found, terminal.members_table(found))
        return 0
    if known.attack:
        part = audits.attack(run, known.attack)
        _show(known, part, terminal.part_table(known.attack, part))
        return 0
    if known.shadows is not None and known.shadows < 1:
        raise ConfigError(
            f"--shadows {known.shadows}: nothing can be compared with no runs. Type 4 or more, or leave it out."
        )
    twin = RunDir(Path(known.twin)) if known.twin else None
    report = audits.audit(run, twin=twin, shadows=known.shadows or 0, generate=not known.scores_only)
    _show(known, report, terminal.table(report))
    return _end(report)


def _elsewhere(known: argparse.Namespace, path: Path) -> int:
    """A model that somebody else trained."""
    from dpllm.audit import terminal
    from dpllm.audit.outside import outside

    for name in ("attack", "twin", "shadows"):
        if getattr(known, name):
            raise ConfigError(
                f"--{name} needs a run of dpllm, and {path} holds no config.yaml. Leave it out, or name a run directory."
            )
    unit = known.unit or "example"
    if known.canaries and known.members is not None:
        raise ConfigError("--canaries and --members are two audits of their own. Type one of the two.")
    if known.canaries:
        claim = outside.outside_claim(known.epsilon, known.delta, unit)
        report = outside.audit_outside_canaries(
            path, Path(known.canaries), base=known.base, claim=claim, fmt=known.format or "text"
        )
        table = terminal.table(report)
    else:
        if not known.members or not known.non_members:
            raise ConfigError(
                f"{path}: holds no run, so nobody knows what it was trained on. Type --members FILE --non-members FILE, or "
                "--canaries FILE."
            )
        settings = outside.unit_settings(known.members, unit) if known.unit else None
        report = outside.audit_outside_members(
            path, known.members, known.non_members, base=known.base, settings=settings
        )
        table = terminal.members_table(report)
    _show(known, report, table)
    if known.output:
        written = outside.write_outside(report, Path(known.output), path)
        if not known.json:
            print(f"Private: {written}")
    return _end(report)


def _before_training(known: argparse.Namespace, rest: list[str]) -> int:
    """The engine under a Plan's numbers, and what one gradient gives away."""
    from dpllm.audit.whitebox import leakage, mechanism
    from dpllm.rundir import RunDir, write_json

    config, plan = _recipe(Path(known.run), rest)
    if known.leakage:
        leaked = leakage.audit_leakage(config, plan)
        _show(known, leaked.to_json(), leakage.table(leaked))
        return 0
    found = mechanism.audit_mechanism(config, plan=plan)
    run = RunDir(Path(known.run))
    if plan and run.export.is_dir():  # it saw the Plan's numbers and no data
        write_json(run.audit_dir(True) / "mechanism.json", found.to_json())
    _show(known, found.to_json(), mechanism.table(found))
    word, reason = mechanism.verdict(found)
    return _end({"verdict": word, "verdict_reason": reason})


def _recipe(path: Path, rest: list[str]) -> tuple[RunConfig, Plan | None]:
    """A recipe, or that of a run with its Plan."""
    from dpllm.audit.whitebox.mechanism import read_plan
    from dpllm.config import load_config, parse_overrides
    from dpllm.rundir import RunDir, read_json

    if not path.is_dir():
        return load_config(path, parse_overrides(rest)), None
    if rest:
        raise ConfigError(f"{rest[0]}: the mechanism of a run is audited as it was planned. Leave the key out.")
    run = RunDir(path)
    return run.load_config(), read_plan(read_json(run.plan))


def _show(known: argparse.Namespace, report: dict[str, Any], table: Table) -> None:
    from rich.console import Console

    if known.json:
        print(json.dumps(report, indent=2, sort_keys=True, allow_nan=False))
    else:
        Console().print(table)


def _end(report: dict[str, Any]) -> int:
    if report.get("verdict") == "falsified":
        raise AuditContradiction(report["verdict_reason"])
    return 0
