"""From facts to the privacy statement: everything in it that follows from something else is derived here, and nowhere else.

Comes in: plan.json, run.json, the audit's part, released statistics, and what the recipe says; or facts about texts by inference.
Goes out: a ``PrivacyRecord``, or an ``Inference``. The card renders it; ``dpllm verify`` reads the facts back from a published
statement, derives the rest again and compares. Pure: must not read a file, a clock or ``private/``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from scipy import optimize
from scipy.special import log_ndtr, ndtr

from dpllm.privacy import accounting, events
from dpllm.privacy.accounting import compose, finite, stated
from dpllm.privacy.events import step_of
from dpllm.privacy.privacy_loss import attacker_limits_of
from dpllm.statement import formatting, lineage, privacy_record
from dpllm.statement.audit import AuditRecord
from dpllm.statement.fields import (
    CRYPTOGRAPHIC,
    DEFINITION,
    Composed,
    Generator,
    Json,
    Lattice,
    Sampling,
    Terms,
)
from dpllm.statement.inference import Inference, Promised, whole
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.released import BesideRun, Statistics
from dpllm.statement.run_files import LedgerRecord, PlanRecord, RunRecord

ACCOUNTANT = "dp-accounting PLD"
_OF_THE_PLAN = ("accountants", "limits", "curve")
"""Other words for the planned epsilon."""


def state(
    recipe: Json,
    record: RunRecord,
    terms: Terms | None,
    reason: str | None,
    audit: AuditRecord | None,
    statistics: Statistics | None,
    files: Mapping[str, str],
) -> PrivacyRecord:
    """The statement that facts allow.

    Args:
        recipe: What a statement holds of it, in public words.
        record: What happened.
        terms: ``terms_of`` the Plan; None for a run without differential privacy.
        reason: Why there is no guarantee; None where there is one. The terms then stand under ``attempted`` and nowhere else.
        audit: Of these weights.
        statistics: What was released about the training data.
        files: SHA-256 of what is published, by path.

    Raises:
        NotAStatement: A fact is none that a statement may hold.
    """
    numbers = {} if terms is None else terms.to_json() if reason is None else {"attempted": terms.to_json()}
    lost = {"lost": record.steps_lost} if record.steps_lost else {}
    beside = beside_run(statistics, terms, reason is None) if statistics else None
    where_known = {
        "reason": reason,
        "labels": record.labels and record.labels.to_json(),
        "labels_before": [one.to_json() for one in record.labels_before] or None,
        "statistics": beside and beside.to_json(),
    }
    block = {
        "schema_version": privacy_record.SCHEMA_VERSION,
        "guarantee": reason is None,
        **numbers,
        **recipe,
        "steps": {"planned": record.steps_planned, "taken": record.steps_taken, **lost},
        "status": record.status,
        "composed": composed(record.ledger, record.delta).to_json() if record.ledger else None,
        "lineage": record.lineage.to_json() if record.lineage else None,
        "base_model": {"name": recipe["base_model"], "revision": record.model.commit, "covered": False},
        "deviations": record.deviations,
        "audit": audit.to_json() if audit else None,
        "software": record.versions,
        # No object and no null, which a statement has no field for.
        "hardware": {
            name: value
            for name, value in record.hardware.items()
            if isinstance(value, str | int | float)
            or (isinstance(value, list) and all(isinstance(one, str) for one in value))
        },
        "date": record.started_at[:10],
        "files": dict(sorted(files.items())),
        **{name: value for name, value in where_known.items() if value is not None},
    }
    return privacy_record.read(block)


def terms_of(
    plan: PlanRecord,
    *,
    optimizer: str,
    generator: Generator,
    lattice: Lattice | None,
    trade_off: list[list[float]] | None = None,
) -> Terms:
    """The numbers of the Plan: everything that is needed to compute epsilon again.

    Args:
        plan: What was promised.
        optimizer: What the noised sums were given to.
        generator: Of the noise.
        lattice: To which noise and contributions were rounded.
        trade_off: Of the event, see ``tradeoff_figure.trade_off``; None: left out.
    """
    left_out = {name for name in _OF_THE_PLAN if not getattr(plan, name)}
    coefficients = plan.coefficients
    found: Json = {
        "epsilon": plan.epsilon,
        "definition": DEFINITION,
        "holds_for": "run",
        "trust_model": "central",
        "mechanism": "dp-bandmf" if coefficients else "dp-sgd",
        "optimizer": optimizer,
        "sampling": Sampling.pick(
            plan.to_json(),
            scheme="cyclic_poisson" if coefficients else "poisson",
            of=plan.sampling,
            implemented_as_accounted=True,
        ),
        "without_amplification": None,
        "randomness": {"generator": generator, "secure_noise": generator == CRYPTOGRAPHIC, "lattice": lattice},
    }
    if trade_off:
        found["trade_off"] = trade_off
    if coefficients:
        rate = step_of(plan.event).probability
        found["banded"] = {"bands": len(coefficients), "coefficients": coefficients, "group_rate": rate}
    terms = Terms.pick({name: value for name, value in plan.to_json().items() if name not in left_out}, **found)
    return terms.model_copy(update={"without_amplification": without_amplification(terms, plan.num_steps)})


def without_amplification(terms: Terms, num_steps: int) -> float | None:
    """Epsilon of the same run if its batches had come from shuffling: one Gaussian release an epoch, no credit for sampling.

    Args:
        terms: What is promised.
        num_steps: For which.

    Returns:
        Rounded up to four digits; None where it is 10,000 or more, or the noise is banded: shuffled anew in each epoch, a unit
        would come back before the noise that hid it is used up.

    Guarantee:
        An upper bound for the zero-out relation, if the place of a unit in the order stays when its data are replaced by
        nothing. A unit of up to k rows that are drawn one by one is taken as one release of sensitivity k C.

    References:
        Dong, Roth and Su 2022, "Gaussian Differential Privacy", corollary 3.3 (Gaussian releases add up to one).
    """
    if terms.banded is not None:
        return None
    sampling = terms.sampling
    epochs = math.ceil(Fraction(num_steps * sampling.expected_batch_size, sampling.dataset_size))
    try:
        value = gaussian_epsilon(terms.group_size * math.sqrt(epochs) / terms.noise_multiplier, terms.delta)
    except (ArithmeticError, ValueError):  # hardly any noise
        return None
    return float(formatting.bound(value * (1 + 1e-9)))  # more than the error of its root


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of N(mu, 1) against N(0, 1) at delta in (0, 1).

    References:
        Balle and Wang 2018, "Improving the Gaussian Mechanism for Differential Privacy", theorem 8.
    """

    def excess(epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) - delta)

    return float(optimize.brentq(excess, 0.0, 1e4, xtol=1e-12)) if mu > 0 and excess(0.0) > 0 else 0.0


