"""Compares runs: the cost of privacy in utility, and its benefit.

Comes in: two or more run directories, in any order: at most one without differential privacy, and any number with it. Goes out:
their figures as one JSON value, a table, a page and a picture of it; or a refusal if they cannot be compared. They are
private, because the audit and the held-out figures of a run without differential privacy are un-noised. A public comparison
leaves a figure out, with a note that says why, unless it was computed from public data, or from released weights and public
evaluation data; ``private/`` is then read for runs on such data only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.auditing.summary import PRIMARY_ATTACK
from dpllm.comparison import shown
from dpllm.errors import ConfigError
from dpllm.files import as_json, read_json, resolved, write_json, write_whole
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.records import Json
from dpllm.run.checkpoint import flat
from dpllm.run.directory import Run, RunDir, open_run
from dpllm.statement.audit import AuditRecord
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.run_files import COST, RunRecord
from dpllm.statement.state import statement_of

if TYPE_CHECKING:
    from rich.table import Table

FILES = ("comparison.json", "comparison.md", "comparison.png")
HELD_OUT = ("loss", "accuracy", "reward_accuracy", "reward_margin")
"""Metrics that a run records on its evaluation rows before and after training."""
TASKS = "tasks.json"
"""Under private/: scores of texts, which ``dpllm.comparison.tasks`` computes once."""
PROTOCOL: Json = {"beams": 5, "num_tokens": 100, "scores": ["bleu"], "version": 1}
"""How the texts of ``TASKS`` were generated and scored (Li et al. 2021). Figures of another protocol are not compared."""

SAME = ("model.", "data.", "audit.canaries")
# Of these sections, flags that say what may be published, how large the data are declared to be, or how fast a step runs: they
# change neither the rows that train nor those that are evaluated.
DECLARATIONS = {"model.gradient_checkpointing", "data.public", "data.eval_public", "data.public_size"}
# Settings that change no compared figure, or that name locations.
NOT_COMPARED = ("card.", "telemetry.", "output_dir", "privacy.ledger", "privacy.dataset", "privacy.derived_from")


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs that differ only in privacy, adapter or training.

    Attributes:
        values: Every figure, as comparison.json holds it.
        output: Directory of the files.
        files: The files written there.
    """

    values: Json
    output: Path
    files: tuple[Path, ...]

    def __repr__(self) -> str:
        return f"Comparison in {self.output}: {', '.join(path.name for path in self.files)}"

    def table(self) -> Table:
        """The figures as a table for the terminal."""
        return shown.table(self.values)


def compare(runs: Sequence[RunDir], output: Path | None = None, *, public: bool = False) -> Comparison:
    """Compares runs and writes ``comparison.json``, ``comparison.md`` and the loss over epsilon as ``comparison.png``.

    Args:
        runs: Two or more, on the same model, data, evaluation and canaries: at most one with ``privacy.enabled: false``.
        output: Directory to write to; None: ``private/compare`` of the first run with differential privacy, or, of a public
            comparison, ``comparison`` in its run directory.
        public: Write what may be published: figures of public evaluation data and released weights, audits of runs with
            differential privacy, and of the run without only figures trained on public data. Omitted figures are listed.

    Raises:
        ConfigError: There are fewer than two runs, or two without differential privacy; one has other files than it
            wrote, or canaries and no audit; model, data, evaluation or canaries differ; or ``output`` lies in a directory that
            is published as it was verified.
    """
    figures, target = collect_figures(runs, output, public=public)
    try:
        target.mkdir(mode=0o755 if public else 0o700, parents=True, exist_ok=True)
        for name in FILES:  # from an earlier comparison
            (target / name).unlink(missing_ok=True)
        write_json(target / "comparison.json", figures)
        picture = shown.draw(figures, target / "comparison.png")
        write_whole(target / "comparison.md", shown.page(figures, picture))
        files = tuple(target / name for name in FILES if (target / name).exists())
        for path in files:
            path.chmod(0o644 if public else 0o600)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written to ({error.strerror}). Type another --output.") from None
    return Comparison(figures, target, files)


