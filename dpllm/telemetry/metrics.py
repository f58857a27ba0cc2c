"""Runs and ledgers as Prometheus metrics: their names, labels and meaning, and the files that hold them.

Comes in: the record of a run, or an open ledger. Goes out: metric families, text, ``.prom`` files. Whatever a metric can show
of a run is a field of ``RunValues``, so this file is the list of what leaves. Of private/ it reads one line of metrics.jsonl,
and that only where the recipe allows private metrics.

The node exporter's textfile collector refuses everything where one series stands in two files, so each file holds what no other
does: one for each model's run, one for each dataset, one for the ledger.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from prometheus_client import generate_latest, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dpllm.errors import ConfigError
from dpllm.files import BLOCK, RunPaths, read_json
from dpllm.ledger import Ledger
from dpllm.ledger.values import OPEN, State
from dpllm.privacy import accounting
from dpllm.recipe.config import RunConfig
from dpllm.recipe.names import public_name, without_paths
from dpllm.statement.run_files import PlanRecord, RunRecord, read_plan, read_run

STATES = ("running", "completed", "interrupted")
LEDGER = "dpllm-ledger.prom"
INTERVAL = 5e-3  # of PLD's discretisation: ten times faster than the stated epsilon's, and larger rather than smaller

Json = dict[str, Any]


def _gauge(name: str, meaning: str, default: float | None = None) -> Any:
    return field(default=default, metadata={"gauge": (name, meaning)})


@dataclass(frozen=True)
class AuditFigures:
    """What a published audit found, as metrics show it."""

    auc: float | None = _gauge(
        "dp_membership_inference_auc",
        "Area under the ROC curve of the audit's primary attack on planted canaries.",
    )
    auc_lower: float | None = _gauge(
        "dp_membership_inference_auc_lower", "Lower end of that area's 95 % confidence interval."
    )
    auc_upper: float | None = _gauge(
        "dp_membership_inference_auc_upper", "Upper end of that area's 95 % confidence interval."
    )
    auc_allowed: float | None = _gauge(
        "dp_membership_inference_auc_allowed", "The largest area that the stated guarantee allows any attack."
    )
    epsilon_lower_bound: float | None = _gauge(
        "dp_audit_epsilon_lower_bound",
        "Epsilon that the audit shows to be exceeded or met, with the confidence that the recipe fixed.",
    )


@dataclass(frozen=True)
class RunValues:
    """What metrics know of a run: public and released values only, but for the last two."""

    model: str  # what is being trained: the run directory's last part
    base_model: str  # public name of the base model
    dataset: str  # the account in the ledger that is charged, or the public name of the training data
    run_id: str  # the reservation in the ledger; empty for a run without differential privacy
    state: str  # one of STATES
    epsilon_consumed: float | None = _gauge(
        "dp_training_epsilon_consumed", "Upper bound on the epsilon of the steps executed so far."
    )
    stated_epsilon: float | None = _gauge("dp_stated_epsilon", "Epsilon of the whole Plan, which the card states.")
    delta: float | None = _gauge("dp_stated_delta", "Delta at which that epsilon is stated.")
    noise_multiplier: float | None = _gauge(
        "dp_noise_multiplier", "Standard deviation of the noise over the clipping norm."
    )
    step: int = _gauge("dp_training_step", "Logical batches executed.", 0)
    steps_planned: int = _gauge("dp_training_steps_planned", "Logical batches planned.", 0)
    accuracy_delta: float | None = _gauge(
        "dp_training_accuracy_delta",
        "Next-token accuracy after training less before, on an evaluation set declared public.",
    )
    audited: AuditFigures | None = None
    # Un-noised, outside any guarantee: None, unless the recipe sets telemetry.private_metrics.
    private_loss: float | None = _gauge(
        "dp_training_private_loss",
        "Training loss of the last step without noise, in nats per token; outside the guarantee.",
    )
    private_clip_fraction: float | None = _gauge(
        "dp_gradient_clip_fraction",
        "Share of gradients longer than the clipping norm in the last step, without noise; outside the guarantee.",
    )


GAUGES = {one.name: one.metadata["gauge"] for kind in (RunValues, AuditFigures) for one in fields(kind) if one.metadata}
"""Field of RunValues or of its audit -> name and meaning of its metric: the list of what leaves."""


def gauge(name: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> list[Metric]:
    """One metric of samples with the same labels each; none where there is no sample."""
    family: GaugeMetricFamily | None = None
    for labels, value in samples:
        family = family or GaugeMetricFamily(name, meaning, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)
    return [family] if family else []


def run_families(run: RunValues) -> list[Metric]:
    """The metrics of a run; one that has no value is left out."""
    model = {"model": run.model}
    names = {**model, "dataset": run.dataset, "run_id": run.run_id}
    states = [({**model, "state": name}, float(name == run.state)) for name in STATES]
    families = [
        *gauge(
            "dp_training_info",
            "Always 1; its labels join a run's names.",
            [({**names, "base_model": run.base_model}, 1)],
        ),
        *gauge("dp_training_state", "1 for the state that the run is in, 0 for the others.", states),
    ]
    known = vars(run) | (vars(run.audited) if run.audited else {})
    for key, (metric, meaning) in GAUGES.items():
        value = known.get(key)
        if value is not None and math.isfinite(value):
            families += gauge(metric, meaning, [(names if key == "epsilon_consumed" else model, value)])
    return families


# --- from the record of a run ----------------------------------------------------------------------------------------


def of_record(
    run: RunPaths, config: RunConfig, *, promised: bool | None = None, audited: AuditFigures | None = None
) -> RunValues:
    """The metrics of a run by its record, with one attack of the published audit if it is named.

    ``promised`` says whether the run states an epsilon at all; None: what run.json says, once it has ended.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    record = read_run(run)
    plan = read_plan(run) if record.epsilon_spent is not None else None
    promised = plan is not None and (record.guarantee.holds if promised is None else promised)
    ledger, public = record.ledger, record.metrics.public
    before, after = public.get("eval_accuracy_before"), public.get("eval_accuracy_after")
    shown = promised or config.data.public
    values = RunValues(
        model=run.root.resolve().name,
        base_model=record.model.name_or_path,
        dataset=label(ledger.dataset) if ledger else public_name(config.data.train),
        run_id=str(ledger.entry) if ledger else "",
        state=record.status,
        step=record.steps_taken or 0,
        steps_planned=record.steps_planned,
        noise_multiplier=plan.noise_multiplier if plan else None,
        accuracy_delta=after - before if shown and before is not None and after is not None else None,
        audited=audited,
        **(_last_step(run, clips=plan is not None) if config.telemetry.private_metrics else {}),
    )
    if plan is None or not promised:
        return values
    return replace(
        values,
        epsilon_consumed=_consumed(plan, record),
        stated_epsilon=plan.epsilon,
        delta=plan.delta,
    )