def composed(ledger: LedgerRecord, delta: float | None) -> Composed:
    """The total over all runs on the dataset, as the ledger had it after this one, at its budget's delta or the run's."""
    budget = ledger.budget
    return Composed.pick(
        ledger.to_json(),
        delta=budget.delta if budget else delta,
        entries=ledger.head.count,
        head=ledger.head.hash,
        group=ledger.group,
    )


def beside_run(released: Statistics, terms: Promised | None, guarantee: bool) -> BesideRun:
    """What was released about the training data, and what it comes to together with the run."""
    with_run = None
    if terms is not None and guarantee:
        event = compose([terms.event, released.event()])
        with_run = finite(stated(event, terms.delta, terms.neighbouring_relation)[0])
    return BesideRun.pick(released.to_json(), with_run=with_run)


def not_covered(unit: str, relation: str) -> tuple[str, ...]:
    """What the guarantee of texts by inference is never about."""
    lines = formatting.template("inference_not_covered.txt.j2").render(
        unit=unit, neighbouring_relation=relation, visible=formatting.visible
    )
    return tuple(lines.strip().splitlines())


def inferred(facts: Json, released: Statistics | None) -> Inference:
    """The record of texts that were written by inference; epsilon and all that follows from the event is computed here.

    Args:
        facts: Fields of ``Inference``: JSON values, events or records. Those that are derived, ``schema_version`` and, before the
            rows are written, ``files`` may be missing; without ``not_covered`` it has what always holds.
        released: The statistics whose shares were asked for; None without control.

    Raises:
        NotAStatement: A fact is none that a record may hold.
        Refused: No finite epsilon can be stated.
    """
    event, delta, relation = facts["event"], facts["delta"], facts["neighbouring_relation"]
    event = event if isinstance(event, events.Event) else events.read(event)
    epsilon, _ = stated(event, delta, relation)
    record = Inference.pick(
        {
            "not_covered": [*not_covered(facts["unit"], relation), *lineage.deviations(facts["lineage"])],
            "files": {},
            **facts,
        },
        schema_version=1,
        epsilon=epsilon,
        accountant={**accounting.versions(), "name": ACCOUNTANT, "interval": accounting.FINE_INTERVAL},
        cross_check=accounting.cross_check(event, delta, relation, epsilon),
        limits=attacker_limits_of(whole(event, released), relation),
        statistics=None,
    )
    return record if released is None else record.model_copy(update={"statistics": beside_run(released, record, True)})
