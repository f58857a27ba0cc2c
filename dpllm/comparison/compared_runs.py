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

from dpllm.auditing.record import AuditRecord, read_audit
from dpllm.card.claim import statement_of
from dpllm.errors import ConfigError
from dpllm.files import read_json, resolved
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir
from dpllm.statement.fields import Json
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.run_files import COST, RunRecord, read_plan, read_run

HELD_OUT, TASKS = "held_out.json", "tasks.json"
"""Under private/: figures by example that ``dpllm.comparison.tasks`` computes once and that no report shows by themselves."""
PROTOCOL: Json = {"beams": 5, "num_tokens": 100, "scores": ["bleu"], "version": 1}
"""Of Li et al. 2021: how what stands in ``TASKS`` was written and scored. Figures of another protocol are not compared."""

SAME = ("model.", "data.", "audit.canaries.")
# Of these sections, flags that say what may be published, how large the data are declared to be, or how fast a step runs: they
# change neither the rows that train nor those that are evaluated.
DECLARATIONS = {"model.gradient_checkpointing", "data.public", "data.eval_public", "data.public_size"}
# They change no figure that is compared.
BESIDE = ("card.", "telemetry.", "output_dir")
# Names of places, which a public report has no use for.
PLACES = {"privacy.ledger", "privacy.dataset", "privacy.derived_from"}


@dataclass(frozen=True)
class Side:
    """One run.

    Attributes:
        name: Of its directory; of two that are alike, with the one above.
        statement: What its card says, without what may not be shown; also the audit of a run without differential privacy.
        evaluation: ``eval_loss_before``, ``eval_loss_after`` and the like; empty where they may not be shown.
        held_out: Losses by evaluation example of these weights; None where there are none, or they may not be shown.
        tasks: Scores of what these weights write, likewise.
        left_out: What may not be published of this run, and why, in sentences.
    """

    name: str
    run: RunDir
    config: RunConfig
    record: RunRecord
    statement: PrivacyRecord
    evaluation: Json
    held_out: Json | None
    tasks: Json | None
    left_out: tuple[str, ...]

    @property
    def private(self) -> bool:
        """Whether it trained with differential privacy, with a guarantee or without."""
        return self.config.privacy.enabled

    @property
    def epsilon(self) -> float | None:
        """What it guarantees; None without a guarantee."""
        return self.statement.terms.epsilon if self.statement.guarantee else None

    @property
    def no_guarantee(self) -> str | None:
        """Why it gives none; None where it gives one."""
        return None if self.statement.guarantee else self.statement.reason


def read(runs: Sequence[RunDir], *, public: bool) -> list[Side]:
    """Reads two or more runs that can be compared, the one without differential privacy last.

    Raises:
        ConfigError: Fewer than two runs, one twice, two without differential privacy; or one that was refused or has canaries
            and no audit.
    """
    if len(runs) < 2:
        raise ConfigError("a comparison needs at least two runs. Type: dpllm compare BASELINE RUN RUN.")
    again = [str(path) for path, number in Counter(resolved(run.root) for run in runs).items() if number > 1]
    if again:
        raise ConfigError(f"{again[0]}: is named twice. Name each run once.")
    configs = [run.load_config() for run in runs]
    free = [run.root for run, config in zip(runs, configs, strict=True) if not config.privacy.enabled]
    if len(free) > 1:
        raise ConfigError(
            f"{free[0]} and {free[1]}: both were trained without differential privacy, but a comparison has only one such "
            "baseline. Name one of them, and runs with privacy.enabled: true."
        )
    records = [read_run(run) for run in runs]
    _refuse_copies(runs, records)
    budgeted = any(record.ledger and record.ledger.budget for record in records)
    evaluation_public = all(config.data.eval_public for config in configs)
    sides = []
    for name, run, config, record in zip(_names(runs), runs, configs, records, strict=True):
        open_data = config.data.public and not budgeted  # whoever set a budget knew better
        sides.append(_side(name, run, config, record, public, open_data, evaluation_public))
    if len({(side.tasks["prompts"], side.tasks["references"]) for side in sides if side.tasks}) > 1:
        sides = [replace(side, tasks=None) for side in sides]  # of different prompts: nothing to compare
    return sorted(
        sides, key=lambda side: (not side.private, side.statement.terms.epsilon if side.statement.terms else 0.0)
    )


def _refuse_copies(runs: Sequence[RunDir], records: Sequence[RunRecord]) -> None:
    """A copy of a run would count as another that agrees with it."""
    known: dict[str, RunDir] = {}
    for run, record in zip(runs, records, strict=True):
        weights = {name: digest for name, digest in record.artifacts.items() if name.endswith(".safetensors")}
        key = repr(sorted(weights.items()))
        if weights and key in known:
            raise ConfigError(
                f"{run.root}: has the same weights as {known[key].root}, so they are one run. Name each run once."
            )
        known[key] = run


