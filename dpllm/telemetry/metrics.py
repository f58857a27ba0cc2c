"""Runs and ledgers as Prometheus metrics: their names, labels and meaning, and the files that hold them.

Comes in: the record of a run, or an open ledger. Goes out: metric families, text, ``.prom`` files. ``GAUGES`` lists
everything that a metric can show of a run.

The node exporter's textfile collector rejects all files if two of them contain the same series, so there is one file for each
model's run and one for the ledger.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from prometheus_client import generate_latest, write_to_textfile
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dpllm.files import RunPaths
from dpllm.ledger import Ledger
from dpllm.ledger.values import OPEN, State
from dpllm.recipe.config import RunConfig
from dpllm.recipe.names import public_name, without_paths
from dpllm.statement.run_files import read_plan, read_run

STATES = ("running", "completed", "interrupted")
LEDGER = "dpllm-ledger.prom"
GAUGES = {
    "dp_training_epsilon_consumed": "Upper bound on the epsilon of the steps executed so far.",
    "dp_stated_epsilon": "Epsilon of the whole Plan, which the card states.",
    "dp_stated_delta": "Delta at which that epsilon is stated.",
    "dp_noise_multiplier": "Standard deviation of the noise over the clipping norm.",
    "dp_training_step": "Logical batches executed.",
    "dp_training_steps_planned": "Logical batches planned.",
    "dp_training_accuracy_delta": "Next-token accuracy after training less before, on an evaluation set declared public.",
    # From the published audit.
    "dp_membership_inference_auc": "Area under the ROC curve of the audit's primary attack on planted canaries.",
    "dp_membership_inference_auc_lower": "Lower end of that area's 95 % confidence interval.",
    "dp_membership_inference_auc_upper": "Upper end of that area's 95 % confidence interval.",
    "dp_membership_inference_auc_allowed": "The largest area that the stated guarantee allows any attack.",
    "dp_audit_epsilon_lower_bound": "Epsilon that the audit shows to be exceeded or met, with the confidence that the recipe "
    "fixed.",
    # Without noise: only if the recipe sets telemetry.private_metrics.
    "dp_training_private_loss": "Training loss of the last step without noise, in nats per token; outside the guarantee.",
    "dp_gradient_clip_fraction": "Share of gradients longer than the clipping norm in the last step, without noise; outside "
    "the guarantee.",
}
"""What a run can show: name -> meaning."""

Figures = Mapping[str, float | None]
"""Names of ``GAUGES`` -> values; those that are None are not shown."""


@dataclass(frozen=True)
class ShownRun:
    """The values of a run that metrics show: public, released, and the ones without noise in ``GAUGES``."""

    names: Mapping[str, str]  # model, dataset (in the ledger, or its public name), run_id (the reservation, or empty)
    base_model: str
    state: str  # one of STATES
    figures: Figures

    @property
    def model(self) -> str:
        """The last part of the run directory."""
        return self.names["model"]


def gauge(name: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
    """One metric from samples that all have the same label names."""
    family = Metric(name, meaning, "gauge")
    for labels, value in samples:
        family.add_sample(name, dict(labels), value)
    return family


def run_families(run: ShownRun) -> list[Metric]:
    """The metrics of a run, except those without a value."""
    states = [({"model": run.model, "state": name}, float(name == run.state)) for name in STATES]
    info = [({**run.names, "base_model": run.base_model}, 1.0)]
    families = [
        gauge("dp_training_info", "Always 1; its labels join a run's names.", info),
        gauge("dp_training_state", "1 for the state that the run is in, 0 for the others.", states),
    ]
    for name, value in run.figures.items():
        if value is not None and math.isfinite(value):
            labels = run.names if name == "dp_training_epsilon_consumed" else {"model": run.model}
            families.append(gauge(name, GAUGES[name], [(labels, value)]))
    return families


def of_record(run: RunPaths, config: RunConfig, *, promised: bool | None = None) -> ShownRun:
    """Reads the metrics of a run from its record.

    ``promised``: whether the run states an epsilon; None reads it from run.json, after the run has ended.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    record = read_run(run)
    plan = read_plan(run) if config.privacy.enabled else None
    promised = plan is not None and (record.guarantee.holds if promised is None else promised)
    ledger, public = record.ledger, record.metrics.public
    before, after = public.get("eval_accuracy_before"), public.get("eval_accuracy_after")
    figures: dict[str, float | None] = {
        "dp_noise_multiplier": plan.noise_multiplier if plan else None,
        "dp_training_step": record.steps_taken or 0,
        "dp_training_steps_planned": record.steps_planned,
    }
    if (promised or config.data.public) and before is not None and after is not None:
        figures["dp_training_accuracy_delta"] = after - before
    if plan and promised:
        figures["dp_training_epsilon_consumed"] = figures["dp_stated_epsilon"] = plan.epsilon
        figures["dp_stated_delta"] = plan.delta
    model = run.root.resolve().name
    dataset = label(ledger.dataset) if ledger else public_name(config.data.train)
    names = {"model": model, "dataset": dataset, "run_id": str(ledger.entry) if ledger else ""}
    return ShownRun(names, record.model.name_or_path, record.status, figures)


