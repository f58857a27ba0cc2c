"""The audit of the mechanism: does the engine do what the Plan says, measured on what it releases?

Comes in: a recipe, and the Plan that was made of it. Goes out: a ``MechanismReport`` with a verdict, in a minute, before a
day of training is spent. Reads no weights, no rows of the data and no ledger.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dpllm.auditing.bounds import epsilon_lower_bound
from dpllm.auditing.mechanism_report import ALPHA, MechanismReport, verdict
from dpllm.errors import ConfigError
from dpllm.lab import releases
from dpllm.privacy import accounting, events
from dpllm.privacy.adaptive import AdaptiveClipping
from dpllm.privacy.plan import Plan, Schedule
from dpllm.recipe.config import RunConfig

if TYPE_CHECKING:
    from rich.table import Table


CANARIES = 1000
ROWS = 200  # of a step, beyond which the default takes fewer canaries
FEWEST_CANARIES = 300


def audit_mechanism(
    config: RunConfig,
    *,
    plan: Plan | None = None,
    num_units: int | None = None,
    steps: int = 300,
    canaries: int | None = None,
    pairs: int = 8,
    entropy: int | Sequence[int] | None = None,
) -> MechanismReport:
    """Runs the real engine on a model made to be watched, and tests what it releases against the Plan.

    The clipping function, C, q, sigma, the divisor, the generators and grad_sample_mode are the recipe's. The model, its
    data and the number of steps are not: canaries are units whose gradient reaches coordinates of their own, so that
    each can be seen in what is released. What is checked is the engine and the numbers in the Plan, not the weights.

    Guarantee:
        If sampling, clipping, noise and divisor are what the Plan says, ``falsified`` is said with probability at most
        ``ALPHA``, in approximation where a statistic's distribution is one: half of ALPHA is the bound's, the other half is
        divided by the number of tests. ``consistent`` shows that no test failed and proves nothing.

    Args:
        config: A recipe with ``privacy.enabled``; ``audit.guesses``, all canaries and half of them are the grid of the bound.
        plan: The promise to test; None: the one that the recipe makes.
        num_units: Public number of what is sampled, without canaries, to make the Plan from; None: declared in the recipe,
            or counted from the data, as ``dpllm plan`` does.
        steps: How many steps to run, >= 1.
        canaries: M; None: 1000, and fewer, down to 300, where large batches would take long.
        pairs: Neighbouring batches to replay, >= 1.
        entropy: Seeds coins, sampling and noise, for tests; None: the operating system.

    Raises:
        ConfigError: The recipe makes no promise, or a number is out of range.
        Refused: The Plan cannot be made, or the engine refuses to run.

    References:
        Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning (gradient canaries); Steinke, Nasr and
        Jagielski 2023 (the bound); Cebere et al. 2026, arXiv 2602.17454 (record and replay).
    """
    from dpllm.lab import probe
    from dpllm.lab.replay import replay

    if not config.privacy.enabled:
        raise ConfigError(
            "privacy.enabled is false, so that there is no mechanism to audit. Audit a recipe that promises something, "
            "or set privacy.enabled: true."
        )
    if steps < 1 or pairs < 1 or (canaries is not None and canaries < 2):
        raise ConfigError(
            f"steps {steps}, canaries {canaries} and pairs {pairs}: an audit of nothing finds nothing. "
            "Use 1 step, 2 canaries and 1 pair at least; the defaults take a minute."
        )
    plan = plan or recipe_plan(config, num_units)
    rate = plan.schedule.sampling_rate
    canaries = canaries or max(FEWEST_CANARIES, min(CANARIES, round(ROWS / rate)))
    generator = np.random.default_rng(entropy)
    with _one_thread():
        seen = probe.observe(config, plan, steps=steps, canaries=canaries, generator=generator)
        found = replay(config, plan, pairs=pairs, generator=generator)
    tests = releases.release_tests(seen, rate)
    level = ALPHA / 2 / len(tests)
    promised = min(steps, plan.schedule.num_steps)
    # The Plan's event states an epsilon for every delta; the bound's price, 2 M delta, must be small beside alpha.
    bound = epsilon_lower_bound(
        releases.canary_scores(seen, rate, promised),
        seen.inserted_M,
        delta=min(plan.delta, ALPHA / 1000 / canaries),
        alpha=ALPHA / 2,
        guesses=(*config.audit.guesses, canaries // 2, canaries),
    )
    # Of one thing that is sampled: a canary is one, also where the promise is for a unit of several.
    event = events.sampled_steps(plan.event["event"]["event"], rate, promised)
    report = MechanismReport(
        verdict="",
        reason="",
        steps=steps,
        promised_steps=promised,
        canaries=canaries,
        claimed=_claimed(plan),
        epsilon=accounting.epsilon(event, bound.delta, plan.neighbouring_relation),
        bound=bound,
        tests=tests,
        level=level,
        resolution=releases.resolution(seen, level),
        largest_contribution=max(seen.contributions),
        pairs=found,
    )
    word, reason = verdict(report)
    return replace(report, verdict=word, reason=reason)


def read_plan(values: Mapping[str, Any]) -> Plan:
    """The Plan that plan.json holds.

    Raises:
        ConfigError: It holds none.
    """
    try:
        schedule = Schedule(**{field.name: values[field.name] for field in fields(Schedule)})
        own = {field.name: values[field.name] for field in fields(Plan) if field.name in values}
        adaptive = AdaptiveClipping(**values["adaptive"]) if values.get("adaptive") else None
        return Plan(**{**own, "schedule": schedule, "adaptive": adaptive})
    except (KeyError, TypeError):
        raise ConfigError(
            "plan.json lacks fields of a Plan, so there is no promise to test. Restore the file, or audit the recipe instead."
        ) from None


def recipe_plan(config: RunConfig, num_units: int | None = None) -> Plan:
    """The promise that a recipe makes before any run.

    Args:
        config: With ``privacy.enabled``.
        num_units: See ``audit_mechanism``.

    Raises:
        Refused: The Plan cannot be made.
    """
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from dpllm.privacy.plan import make_plan
    from dpllm.run.promise import accounting_cache
    from dpllm.text.data import count_units

    if num_units is None:
        with TemporaryDirectory() as folder:
            num_units = config.data.public_size or count_units(config.data, Path(folder))
    return make_plan(config, num_units, accounting_cache())


def table(report: MechanismReport) -> Table:
    """A report for the terminal."""
    from rich.table import Table

    result = Table(
        *("what, on a small model that stands for yours", "found", "by the Plan", "p"),
        title=f"Audit of the mechanism: {report.verdict}",
        caption=f"{report.reason} A test fails below p = {report.level:.1g}.",
    )
    for test in report.tests:
        mark = "" if test.p_value > report.level else " !"
        result.add_row(test.name, f"{test.found:.4g}", f"{test.promised:.4g}", f"{test.p_value:.2g}{mark}")
    result.add_row("largest contribution of a unit", f"{report.largest_contribution:.7g} C", "at most 1 C", "exact")
    for label, several in (("one row", False), ("several rows", True)):
        of_kind = [pair.sum_difference for pair in report.pairs if (pair.rows > 1) == several]
        if of_kind:
            name = f"neighbours, a unit of {label} ({len(of_kind)} pair{'s' * (len(of_kind) != 1)})"
            result.add_row(name, f"{max(of_kind):.7g} C", "at most 1 C", "exact")
    shown = f"{report.epsilon:.3g} stated at delta {report.bound.delta:.1g}; a perfect attack shows {report.bound.ceiling:.3g}"
    result.add_row(f"epsilon of {report.promised_steps} steps, lower bound", f"{report.bound.value:.3g}", shown, "")
    return result


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, many times so where cores are shared."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _claimed(plan: Plan) -> dict[str, Any]:
    schedule = plan.schedule
    return {
        "epsilon": plan.epsilon if math.isfinite(plan.epsilon) else None,
        "delta": plan.delta,
        "num_steps": schedule.num_steps,
        "sampling_rate": schedule.sampling_rate,
        "noise_multiplier": plan.noise_multiplier,
        "clipping": plan.clipping,
        "max_grad_norm": plan.max_grad_norm,
        "expected_batch_size": schedule.expected_batch_size,
    }