def unnoised(step: Mapping[str, Any], *, clips: bool) -> Json:
    """Loss and share of clipped gradients, if the run clips any, of one line of metrics.jsonl: private."""
    share = step["clipped"] / step["units"] if clips and step["units"] else None
    return {"private_loss": step["loss"], "private_clip_fraction": share}


def _consumed(plan: PlanRecord, record: RunRecord) -> float:
    """The epsilon of the steps that were executed; of a run whose process was killed, all of it."""
    if record.steps_taken is None or record.status == "completed":
        return plan.epsilon
    event = replace(plan.event, count=record.steps_taken)
    return min(plan.epsilon, accounting.epsilon(event, plan.delta, plan.neighbouring_relation, interval=INTERVAL))


def _last_step(run: RunPaths, *, clips: bool) -> Json:
    """The un-noised figures of the last step."""
    steps = [line for line in private_lines(run) if "units" in line]
    return unnoised(steps[-1], clips=clips) if steps else {}


def private_lines(run: RunPaths) -> Iterator[Json]:
    """What a run wrote down of its steps and evaluations, un-noised; a line that a killed process left unfinished is none."""
    for line in run.metrics.read_text(encoding="utf-8").splitlines() if run.metrics.exists() else []:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


# --- a ledger --------------------------------------------------------------------------------------------------------


def label(dataset: str) -> str:
    """A dataset's name as metrics show it: of an absolute path the last part, with a hash that tells it from others."""
    short = str(without_paths(dataset))
    return short if short == dataset else f"{short}-{_short_hash(dataset)}"


