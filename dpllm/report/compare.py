"""With and without differential privacy, side by side: what privacy cost in held-out loss, and what it bought.

Comes in: two run directories, private figures included. Goes out: a table, and JSON, Markdown and a figure under
``private/`` of the run with differential privacy. Nothing that is written here may be published as it is: the audit and
the held-out loss of the run without differential privacy are un-noised.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.audit.attacks import ATTACKS
from dpllm.audit.summary import PRIMARY_ATTACK
from dpllm.config import RunConfig
from dpllm.errors import ConfigError
from dpllm.report import words
from dpllm.report.claim import Json, check_audit, stated_epsilon, why_not
from dpllm.rundir import RunDir, read_json, write_json

if TYPE_CHECKING:
    from rich.table import Table

# Flags that say what may be published, how large the data are declared to be, or how fast a step runs: they change
# neither the rows that train nor those that are evaluated.
DECLARATIONS = {"model.gradient_checkpointing", "data.public", "data.eval_public", "data.public_size"}
SAME = ("model.", "data.", "audit.canaries.")
NONE = "-"


@dataclass(frozen=True)
class Row:
    """One measure, as text, of the base model, the run without and the run with differential privacy."""

    measure: str
    base: str
    baseline: str
    dp: str


@dataclass(frozen=True)
class Side:
    """What is read of one run."""

    config: RunConfig
    record: Json
    plan: Json | None
    summary: Json
    audit: Json | None


@dataclass(frozen=True)
class Comparison:
    """Two runs that differ in privacy, adapter or training alone.

    Attributes:
        rows: The measures, the most important first.
        differences: What else differs: dotted key -> (baseline, with DP).
        guarantee: Why the run with differential privacy gives no guarantee; None where it gives one.
        output: Where the files lie; private.
    """

    rows: tuple[Row, ...]
    differences: dict[str, tuple[Any, Any]]
    guarantee: str | None
    output: Path

    def table(self) -> Table:
        """The measures as a table for the terminal."""
        from rich.table import Table

        table = Table(title="Without and with differential privacy", caption=_caption(self.guarantee))
        table.add_column("", overflow="fold")
        for name in ("base model", "without DP", "with DP"):
            table.add_column(name, justify="right", overflow="fold")
        for row in self.rows:
            table.add_row(row.measure, row.base, row.baseline, row.dp)
        return table


def compare(baseline: RunDir, dp: RunDir, output: Path | None = None) -> Comparison:
    """Compares a run without differential privacy and one with it, and writes the result.

    Args:
        baseline: A run with ``privacy.enabled: false``.
        dp: A run with ``privacy.enabled: true`` on the same model, data and evaluation.
        output: Directory to write to; None: ``private/compare`` of `dp`.

    Returns:
        The comparison; ``comparison.json``, ``comparison.md`` and ``comparison.png`` are written.

    Raises:
        ConfigError: A run is not what it should be, was refused, lacks a file, or differs from the other in its
            model, data, evaluation or canaries; or `output` lies in a directory that is published.
    """
    target = output or dp.private / "compare"
    for run in (baseline, dp):
        if target.resolve().is_relative_to(run.export.resolve()):
            raise ConfigError(
                f"{target}: lies in export/, which is published, and a comparison holds un-noised figures of private "
                "data. Choose a directory outside export/."
            )
    without, with_dp = _read(baseline, False), _read(dp, True)
    differences = _differences(without, with_dp)
    guarantee = why_not(with_dp.config, with_dp.plan, with_dp.record, with_dp.audit)
    values = _values(without, with_dp, with_dp.plan or {})
    result = Comparison(_rows(values, guarantee), differences, guarantee, target)
    _write(result, values)
    return result


def _read(run: RunDir, enabled: bool) -> Side:
    config = run.load_config()
    if config.privacy.enabled != enabled:
        kind, word = ("DP run", "true") if enabled else ("baseline", "false")
        raise ConfigError(
            f"{run.root}: privacy.enabled is {str(not enabled).lower()}, so this is not the {kind} (privacy.enabled: "
            f"{word}). Type: dpllm compare BASELINE RUN."
        )
    record = read_json(run.run)
    if record["status"] == "refused":
        raise ConfigError(f"{run.root}: the run was refused, so there is nothing to compare. Train first.")
    plan = read_json(run.plan) if enabled else None
    audit = None
    if config.audit.canaries is not None:
        path = run.audit_dir(enabled) / "audit.json"
        if not path.exists():
            raise ConfigError(f"{run.root}: has canaries but no audit to compare. Run dpllm audit {run.root} first.")
        audit = read_json(path)
        check_audit(plan, record, audit)
    return Side(config, record, plan, read_json(run.private / "summary.json"), audit)


def _differences(without: Side, with_dp: Side) -> dict[str, tuple[Any, Any]]:
    """Every other setting that differs.

    Raises:
        ConfigError: One that must be the same.
    """
    ours, theirs = _flat(without.config.model_dump(mode="json")), _flat(with_dp.config.model_dump(mode="json"))
    ours["model.commit"], theirs["model.commit"] = (side.record["model"]["commit"] for side in (without, with_dp))
    ours["data.eval_tokens"], theirs["data.eval_tokens"] = (side.summary["eval_tokens"] for side in (without, with_dp))
    found = {}
    for key in sorted(ours.keys() | theirs.keys()):
        pair = ours.get(key), theirs.get(key)
        if pair[0] == pair[1] or key == "output_dir" or key.startswith("card."):
            continue
        if key.startswith(SAME) and key not in DECLARATIONS:
            raise ConfigError(
                f"{key} differs: {pair[0]!r} in the baseline, {pair[1]!r} in the DP run, so a difference between the "
                "two would say nothing about privacy. Train both with the same model, data, evaluation and canaries."
            )
        found[key] = pair
    return found


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _values(without: Side, with_dp: Side, plan: Json) -> Json:
    """Every figure that the table and the picture show."""
    ours, theirs = without.summary, with_dp.summary
    base, baseline, dp = theirs["eval_loss_before"], ours["eval_loss_after"], theirs["eval_loss_after"]
    values: Json = {
        "loss": {"base": base, "baseline": baseline, "dp": dp},
        "epsilon": stated_epsilon(plan, with_dp.record),
        "delta": plan["delta"],
        "groups": {},
        "auc": {},
        "epsilon_lower_bound": None,
    }
    if without.audit is None or with_dp.audit is None:
        return values
    audits = {"baseline": without.audit, "dp": with_dp.audit}
    values["groups"] = {
        group: {
            side: {"exposure": audit["exposure"][group], "extraction": audit["extraction"][group]}
            for side, audit in audits.items()
        }
        for group in sorted(with_dp.audit["exposure"], key=int, reverse=True)
    }
    both = without.audit["attacks"].keys() & with_dp.audit["attacks"].keys()
    names = [name for name in (PRIMARY_ATTACK, *ATTACKS) if name in both]  # the one that counts before the usual two
    values["auc"] = {name: {side: audit["attacks"][name] for side, audit in audits.items()} for name in names}
    values["epsilon_lower_bound"] = {side: audit["epsilon_lower_bound"] for side, audit in audits.items()}
    return values


def _rows(values: Json, guarantee: str | None) -> tuple[Row, ...]:
    loss = {side: words.measured(value, 3) for side, value in values["loss"].items()}
    stated = f"{words.bound(values['epsilon'])} (delta {words.number_text(values['delta'])})"
    rows = [
        Row("Held-out loss (nats per target token)", loss["base"], loss["baseline"], loss["dp"]),
        Row("Epsilon", NONE, "no guarantee", stated if guarantee is None else "no guarantee"),
    ]
    for group, sides in values["groups"].items():
        null = words.measured(sides["dp"]["exposure"]["null_mean"])
        name = f"Canary exposure in bits, {_copies(group)} (no memory: {null})"
        rows.append(_row(name, sides, "exposure", "base_mean", lambda seen: words.measured(seen["mean"])))
    for group, sides in values["groups"].items():
        rows.append(
            _row(
                f"Canaries extracted, {_copies(group)}",
                sides,
                "extraction",
                "base",
                lambda got: f"{got['tuned']} of {got['inserted']}",
            )
        )
    for name, sides in values["auc"].items():
        attack = sides["dp"]
        label = f"AUC, {name} attack, {_copies(str(attack['group']))} ({words.percent(attack['confidence'])} interval)"
        auc = {
            side: f"{words.measured(a['auc'])} ({words.interval(a['auc_interval']).replace(' to ', ', ')})"
            for side, a in sides.items()
        }
        rows.append(Row(label, NONE, auc["baseline"], auc["dp"]))
    if values["epsilon_lower_bound"]:
        found = {
            side: f"{words.measured(b['value'])} (ceiling {words.measured(b['ceiling'])})"
            for side, b in values["epsilon_lower_bound"].items()
        }
        sure = words.percent(1 - values["epsilon_lower_bound"]["dp"]["alpha"])
        rows.append(Row(f"Epsilon lower bound ({sure} confidence)", NONE, found["baseline"], found["dp"]))
    return tuple(rows)


def _row(name: str, sides: Json, part: str, base_key: str, show: Callable[[Json], str]) -> Row:
    """One measure of a group; the base model's figure is given for each run's canaries where the two differ."""

    def base(seen: Json) -> str:
        value = seen[base_key]
        return f"{value} of {seen['inserted']}" if base_key == "base" else words.measured(value)

    bases = list(dict.fromkeys(base(sides[side][part]) for side in ("baseline", "dp")))
    return Row(name, " / ".join(bases), show(sides["baseline"][part]), show(sides["dp"][part]))


def _copies(group: str) -> str:
    return "1 copy" if group == "1" else f"{group} copies"


def _caption(guarantee: str | None) -> str:
    text = "Private: holds un-noised figures. Do not publish."
    return text if guarantee is None else f"The DP run gives no guarantee: {guarantee}. {text}"


def _write(result: Comparison, values: Json) -> None:
    from dpllm.report.figure import draw

    result.output.mkdir(mode=0o700, parents=True, exist_ok=True)
    rows = [asdict(row) for row in result.rows]
    differences = {key: {"baseline": ours, "dp": theirs} for key, (ours, theirs) in result.differences.items()}
    write_json(
        result.output / "comparison.json",
        {**values, "rows": rows, "differences": differences, "no_guarantee_because": result.guarantee},
    )
    lines = ["# Without and with differential privacy", "", _caption(result.guarantee), ""]
    lines += ["| | base model | without DP | with DP |", "|---|---:|---:|---:|"]
    lines += ["| " + " | ".join(words.cell(text) for text in row.values()) + " |" for row in rows]
    lines += ["", "![held-out loss, canary exposure and extraction](comparison.png)", ""]
    if differences:
        lines += ["Settings that differ:", "", "| key | without DP | with DP |", "|---|---|---|"]
        for key, pair in result.differences.items():
            lines += [f"| {key} | {words.cell(pair[0])} | {words.cell(pair[1])} |"]
        lines += [""]
    temporary = result.output / f".comparison.md.{os.getpid()}"
    temporary.write_text("\n".join(lines), encoding="utf-8")
    os.replace(temporary, result.output / "comparison.md")
    stated = f"epsilon {words.bound(values['epsilon'])}" if result.guarantee is None else "no guarantee"
    draw(values, stated, result.output / "comparison.png")