def collect_figures(runs: Sequence[RunDir], output: Path | None = None, *, public: bool) -> tuple[Json, Path]:
    """The figures of a comparison and its directory, without writing anything; see ``compare``."""
    compared = _read(runs, public=public)
    first = compared[0].run  # the one without differential privacy comes last
    target = output or (first.root / "comparison" if public else first.private / "compare")
    for folder in (resolved(target), *resolved(target).parents):
        if folder.name == "export" and (folder.parent / "config.yaml").exists():
            raise ConfigError(
                f"{target}: lies in export/, which is published as verified, while a comparison shows other runs too. Choose a "
                "directory outside export/."
            )
    base: Json = {"name": compared[0].record.model.name_or_path}
    for run in reversed(compared):  # all share one base model, but not every run records all of its metrics
        base |= _utility(run, "before", "base")
    scored = ("protocol", "num_tokens", "prompts", "references")
    figures = {
        "public": public,
        "base": base,
        "runs": [_figures(run) for run in compared],
        "group": _group(compared),
        "scored": next(({key: run.tasks[key] for key in scored} for run in compared if run.tasks), None),
        "differences": _differences(compared),
        "left_out": [line for run in compared for line in run.left_out],
    }
    return as_json(names.without_paths(figures) if public else figures), target


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison.

    Attributes:
        name: Name of its directory, with its position in the arguments if several runs have that name.
        statement: What its card says, without what may not be shown; also the audit of a run without differential privacy.
        evaluation: ``eval_loss_before``, ``eval_loss_after`` and the like; empty where they may not be shown.
        tasks: Scores of what these weights write; None where there are none, or they may not be shown.
        left_out: Sentences on what may not be published of this run, and why.
    """

    name: str
    run: RunDir
    config: RunConfig
    record: RunRecord
    statement: PrivacyRecord
    evaluation: Json
    tasks: Json | None
    left_out: tuple[str, ...]

    @property
    def private(self) -> bool:
        """Whether it trained with differential privacy, with a guarantee or without."""
        return self.config.privacy.enabled


def _read(runs: Sequence[RunDir], *, public: bool) -> list[ComparedRun]:
    """Reads two or more comparable runs, sorted by epsilon; the run without differential privacy comes last."""
    if len(runs) < 2:
        raise ConfigError("a comparison needs at least two runs. Type: dpllm compare BASELINE RUN RUN.")
    opened = [open_run(run) for run in runs]
    free = [run.directory.root for run in opened if not run.config.privacy.enabled]
    if len(free) > 1:
        raise ConfigError(
            f"{free[0]} and {free[1]}: both were trained without differential privacy, but a comparison has only one such "
            "baseline. Name one of them, and runs with privacy.enabled: true."
        )
    _refuse_copies(opened)
    budgeted = any(run.record.ledger and run.record.ledger.budget for run in opened)
    evaluation_public = all(run.config.data.eval_public for run in opened)
    compared = []
    for name, run in zip(_names(runs), opened, strict=True):
        open_data = run.config.data.public and not budgeted  # a budget contradicts public data
        compared.append(_read_one(name, run, public, open_data, evaluation_public))
    if len({(run.tasks["prompts"], run.tasks["references"]) for run in compared if run.tasks}) > 1:
        compared = [replace(run, tasks=None) for run in compared]  # scores on different prompts are not comparable
    return sorted(
        compared, key=lambda run: (not run.private, run.statement.plan.epsilon if run.statement.plan else 0.0)
    )


def _refuse_copies(runs: Sequence[Run]) -> None:
    """Refuses a run that is named twice, or a copy of a run: it would count as an independent run with the same result."""
    first_by_weights: dict[str, Run] = {}
    for run in runs:
        root = run.directory.root
        weights = [digest for name, digest in sorted(run.record.artifacts.items()) if name.endswith(".safetensors")]
        first = first_by_weights.setdefault(repr(weights or resolved(root)), run)
        if first is not run:
            raise ConfigError(
                f"{root}: has the same weights as {first.directory.root}, so they are one run. Name each once."
            )


def _names(runs: Sequence[RunDir]) -> list[str]:
    folders = [resolved(run.root).name for run in runs]
    counts = Counter(folders)
    return [name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(folders, start=1)]


def _read_one(name: str, opened: Run, public: bool, open_data: bool, evaluation_public: bool) -> ComparedRun:
    run, config, record = opened.directory, opened.config, opened.record
    private = config.privacy.enabled
    if not public:
        summary = read_json(run.private / "summary.json")
        record = record.model_copy(update={key: summary[key] for key in COST if key in summary})
    elif not open_data or (config.data.eval is not None and not evaluation_public):
        record = record.model_copy(update=dict.fromkeys(COST))  # time and memory depend on the longest row
    unprotected = "gives no guarantee" if private else "was trained without differential privacy"
    unprotected += ", on data that are not public"
    left_out: list[str] = []
    audit = None
    if config.audit.plants and public and not (private or open_data):
        left_out.append(f"{name}: the audit, because it {unprotected}.")
    elif config.audit.plants:
        audit = opened.audit
        if audit is None:
            raise ConfigError(f"{run.root}: has canaries but no audit to compare. Run dpllm audit {run.root} first.")
    statement = statement_of(config, opened.plan, record, audit)
    evaluation: Json = {}
    tasks = None
    if config.data.eval is not None and public and not evaluation_public:
        left_out.append(f"{name}: held-out figures, because not every run declares its evaluation data public.")
    elif config.data.eval is not None and public and not (open_data or statement.guarantee):  # weights are not released
        left_out.append(f"{name}: held-out figures, because it {unprotected}.")
    elif config.data.eval is not None:
        # All metrics in run.json are public.
        evaluation = record.metrics.public if public else read_json(run.private / "summary.json")
        tasks = cached_tasks(run, record)
    return ComparedRun(name, run, config, record, statement, evaluation, tasks, tuple(left_out))


def cached_tasks(run: RunDir, record: RunRecord) -> Json | None:
    """Cached scores of exactly these weights under the current protocol; None if there are none."""
    path = run.private / TASKS
    scores = read_json(path) if path.exists() else {}
    weights = scores.get("weights") or {}
    fresh = weights and all(record.artifacts.get(file) == digest for file, digest in weights.items())
    return scores if fresh and scores.get("protocol") == PROTOCOL else None


def _differences(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Settings that differ: dotted key -> the value of each run. Refuses a difference that makes the runs incomparable."""
    settings = [_settings(run) for run in runs]
    differing: dict[str, list[Any]] = {}
    for key in sorted({key for keys in settings for key in keys if not key.startswith(NOT_COMPARED)}):
        values = [keys.get(key) for keys in settings]
        # A setting that a run did not read, such as privacy.* without privacy, does not count as a difference.
        compared = [keys[key] for keys in settings if key in keys] if key.startswith(("privacy.", "data.")) else values
        if all(value == compared[0] for value in compared):
            continue
        if key.startswith(SAME) and key not in DECLARATIONS:
            other = next(index for index, value in enumerate(values) if value != values[0])
            raise ConfigError(
                f"{key} differs: {values[0]!r} in {runs[0].name}, {values[other]!r} in {runs[other].name}, so a difference "
                "between them would say nothing about privacy. Train all with the same model, data, evaluation and canaries."
            )
        differing[key] = values
    return differing


