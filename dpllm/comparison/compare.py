"""Runs side by side: what privacy cost in utility, and what it bought.

Comes in: two or more run directories, in any order: at most one without differential privacy, and any number with it. Goes out:
their figures as one JSON value, and of it a table, a page and a picture. They are private, because the audit and the held-out
figures of a run without differential privacy are un-noised, unless a public comparison was asked for, which leaves out whatever
may not be published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpllm.auditing.summary import PRIMARY_ATTACK
from dpllm.comparison import compared_runs, shown
from dpllm.comparison.compared_runs import Side
from dpllm.errors import ConfigError
from dpllm.files import as_json, resolved, write_json, write_whole
from dpllm.recipe import names
from dpllm.records import Json
from dpllm.run.directory import RunDir
from dpllm.statement.audit import AuditRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FILES = ("comparison.json", "comparison.md", "comparison.png")
HELD_OUT = ("loss", "accuracy", "reward_accuracy", "reward_margin")
"""What a run records of its evaluation rows, before and after training."""


@dataclass(frozen=True)
class Comparison:
    """Runs that differ in privacy, adapter or training alone.

    Attributes:
        values: Every figure, as comparison.json holds it.
        output: Where the files lie.
        files: What was written there.
    """

    values: Json
    output: Path
    files: tuple[Path, ...]

    def __repr__(self) -> str:
        return f"Comparison in {self.output}: {', '.join(path.name for path in self.files)}"

    def table(self) -> Table:
        """The figures as a table for the terminal."""
        return shown.table(self.values)


def compare(
    runs: Sequence[RunDir],
    output: Path | None = None,
    *,
    public: bool = False,
    tasks: int = 0,
    console: Console | None = None,
) -> Comparison:
    """Compares runs and writes ``comparison.json``, ``comparison.md`` and the loss over epsilon as ``comparison.png``.

    Args:
        runs: Two or more, on the same model, data, evaluation and canaries: at most one with ``privacy.enabled: false``.
        output: Directory to write to; None: ``private/compare`` of the first run with differential privacy, or, of a public
            comparison, ``comparison`` in its run directory.
        public: Write what may be published: figures of public evaluation data and released weights, audits of runs with
            differential privacy, and of the run without only what was trained on public data. What is left out is said.
        tasks: Evaluation prompts for scores of what is written, see ``tasks.measure``; 0: as they were measured before.
        console: Where to say what is computed.

    Raises:
        ConfigError: The runs cannot be compared, see ``compared_runs.read`` and ``compared_runs.differences``; or ``output``
            lies in a directory that is published as it was verified.
    """
    figures, target = look(runs, output, public=public)
    if tasks:
        from dpllm.comparison.tasks import measure

        measure(runs, tasks, console)
        figures, target = look(runs, output, public=public)
    return Comparison(figures, target, _write(figures, target))


def look(runs: Sequence[RunDir], output: Path | None = None, *, public: bool) -> tuple[Json, Path]:
    """All figures of a comparison, and where they go; nothing is written. See ``compare``."""
    sides = compared_runs.read(runs, public=public)
    run = sides[0].run  # the one without differential privacy comes last
    target = output or (run.root / "comparison" if public else run.private / "compare")
    for folder in (resolved(target), *resolved(target).parents):
        if folder.name == "export" and (folder.parent / "config.yaml").exists():
            raise ConfigError(
                f"{target}: lies in export/, which is published as verified, while a comparison shows other runs too. Choose a "
                "directory outside export/."
            )
    base: Json = {"name": sides[0].record.model.name_or_path}
    for side in reversed(sides):  # one base model, and not every run knows all of it
        base |= _utility(side, "before", "base")
    scored = ("protocol", "num_tokens", "prompts", "references")
    figures = {
        "public": public,
        "base": base,
        "runs": [_figures(side) for side in sides],
        "group": _group(sides),
        "scored": next(({key: side.tasks[key] for key in scored} for side in sides if side.tasks), None),
        "differences": compared_runs.differences(sides),
        "left_out": [line for side in sides for line in side.left_out],
    }
    return as_json(names.without_paths(figures) if public else figures), target


def _figures(side: Side) -> Json:
    """Of one run; epsilon and delta are None where it gives no guarantee."""
    statement, record = side.statement, side.record
    plan = statement.plan if statement.guarantee else None
    return {
        "name": side.name,
        "status": record.status,
        "private": side.private,
        "no_guarantee": None if statement.guarantee else statement.reason,
        "epsilon": plan.epsilon if plan else None,
        "delta": plan.delta if plan else None,
        **_utility(side, "after", "tuned"),
        **(_leakage(statement.audit) if statement.audit else {}),
        "steps": record.steps_taken,
        "seconds": record.duration_seconds,
        "peak_memory_bytes": record.peak_memory_bytes,
        "hardware": record.hardware,
    }


def _utility(side: Side, moment: str, which: str) -> Json:
    """Held-out figures as the run recorded them, and scores of what is written."""
    held_out = {name: side.evaluation.get(f"eval_{name}_{moment}") for name in HELD_OUT}
    loss = held_out["loss"]
    held_out["perplexity"] = math.exp(loss) if loss is not None and loss < 700 else None
    scores = (side.tasks or {}).get(which) or {}
    return {name: value for name, value in held_out.items() if value is not None} | scores


def _leakage(audit: AuditRecord) -> Json:
    """What the audit says; each measure with its interval, or its ceiling and confidence, beside it."""
    attack, bound = audit.attacks.get(PRIMARY_ATTACK), audit.epsilon_lower_bound
    groups = audit.extraction.values()
    return {
        "verdict": audit.verdict,
        "epsilon_lower_bound": bound.value if bound.num_canaries else None,
        "epsilon_lower_bound_ceiling": bound.ceiling,
        "epsilon_lower_bound_confidence": 1 - bound.alpha,
        "auc": attack.auc if attack else None,
        "auc_interval": attack.auc_interval if attack else None,
        "canaries_extracted": sum(group.tuned for group in groups),
        "canaries_planted": sum(group.inserted for group in groups) or None,
    }


def _group(sides: Sequence[Side]) -> Json | None:
    """The tuning group of all runs with a guarantee, and what its runs come to, as the ledger says; None: there is none."""
    totals = [side.statement.composed for side in sides if side.statement.guarantee]
    groups = [total.group if total else None for total in totals]
    first = groups[0] if groups else None
    return first.to_json() if first and all(group == first for group in groups) else None


def _write(figures: Json, target: Path) -> tuple[Path, ...]:
    try:
        target.mkdir(mode=0o755 if figures["public"] else 0o700, parents=True, exist_ok=True)
        for name in FILES:  # of an earlier comparison
            (target / name).unlink(missing_ok=True)
        write_json(target / "comparison.json", figures)
        picture = shown.draw(figures, target / "comparison.png")
        write_whole(target / "comparison.md", shown.page(figures, picture))
        files = tuple(target / name for name in FILES if (target / name).exists())
        for path in files:
            path.chmod(0o644 if figures["public"] else 0o600)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written to ({error.strerror}). Type another --output.") from None
    return files