def ledger_families(ledger: Ledger) -> tuple[list[Metric], list[str]]:
    """What belongs to no dataset: the chain, which is verified, and refusals by their reason.

    Returns:
        The metrics, and the accounts of which more is known: none where the chain is broken.

    Raises:
        ConfigError: The ledger cannot be read.
    """
    sound = not ledger.verify()
    families = [
        *gauge("dp_ledger_entries", "Links of the ledger's hash chain.", [({}, ledger.head()["count"])]),
        *gauge("dp_ledger_chain_valid", "1 while the chain holds, 0 once it contradicts itself.", [({}, sound)]),
    ]
    refused: Counter[str] = Counter()
    for (_, reason), number in ledger.refusals().items():
        refused[reason] += number
    if refused:
        counter = CounterMetricFamily("dp_ledger_refused", "Runs that were refused, by reason.", labels=("reason",))
        for reason, number in sorted(refused.items()):
            counter.add_metric((reason,), number)
        families.append(counter)
    return families, ledger.datasets() if sound else []


def dataset_families(ledger: Ledger, names: Iterable[str]) -> list[Metric]:
    """Budget, reservations and signs of life of some accounts.

    Raises:
        Refused: The chain is broken.
        ConfigError: The ledger cannot be read.
    """
    budget, used, reservations, heartbeat = [], [], [], []
    for name in names:
        known, dataset, runs = ledger.budget(name), {"dataset": label(name)}, ledger.runs(name)
        if known is not None:
            budget.append((dataset, known.epsilon))
            share = ledger.used(name)
            used.append((dataset, 1.0 if share is None else share))
        states = Counter(run.state for run in runs)
        reservations += [({**dataset, "state": state}, states[state]) for state in get_args(State)]
        alive = [(run.reservation.entry, run) for run in runs if run.state in OPEN]
        heartbeat += [({**dataset, "run_id": entry, "state": run.state}, run.heartbeat) for entry, run in alive]
    return [
        *gauge("dp_training_budget", "Epsilon that all runs on the dataset together may spend.", budget),
        *gauge(
            "dp_training_budget_used",
            "Share of the budget that is used; 1 where a final run has closed it.",
            used,
        ),
        *gauge("dp_ledger_reservations", "Reservations in each state.", reservations),
        *gauge(
            "dp_reservation_heartbeat_timestamp_seconds",
            "When a reservation that is not finished was made, or last charged a step, in seconds since the epoch.",
            heartbeat,
        ),
    ]


def served_families(ledger: Ledger, names: Iterable[str], served: Iterable[Path]) -> list[Metric]:
    """Whether the accounts ``names`` hold the run of each model that is ``served``, by the privacy.json in its directory.

    It says 0 of a model without such a statement, and of all of them where the chain is broken and no account is known.

    Raises:
        ConfigError: A directory is not there, or its privacy.json is damaged.
    """
    known = {(name, run.reservation.entry) for name in names for run in ledger.runs(name)}
    found: dict[str, bool] = {}
    for path in map(Path.resolve, served):
        if not path.is_dir():
            raise ConfigError(
                f"--served {path}: no such directory. Type the directory of the served model, as dpllm train or dpllm merge "
                "wrote it."
            )
        stated = (read_json(path / BLOCK) if (path / BLOCK).exists() else {}).get("composed") or {}
        model = path.parent.name if path.name == "export" else path.name
        # Of several models of one name, one without an entry is what somebody has to know of.
        found[model] = found.get(model, True) and (stated.get("dataset"), stated.get("entry")) in known
    meaning = "1 while the ledger holds the run that a served model's privacy.json names, else 0."
    return gauge("dp_served_model_ledger_entry", meaning, [({"model": model}, found[model]) for model in found])


# --- text and files --------------------------------------------------------------------------------------------------


class Families(Collector):
    """Metric families as a collector; they are replaced as a whole, so that another thread never reads half of them."""

    def __init__(self, families: Iterable[Metric] = ()) -> None:
        """Shows ``families``."""
        self.now = tuple(families)

    def collect(self) -> Iterable[Metric]:
        """What prometheus-client asks for."""
        return self.now


def exposition(families: Iterable[Metric]) -> bytes:
    """Families as text in Prometheus' exposition format."""
    return generate_latest(Families(families))


def write(path: Path, families: Iterable[Metric]) -> None:
    """Replaces a file as a whole, readable by everyone: the collector runs as another user.

    Raises:
        OSError: The disk refuses.
    """
    write_to_textfile(str(path), Families(families))
    path.chmod(0o644)


def file_of(directory: Path, kind: Literal["run", "dataset"], name: str) -> Path:
    """The file of a run, or of a dataset's account; another name has another file.

    What has the same name shares a file, because its series are the same; the latest counts.
    """
    name = label(name) if kind == "dataset" else name
    return directory / f"dpllm-{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[:80]}-{_short_hash(name)}.prom"


def _short_hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]
