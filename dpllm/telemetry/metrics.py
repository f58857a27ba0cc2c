"""One run as Prometheus metrics: their names, labels and meaning.

Comes in: ``RunValues``. Goes out: metric families. Whatever a metric can show of a run is a field of that value, so this
file is the list of what leaves. Must not open any file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

State = Literal["running", "completed", "interrupted"]
STATES: tuple[State, ...] = ("running", "completed", "interrupted")


@dataclass(frozen=True)
class AuditValues:
    """What an audit published; see the fields of audit.json."""

    auc: float | None
    auc_lower: float | None
    auc_upper: float | None
    auc_allowed: float | None
    epsilon_lower_bound: float | None


@dataclass(frozen=True)
class PrivateValues:
    """Un-noised figures of the last step, outside any guarantee: loss in nats per token, share of clipped gradients."""

    loss: float | None
    clip_fraction: float | None


@dataclass(frozen=True)
class RunValues:
    """What metrics know of a run: public and released values only, but for the last field.

    Attributes:
        model: Name of what is being trained: the run directory's last part.
        base_model: Public name of the base model.
        dataset: The account in the ledger that is charged, or the public name of the training data.
        run_id: The reservation in the ledger; empty for a run without differential privacy.
        state: As run.json has it.
        step: Logical batches executed.
        steps_planned: Logical batches planned.
        epsilon_consumed: Upper bound for the steps executed; None without differential privacy.
        stated_epsilon: Of the whole Plan.
        delta: Of the whole Plan.
        noise_multiplier: Of the Plan.
        clip_fraction: The noised, accounted share of clipped gradients in the last step, in [0, 1]; None unless clipping
            adapts.
        accuracy_delta: Next-token accuracy after training less before, on a public evaluation set.
        audit: What the last published audit found.
        private: None, unless the recipe sets ``telemetry.private_metrics``.
    """

    model: str
    base_model: str
    dataset: str
    run_id: str
    state: State
    step: int
    steps_planned: int
    epsilon_consumed: float | None = None
    stated_epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    clip_fraction: float | None = None
    accuracy_delta: float | None = None
    audit: AuditValues | None = None
    private: PrivateValues | None = None


@dataclass(frozen=True)
class _Gauge:
    name: str
    labels: tuple[str, ...]
    meaning: str
    value: Callable[[RunValues], float | None]


def _audited(field: str) -> Callable[[RunValues], float | None]:
    def value(run: RunValues) -> float | None:
        found: float | None = getattr(run.audit, field) if run.audit else None
        return found

    return value


def _clipped(run: RunValues) -> float | None:
    if run.clip_fraction is None and run.private:
        return run.private.clip_fraction
    return run.clip_fraction


MODEL = ("model",)
RUN = ("model", "dataset", "run_id")
GAUGES = (
    _Gauge(
        "dp_training_epsilon_consumed",
        RUN,
        "Upper bound on the epsilon of the steps executed so far.",
        lambda run: run.epsilon_consumed,
    ),
    _Gauge("dp_stated_epsilon", MODEL, "Epsilon of the whole Plan, which the card states.", lambda r: r.stated_epsilon),
    _Gauge("dp_stated_delta", MODEL, "Delta at which that epsilon is stated.", lambda run: run.delta),
    _Gauge(
        "dp_noise_multiplier",
        MODEL,
        "Standard deviation of the noise over the clipping norm.",
        lambda run: run.noise_multiplier,
    ),
    _Gauge(
        "dp_gradient_clip_fraction",
        MODEL,
        "Share of gradients longer than the clipping norm in the last step: noised and accounted, with adaptive clipping; "
        "without noise only where the recipe allows private metrics.",
        _clipped,
    ),
    _Gauge("dp_training_step", MODEL, "Logical batches executed.", lambda run: run.step),
    _Gauge("dp_training_steps_planned", MODEL, "Logical batches planned.", lambda run: run.steps_planned),
    _Gauge(
        "dp_training_accuracy_delta",
        MODEL,
        "Next-token accuracy after training less before, on an evaluation set declared public.",
        lambda run: run.accuracy_delta,
    ),
    _Gauge(
        "dp_membership_inference_auc",
        MODEL,
        "Area under the ROC curve of the audit's primary attack on planted canaries.",
        _audited("auc"),
    ),
    _Gauge(
        "dp_membership_inference_auc_lower",
        MODEL,
        "Lower end of that area's 95 % confidence interval.",
        _audited("auc_lower"),
    ),
    _Gauge(
        "dp_membership_inference_auc_upper",
        MODEL,
        "Upper end of that area's 95 % confidence interval.",
        _audited("auc_upper"),
    ),
    _Gauge(
        "dp_membership_inference_auc_allowed",
        MODEL,
        "The largest area that the stated guarantee allows any attack.",
        _audited("auc_allowed"),
    ),
    _Gauge(
        "dp_audit_epsilon_lower_bound",
        MODEL,
        "Epsilon that the audit shows to be exceeded or met, with the confidence that the recipe fixed.",
        _audited("epsilon_lower_bound"),
    ),
    _Gauge(
        "dp_training_private_loss",
        MODEL,
        "Training loss of the last step without noise, in nats per token; outside the guarantee.",
        lambda run: run.private.loss if run.private else None,
    ),
)


def run_families(run: RunValues) -> list[Metric]:
    """The metrics of a run; one that has no value is left out."""
    known = {"model": run.model, "dataset": run.dataset, "run_id": run.run_id}
    info = GaugeMetricFamily(
        "dp_training_info",
        "Always 1; its labels join a run's names.",
        labels=("model", "base_model", "dataset", "run_id"),
    )
    info.add_metric((run.model, run.base_model, run.dataset, run.run_id), 1)
    state = GaugeMetricFamily(
        "dp_training_state", "1 for the state that the run is in, 0 for the others.", labels=("model", "state")
    )
    for name in STATES:
        state.add_metric((run.model, name), float(name == run.state))
    families: list[Metric] = [info, state]
    for gauge in GAUGES:
        value = gauge.value(run)
        if value is not None and math.isfinite(value):
            family = GaugeMetricFamily(gauge.name, gauge.meaning, labels=gauge.labels)
            family.add_metric([known[label] for label in gauge.labels], value)
            families.append(family)
    return families


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
    registry = CollectorRegistry()
    registry.register(Families(families))
    return generate_latest(registry)
