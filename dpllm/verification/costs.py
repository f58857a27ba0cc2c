"""What accountants say today about a stored event, and how far a statement may lie from it.

Comes in: events and terms of a stranger. Goes out: numbers, which stated fields differ from them, and which ones nobody can
compute. Opacus is not asked: it would import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dpllm.card.inference import Inference
from dpllm.privacy import accounting
from dpllm.privacy.accounting import Relation
from dpllm.privacy.events import Event
from dpllm.privacy.parts import Parts, parts_of
from dpllm.privacy.plan import Plan
from dpllm.verification.values import TOLERANCE, Difference, Wrong, differences, listed

Promised = Plan | Inference
"""What states an epsilon of an event."""
LARGE = 500.0
"""Epsilon by RDP beyond which PLD has a coarser grid: such an epsilon promises nothing, and would take gigabytes."""
COARSE = 2e-2
"""How far PLD on a coarser grid may lie above."""
MOST_PARTS, MOST_STEPS, LEAST_NOISE = 4, 1_000_000, 0.01
MOST_SETTINGS = 16  # of a choice among runs
MAGNIFIED = 1e-5
"""Relative, where the last bits are magnified: curves fitted to scores, and limits that read deltas down to 1e-10. Processors
round the accountant's Fourier transform differently: on another one gdp_mu moved by 1.2e-6, and epsilon at delta 1e-8 by 1e-8."""
OF_SUMMARY = 1e-3
"""Relative, of gdp_mu alone: near deltas of 1e-10 the transform's noise is most of it, and another processor moved it by 5e-4."""
OTHER_VERSION, OTHER_RDP = 1e-3, 1e-2
"""Relative; how far PLD of another version, and RDP, which has other orders there, may lie from this one."""
TOLERANCES: tuple[tuple[str, float, float], ...] = (
    (r"(curve|trade_off)\[\d+\]\[0\]", 0.0, 0.0),  # where curves are stated is the same in every version
    (r"limits\.gdp_mu", OF_SUMMARY, OTHER_RDP),
    (r"(limits|curve)\b.*", MAGNIFIED, OTHER_RDP),
    (r"trade_off\b.*", 0.0, OTHER_RDP),  # rounded up to four digits
    (r"(accountants|cross_check)\b.*", TOLERANCE, OTHER_RDP),
    (r"epsilon|composed\.epsilon|statistics\.(epsilon|with_run)", TOLERANCE, OTHER_VERSION),
    (r"ledger\.budget\b.*", 0.0, 0.0),
    (r"ledger\b.*", TOLERANCE, OTHER_VERSION),
    (r"randomness\.lattice\b.*", 1e-12, 1e-12),
    (r".*", 0.0, 0.0),
)
"""Field -> relative tolerance where the accountant's version is this one, and where it is another; the first that fits."""
ASSERTED = {
    "training": (
        "optimizer clipping max_grad_norm neighbouring_relation randomness coefficients target_epsilon status "
        "steps.taken steps.lost",
        "the author's word that these steps ran with this sampler, this clipping and noise from the operating system",
    ),
    "data": (
        "unit dataset data_public expected_batch_size dataset_size max_examples_per_unit",
        "the author's word on the training data and on what a unit is; of N and batch, only the ratio enters epsilon",
    ),
    "circumstances": (
        "base_model software hardware date recipe_digest accountant.version cross_check.version deviations",
        "the author's word on where, when, from what and with which versions it ran",
    ),
    "words": ("not_covered tuning contact template", "free text, which cannot be computed"),
    "deployment": (
        "deployment",
        "the author's word on who publishes this, for what, and who decided on epsilon and why",
    ),
}
"""Name of a line -> fields of a statement that nobody can compute from what is published, and what they say."""
OF_ROWS = "Restore inference.json from where the rows were published, or write them anew."
OF_RUN = "Restore privacy.json from where the model was published, or write the card again: dpllm card RUN."