def _names(runs: Sequence[RunDir]) -> list[str]:
    names = [resolved(run.root).name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(resolved(run.root).parts[-2:]) for run in runs]
    seen = Counter(names)
    return [name if seen[name] == 1 else f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _side(
    name: str, run: RunDir, config: RunConfig, record: RunRecord, public: bool, open_data: bool, evaluation_public: bool
) -> Side:
    private = config.privacy.enabled
    if not public:
        summary = read_json(run.private / "summary.json")
        record = record.model_copy(update={key: summary[key] for key in COST if key in summary})
    elif not open_data or (config.data.eval is not None and not evaluation_public):
        # An older version wrote it down all the same.
        record = record.model_copy(update=dict.fromkeys(COST))
    unprotected = "gives no guarantee" if private else "was trained without differential privacy"
    unprotected += ", on data that are not public"
    left_out: list[str] = []
    audit = None
    if config.audit.plants and public and not (private or open_data):
        left_out.append(f"{name}: the audit, because it {unprotected}.")
    elif config.audit.plants:
        audit = _audit(run, private, public and not open_data)
    statement = statement_of(config, read_plan(run) if private else None, record, audit)
    evaluation: Json = {}
    held_out, tasks = None, None
    if config.data.eval is not None and public and not evaluation_public:
        left_out.append(f"{name}: held-out figures, because not every run declares its evaluation data public.")
    elif config.data.eval is not None and public and not (open_data or statement.guarantee):  # weights are not released
        left_out.append(f"{name}: held-out figures, because it {unprotected}.")
    elif config.data.eval is not None:
        # What run.json says it says in public.
        evaluation = record.metrics.public if public else read_json(run.private / "summary.json")
        held_out, tasks = cached(run, HELD_OUT, record), cached(run, TASKS, record)
    return Side(name, run, config, record, statement, evaluation, held_out, tasks, tuple(left_out))


def _audit(run: RunDir, private: bool, published: bool) -> AuditRecord:
    """The audit of a run; where only a published one may be shown, it has to say that it is."""
    path = run.audit_dir(private) / "audit.json"
    if not path.exists():
        raise ConfigError(f"{run.root}: has canaries but no audit to compare. Run dpllm audit {run.root} first.")
    audit = read_audit(path)
    if published and not audit.published:
        raise ConfigError(
            f"{run.export}: holds an audit that may not be published, so the directory was changed by hand. Run dpllm audit "
            f"{run.root} again."
        )
    return audit


def cached(run: RunDir, name: str, record: RunRecord) -> Json | None:
    """Figures of exactly these weights, by today's protocol; None where there are none."""
    path = run.private / name
    if not path.exists():
        return None
    found = read_json(path)
    weights = found.get("weights") or {}
    fresh = weights and all(record.artifacts.get(file) == digest for file, digest in weights.items())
    return found if fresh and (name != TASKS or found.get("protocol") == PROTOCOL) else None


def differences(sides: Sequence[Side], *, public: bool) -> dict[str, list[Any]]:
    """Every other setting that differs: dotted key -> a value for each run.

    Raises:
        ConfigError: One that must be the same: model, data, evaluation or canaries.
    """
    settings = [_settings(side) for side in sides]
    found: dict[str, list[Any]] = {}
    for key in sorted({key for flat in settings for key in flat}):
        values = [flat.get(key) for flat in settings]
        if key == "data.eval_tokens":  # of runs whose figures are left out it is not known
            known = [value for value in values if value is not None]
            values = values if len(set(known)) > 1 else known
        elif key.startswith("privacy.") and key != "privacy.enabled":
            theirs = [value for side, value in zip(sides, values, strict=True) if side.private]
            values = values if any(value != theirs[0] for value in theirs) else theirs
        if all(value == values[0] for value in values) or key.startswith(BESIDE):
            continue
        if key.startswith(SAME) and key not in DECLARATIONS:
            other = next(index for index, value in enumerate(values) if value != values[0])
            raise ConfigError(
                f"{key} differs: {values[0]!r} in {sides[0].name}, {values[other]!r} in {sides[other].name}, so a difference "
                "between them would say nothing about privacy. Train all with the same model, data, evaluation and canaries."
            )
        if not (public and key in PLACES):
            found[key] = names.without_paths(values) if public else values
    return found


def _settings(side: Side) -> dict[str, Any]:
    """The recipe by dotted keys, and what the run found; without privacy nothing read the keys of that section."""
    flat = _flat(side.config.model_dump(mode="json"))
    if not side.private:
        flat = {key: value for key, value in flat.items() if not key.startswith("privacy.")} | {
            "privacy.enabled": False
        }
    return flat | {
        "model.commit": side.record.model.commit,
        "data.eval_tokens": side.evaluation.get("eval_tokens"),
    }


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat
