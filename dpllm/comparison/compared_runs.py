"""What is read of each compared run, and what of it may be published.

Comes in: run directories. Goes out: one ``Side`` for each, or a refusal where they cannot be compared. In a public
comparison a figure is left out, with a note that says why, unless it was computed from public data, or from released weights
and public evaluation data; ``private/`` is then read for runs on such data only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpllm.errors import ConfigError
from dpllm.files import read_json, resolved
from dpllm.recipe.config import RunConfig
from dpllm.records import Json
from dpllm.run.directory import Run, RunDir, open_run
from dpllm.run.resume import flat
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.run_files import COST, RunRecord
from dpllm.statement.state import statement_of

TASKS = "tasks.json"
"""Under private/: scores of texts, which ``dpllm.comparison.tasks`` computes once."""
PROTOCOL: Json = {"beams": 5, "num_tokens": 100, "scores": ["bleu"], "version": 1}
"""Of Li et al. 2021: how what stands in ``TASKS`` was written and scored. Figures of another protocol are not compared."""

SAME = ("model.", "data.", "audit.canaries")
# Of these sections, flags that say what may be published, how large the data are declared to be, or how fast a step runs: they
# change neither the rows that train nor those that are evaluated.
DECLARATIONS = {"model.gradient_checkpointing", "data.public", "data.eval_public", "data.public_size"}
# They change no figure that is compared, or name places.
BESIDE = ("card.", "telemetry.", "output_dir", "privacy.ledger", "privacy.dataset", "privacy.derived_from")


@dataclass(frozen=True)
class Side:
    """One run.

    Attributes:
        name: Of its directory; of several that are alike, with its number among those that were named.
        statement: What its card says, without what may not be shown; also the audit of a run without differential privacy.
        evaluation: ``eval_loss_before``, ``eval_loss_after`` and the like; empty where they may not be shown.
        tasks: Scores of what these weights write; None where there are none, or they may not be shown.
        left_out: What may not be published of this run, and why, in sentences.
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


def read(runs: Sequence[RunDir], *, public: bool) -> list[Side]:
    """Reads two or more runs that can be compared, the one without differential privacy last.

    Raises:
        ConfigError: Fewer than two runs, one twice, two without differential privacy; or one that was refused, has other files
            than it wrote, or canaries and no audit.
    """
    if len(runs) < 2:
        raise ConfigError("a comparison needs at least two runs. Type: dpllm compare BASELINE RUN RUN.")
    opened = [open_run(run) for run in runs]
    free = [one.directory.root for one in opened if not one.config.privacy.enabled]
    if len(free) > 1:
        raise ConfigError(
            f"{free[0]} and {free[1]}: both were trained without differential privacy, but a comparison has only one such "
            "baseline. Name one of them, and runs with privacy.enabled: true."
        )
    _refuse_copies(opened)
    budgeted = any(one.record.ledger and one.record.ledger.budget for one in opened)
    evaluation_public = all(one.config.data.eval_public for one in opened)
    sides = []
    for name, one in zip(_names(runs), opened, strict=True):
        open_data = one.config.data.public and not budgeted  # whoever set a budget knew better
        sides.append(_side(name, one, public, open_data, evaluation_public))
    if len({(side.tasks["prompts"], side.tasks["references"]) for side in sides if side.tasks}) > 1:
        sides = [replace(side, tasks=None) for side in sides]  # of different prompts: nothing to compare
    return sorted(
        sides, key=lambda side: (not side.private, side.statement.plan.epsilon if side.statement.plan else 0.0)
    )


def _refuse_copies(runs: Sequence[Run]) -> None:
    """A run that is named twice, or a copy of one, would count as another that agrees with it."""
    known: dict[str, Run] = {}
    for run in runs:
        root = run.directory.root
        weights = [digest for name, digest in sorted(run.record.artifacts.items()) if name.endswith(".safetensors")]
        first = known.setdefault(repr(weights or resolved(root)), run)
        if first is not run:
            raise ConfigError(
                f"{root}: has the same weights as {first.directory.root}, so they are one run. Name each once."
            )


def _names(runs: Sequence[RunDir]) -> list[str]:
    folders = [resolved(run.root).name for run in runs]
    seen = Counter(folders)
    return [name if seen[name] == 1 else f"{name} ({number})" for number, name in enumerate(folders, start=1)]


def _side(name: str, opened: Run, public: bool, open_data: bool, evaluation_public: bool) -> Side:
    run, config, record = opened.directory, opened.config, opened.record
    private = config.privacy.enabled
    if not public:
        summary = read_json(run.private / "summary.json")
        record = record.model_copy(update={key: summary[key] for key in COST if key in summary})
    elif not open_data or (config.data.eval is not None and not evaluation_public):
        record = record.model_copy(update=dict.fromkeys(COST))  # it depends on the longest row
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
        # What run.json says it says in public.
        evaluation = record.metrics.public if public else read_json(run.private / "summary.json")
        tasks = cached_tasks(run, record)
    return Side(name, run, config, record, statement, evaluation, tasks, tuple(left_out))


def cached_tasks(run: RunDir, record: RunRecord) -> Json | None:
    """Scores of what exactly these weights write, by today's protocol; None where there are none."""
    path = run.private / TASKS
    scores = read_json(path) if path.exists() else {}
    weights = scores.get("weights") or {}
    fresh = weights and all(record.artifacts.get(file) == digest for file, digest in weights.items())
    return scores if fresh and scores.get("protocol") == PROTOCOL else None


def differences(sides: Sequence[Side]) -> dict[str, list[Any]]:
    """Every other setting that differs: dotted key -> a value for each run.

    Raises:
        ConfigError: One that must be the same: model, data, evaluation or canaries.
    """
    settings = [_settings(side) for side in sides]
    differing: dict[str, list[Any]] = {}
    for key in sorted({key for one in settings for key in one if not key.startswith(BESIDE)}):
        values = [one.get(key) for one in settings]
        # What nothing read without privacy, or is left out, differs from nothing.
        known = [one[key] for one in settings if key in one] if key.startswith(("privacy.", "data.")) else values
        if all(value == known[0] for value in known):
            continue
        if key.startswith(SAME) and key not in DECLARATIONS:
            other = next(index for index, value in enumerate(values) if value != values[0])
            raise ConfigError(
                f"{key} differs: {values[0]!r} in {sides[0].name}, {values[other]!r} in {sides[other].name}, so a difference "
                "between them would say nothing about privacy. Train all with the same model, data, evaluation and canaries."
            )
        differing[key] = values
    return differing


def _settings(side: Side) -> dict[str, Any]:
    """The recipe by dotted keys, as far as it was read, and what the run found."""
    keys = flat(side.config.model_dump(mode="json"))
    if not side.private:
        keys = {key: value for key, value in keys.items() if not key.startswith("privacy.")} | {
            "privacy.enabled": False
        }
    keys["model.commit"] = side.record.model.commit
    if tokens := side.evaluation.get("eval_tokens"):
        keys["data.eval_tokens"] = tokens
    return keys
