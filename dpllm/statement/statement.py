"""A guarantee in prose, with everything that it takes for granted.

Comes in: the numbers of ``dpllm epsilon`` as a JSON value. Goes out: paragraphs that a reader without the tool can
judge. Must not compute an epsilon, nor claim more than the theorem gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpllm.statement import formatting

RELATION = {
    "zero_out": "that differ in {who}, whose data are replaced by nothing while N stays the same",
    "add_or_remove_one": "of which one has {who} more than the other",
}
NOT_COVERED = (
    "It covers the trained parameters and every checkpoint of this run, and nothing else: not the data of the base model, not "
    "evaluation data, not un-noised figures such as losses, not the choice of hyper-parameters by looking at other "
    "runs, not further runs on the same data, and not what many {units} have in common. It is a statement about real numbers; "
    "floating-point noise and timing are outside it."
)


def statement(answer: Mapping[str, Any]) -> str:
    """The guarantee of one run of DP-SGD in words.

    Args:
        answer: what ``dpllm epsilon --json`` prints: ``epsilon``, ``delta``, ``accountant``, ``relation``, ``dataset_size``,
            ``batch_size``, ``sampling_rate``, ``num_steps``, ``noise_multiplier``, ``group_size``, ``limits``, ``shuffled``.

    Returns:
        Paragraphs, separated by empty lines. Epsilons are rounded up.
    """
    if answer["epsilon"] is None:
        return (
            f"No finite epsilon can be certified at delta {answer['delta']:g}. With these numbers there is no guarantee to "
            "state: use more noise, fewer steps or a larger delta."
        )
    not_covered = NOT_COVERED.format(units="units" if answer["group_size"] == 1 else "groups")
    return "\n\n".join((_claim(answer), _attacker(answer), _assumptions(answer), _shuffled(answer), not_covered))


def up(value: float | None, digits: int = 4) -> str:
    """A bound rounded up to some significant digits, so that the text promises no more; "infinite" for None."""
    return "infinite" if value is None else formatting.bound(value, digits)


def _claim(answer: Mapping[str, Any]) -> str:
    size = answer["group_size"]
    who = "one unit" if size == 1 else f"up to {size} units together"
    pair = RELATION[answer["relation"]].format(who=who)
    sets = f"For any two sets of training data {pair}"
    epsilon, delta = up(answer["epsilon"]), up(answer["delta"], 6)
    return (
        f"DP-SGD on N = {answer['dataset_size']} units, with {answer['batch_size']} expected in a batch (sampling rate "
        f"{answer['sampling_rate']:.6g}), {answer['num_steps']} steps and noise multiplier {answer['noise_multiplier']:g}, is "
        f"({epsilon}, {delta})-differentially private by {answer['accountant'].upper()} accounting. {sets}, and any "
        f"set of trained models, the probability of a model in the set is at most e^{epsilon} times as large with the one as "
        f"with the other, plus {delta}, whichever of the two is the one."
    )


def _attacker(answer: Mapping[str, Any]) -> str:
    limits = answer["limits"]
    who = "a unit" if answer["group_size"] == 1 else "such a group"
    return (
        f"So whoever tests from the model whether {who} was in the data, knowing everything else, finds at most "
        f"{up(100 * limits['tpr_at_fpr_0.001'], 3)}% of those who were, if wrong about 0.1% of those who were not; at most "
        f"{up(100 * limits['tpr_at_fpr_0.01'], 3)}% if wrong about 1%; and the area under the ROC curve is at most "
        f"{up(limits['auc'])} (0.5 is guessing)."
    )


def _assumptions(answer: Mapping[str, Any]) -> str:
    unit = "A unit is what is sampled and clipped as a whole: a row, or all rows of a person if they are drawn together"
    if answer["group_size"] > 1:
        unit += f". The guarantee is for {answer['group_size']} of them together, such as the rows of one person"
    public = "N and the sampling rate are public."
    if answer["relation"] == "add_or_remove_one":
        public = (
            "N is a number declared in advance; it and the sampling rate are public and do not follow from the data."
        )
    return (
        f"This takes for granted: {unit}. In each step each unit joins by its own coin, with the sampling rate as probability "
        "and a fresh batch each time (Poisson sampling). Each unit's gradient is clipped to norm C, Gaussian noise of "
        f"standard deviation {answer['noise_multiplier']:g} C is added to each coordinate of the sum, also of an empty one, "
        f"and the sum is divided by a constant. {public}"
    )


def _shuffled(answer: Mapping[str, Any]) -> str:
    shuffled = answer["shuffled"]
    return (
        "If batches come from shuffling instead, as most data loaders do, this figure does not hold. What then can be stated "
        f"is one Gaussian release an epoch, without credit for sampling: epsilon {up(shuffled['epsilon'])} for "
        f"{shuffled['epochs']} {'epoch' if shuffled['epochs'] == 1 else 'epochs'} at the same delta, "
        "if the data of a unit are replaced by nothing and its place in the order stays."
    )