def label(dataset: str) -> str:
    """A dataset's name as metrics show it: for an absolute path, its last part and a hash that distinguishes it from others."""
    short = str(without_paths(dataset))
    return short if short == dataset else f"{short}-{_short_hash(dataset)}"


def ledger_families(ledger: Ledger) -> list[Metric]:
    """The state of a ledger's chain and the refusals by reason; the accounts too if the chain verifies.

    Raises:
        ConfigError: The ledger cannot be read.
    """
    sound = not ledger.verify()
    refused: Counter[str] = Counter()
    for (_, reason), number in ledger.refusals().items():
        refused[reason] += number
    counter = CounterMetricFamily("dp_ledger_refused", "Runs that were refused, by reason.", labels=("reason",))
    for reason, number in sorted(refused.items()):
        counter.add_metric((reason,), number)
    return [
        gauge("dp_ledger_entries", "Links of the ledger's hash chain.", [({}, ledger.head()["count"])]),
        gauge("dp_ledger_chain_valid", "1 while the chain holds, 0 once it contradicts itself.", [({}, sound)]),
        counter,
        *_account_families(ledger, ledger.datasets() if sound else []),
    ]


def _account_families(ledger: Ledger, names: Iterable[str]) -> list[Metric]:
    budget, used, reservations, heartbeat = [], [], [], []
    for name in names:
        account_budget, dataset, runs = ledger.budget(name), {"dataset": label(name)}, ledger.runs(name)
        if account_budget is not None:
            budget.append((dataset, account_budget.epsilon))
            used.append((dataset, 1.0 if (share := ledger.used(name)) is None else share))
        states = Counter(run.state for run in runs)
        reservations += [({**dataset, "state": state}, states[state]) for state in get_args(State)]
        unfinished = [(run.reservation.entry, run) for run in runs if run.state in OPEN]
        heartbeat += [({**dataset, "run_id": entry, "state": run.state}, run.heartbeat) for entry, run in unfinished]
    return [
        gauge("dp_training_budget", "Epsilon that all runs on the dataset together may spend.", budget),
        gauge("dp_training_budget_used", "Share of the budget that is used; 1 where a final run has closed it.", used),
        gauge("dp_ledger_reservations", "Reservations in each state.", reservations),
        gauge(
            "dp_reservation_heartbeat_timestamp_seconds",
            "When a reservation that is not finished was made, or last charged a step, in seconds since the epoch.",
            heartbeat,
        ),
    ]


class Families(Collector):
    """A collector of metric families, which are replaced all at once, so that no other thread reads a mixture."""

    def __init__(self, families: Iterable[Metric] = ()) -> None:
        """Shows ``families``."""
        self.now = tuple(families)

    def collect(self) -> Iterable[Metric]:
        """The families, for prometheus-client."""
        return self.now


def exposition(families: Iterable[Metric]) -> bytes:
    """Families as text in Prometheus' exposition format."""
    return generate_latest(Families(families))


def write(path: Path, families: Iterable[Metric]) -> None:
    """Replaces a file atomically and makes it readable by everyone, because the collector runs as another user.

    Raises:
        OSError: The file cannot be written.
    """
    write_to_textfile(str(path), Families(families))
    path.chmod(0o644)


def file_of(directory: str | Path, model: str) -> Path:
    """The file of a run. Runs of the same name share it because their series are the same; the latest one overwrites it."""
    return Path(directory) / f"dpllm-run-{re.sub(r'[^A-Za-z0-9._-]+', '_', model)[:80]}-{_short_hash(model)}.prom"


def _short_hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]