def _settings(run: ComparedRun) -> dict[str, Any]:
    """The settings that the run read, by dotted key, with the model's commit and the number of evaluation tokens."""
    keys = flat(run.config.model_dump(mode="json"))
    if not run.private:
        keys = {key: value for key, value in keys.items() if not key.startswith("privacy.")}
        keys["privacy.enabled"] = False
    keys["model.commit"] = run.record.model.commit
    if tokens := run.evaluation.get("eval_tokens"):
        keys["data.eval_tokens"] = tokens
    return keys


def _figures(run: ComparedRun) -> Json:
    """The figures of one run; epsilon and delta are None where it gives no guarantee, epsilon also without one of all before."""
    statement, record = run.statement, run.record
    plan = statement.plan if statement.guarantee else None
    return {
        "name": run.name,
        "status": record.status,
        "private": run.private,
        "no_guarantee": None if statement.guarantee else statement.reason,
        "epsilon": statement.weights_epsilon,
        "delta": plan.delta if plan else None,
        **_utility(run, "after", "tuned"),
        **(_leakage(statement.audit) if statement.audit else {}),
        "steps": record.steps_taken,
        "seconds": record.duration_seconds,
        "peak_memory_bytes": record.peak_memory_bytes,
        "hardware": record.hardware,
    }


def _utility(run: ComparedRun, moment: str, model: str) -> Json:
    """Held-out figures that the run recorded, and scores of generated texts."""
    held_out = {name: run.evaluation.get(f"eval_{name}_{moment}") for name in HELD_OUT}
    loss = held_out["loss"]
    held_out["perplexity"] = math.exp(loss) if loss is not None and loss < 700 else None
    scores = (run.tasks or {}).get(model) or {}
    return {name: value for name, value in held_out.items() if value is not None} | scores


def _leakage(audit: AuditRecord) -> Json:
    """The figures of an audit: the AUC with its interval, the lower bound with its ceiling and confidence."""
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


def _group(runs: Sequence[ComparedRun]) -> Json | None:
    """The tuning group that holds all runs with a guarantee, with the total in the ledger; None if there is no such group."""
    totals = [run.statement.composed for run in runs if run.statement.guarantee]
    groups = [total.group if total else None for total in totals]
    first = groups[0] if groups else None
    return first.to_json() if first and all(group == first for group in groups) else None