def bounded(event: Event) -> frozenset[str]:
    """Who knows an event, which can be computed in seconds.

    Raises:
        Wrong: It has more different parts than a run can have, more steps, or less noise.
        ConfigError: It is malformed.
    """
    whole = parts_of(event)
    runs = [option for best in whole.selected for option in best.options]
    many = len(runs) > MOST_SETTINGS
    many |= any(len(_listed(one)) > MOST_PARTS for one in (whole, *runs))
    for part in [part for one in (whole, *runs) for part in _listed(one)]:
        group = getattr(part, "group_size", 1)  # whose steps are mixtures of many Gaussians
        many |= part.times > (MOST_STEPS if group == 1 else 10 * MOST_STEPS // group)
        many |= getattr(part, "noise_multiplier", LEAST_NOISE) < LEAST_NOISE
    if many:
        raise Wrong(
            f"the event has more than {MOST_PARTS} different parts, {MOST_SETTINGS} settings or {MOST_STEPS:,} steps, or noise "
            f"below {LEAST_NOISE}, which nothing by dpllm has. Take it from where it was published."
        )
    return accounting.accountants(event)


def _listed(parts: Parts) -> list[Any]:
    return [part for kind in parts for part in kind]


def pld(event: Event, delta: float, relation: Relation) -> tuple[float, bool]:
    """Epsilon by PLD, and whether on a coarser grid, which raises it.

    Raises:
        Wrong: See ``bounded``.
        ConfigError: The event is malformed, or PLD does not know it.
    """
    if "rdp" in bounded(event):
        most = accounting.epsilon(event, delta, relation, "rdp")
        if most > LARGE:
            interval = accounting.FINE_INTERVAL * most / LARGE
            return accounting.epsilon(event, delta, relation, interval=interval), True
    epsilon = accounting.epsilon(event, delta, relation)
    return epsilon, epsilon > LARGE


def pld_of(terms: Promised) -> tuple[float, bool]:
    """See ``pld``."""
    return pld(terms.event, terms.delta, terms.neighbouring_relation)


def rdp_of(terms: Promised) -> float | None:
    """By RDP, which knows its event; None: infinite."""
    return accounting.finite(accounting.epsilon(terms.event, terms.delta, terms.neighbouring_relation, "rdp"))


def together(events: list[Event], delta: float, relation: Relation) -> float:
    """The stated epsilon of several events together."""
    return accounting.epsilon(accounting.compose(events), delta, relation)


def by(terms: Promised) -> str:
    """Which other version of the accountant computed the statement; empty where it is this one."""
    stated, here = terms.accountant.version, accounting.versions()["version"]
    return "" if stated == here else f" (stated by dp-accounting {stated}, computed here by {here}, which may differ)"


def differing(stated: object, fresh: object, terms: Promised, where: str = "", least: float = 0.0) -> list[Difference]:
    """Fields of a statement, from ``where`` in it, that are not what is computed here.

    Args:
        stated: JSON value.
        fresh: The same as it is computed here.
        terms: Whose accountant's version says which column of ``TOLERANCES`` holds.
        where: Field that the value is of.
        least: Relative tolerance that all have at least.
    """
    other = bool(by(terms))

    def slack(field: str) -> float:
        same, of_other = next(slacks for pattern, *slacks in TOLERANCES if re.fullmatch(pattern, field))
        return max(least, of_other if other else same)

    return list(differences(stated, fresh, where, slack))


def again(terms: Promised | None) -> str:
    """What to do about a statement that is wrong, by its kind."""
    return OF_ROWS if isinstance(terms, Inference) else OF_RUN


def follows(stated: Mapping[str, Any], fresh: Mapping[str, Any], terms: Promised, least: float = 0.0) -> None:
    """Refuses, with ``Wrong``, fields of the terms that do not follow from their event; see ``differing``."""
    if wrong := differing({name: stated[name] for name in fresh}, fresh, terms, least=least):
        raise Wrong(f"{listed(wrong)} does not follow from the event{by(terms)}. {again(terms)}")
