"""Plans a choice among a secret number of runs: the settings, their noise and the cost, all fixed before the first run.

Comes in: a recipe whose ``privacy.epsilon`` is the cost of the whole choice, and lists of values for some of its keys. Goes out:
a ``Choice``, which ``dpllm plan --choose`` prints and ``comparison.choose`` trains. Draws and writes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from dpllm import ledger
from dpllm.errors import ConfigError
from dpllm.files import digest
from dpllm.ledger import RunRequest, dataset_policy
from dpllm.privacy import accounting, selection
from dpllm.privacy.events import RepeatAndSelect
from dpllm.privacy.plan import Mechanism, Plan, noise_multiplier_for
from dpllm.recipe.config import RunConfig, load_config
from dpllm.recipe.section import read_yaml
from dpllm.run.base_model import of_base
from dpllm.run.promise import mechanism_of
from dpllm.run.subject import Subject, read_subject

EXAMPLE = "--choose --mean-runs 10 --over 'train.learning_rate: [0.001, 0.002, 0.004]'"
DISTRIBUTION = "logarithmic"
MAX_SETTINGS = 16
FREE_KEYS = ("privacy.max_grad_norm", "privacy.clipping", "privacy.noise", "privacy.bands")
"""Keys in which settings may differ, besides those of train and adapter; the recipe sets all other keys."""
SCORE_KEYS = ("train.objective", "train.beta", "train.label_smoothing")
"""Keys in which settings may not differ, because they change the meaning of the score."""
COARSE_INTERVAL = 1e-3  # of the discretised privacy loss while searching for the noise: ten times faster
TOLERANCE = 2e-3  # fraction of the target by which the choice may cost less


@dataclass(frozen=True)
class Setting:
    """A setting that a run may draw."""

    values: dict[str, Any]  # key -> value
    config: RunConfig  # with the noise that makes the choice cost the recipe's epsilon
    mechanism: Mechanism  # of one run with this setting

    @property
    def epsilon(self) -> float:
        """The epsilon of one run if it were released alone."""
        run = self.mechanism
        return accounting.epsilon(run.event_of_steps, run.delta, run.neighbouring_relation)

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.values.items())


@dataclass(frozen=True)
class Choice:
    """Everything that is fixed before the first run."""

    config: RunConfig  # the recipe
    settings: tuple[Setting, ...]
    mean: float
    subject: Subject

    @cached_property
    def event(self) -> RepeatAndSelect:
        """The privacy event of releasing the best run."""
        runs = tuple(setting.mechanism.event_of_steps for setting in self.settings)
        return RepeatAndSelect(runs, self.mean, DISTRIBUTION)

    @cached_property
    def plan(self) -> Plan:
        """The Plan of the best run if it has the first setting; the cost of the choice is the same for every setting."""
        return Plan.of(self.settings[0].mechanism, self.event)

    @property
    def request(self) -> RunRequest:
        """The request to the dataset's ledger: one release."""
        return replace(RunRequest.of(self.plan, final=self.config.privacy.final), num_steps=1)

    def to_json(self) -> dict[str, Any]:
        """The figures of the choice before it is reserved."""
        return {
            "epsilon": self.plan.epsilon,
            "delta": self.plan.delta,
            "mean_runs": self.mean,
            "chance_of_one_run": selection.chance(1, self.mean, DISTRIBUTION),
            "most_runs_in_95_percent": selection.draw(self.mean, DISTRIBUTION, 0.95),
            "settings": [
                {
                    "values": setting.values,
                    "epsilon": setting.epsilon,
                    "noise_multiplier": setting.mechanism.noise_multiplier,
                    "bands": setting.mechanism.bands,
                }
                for setting in self.settings
            ],
        }

    def in_words(self) -> dict[str, str]:
        """The figures as rows of a table: label -> text."""
        figures, target = self.to_json(), self.config.privacy.epsilon
        rows = {
            "epsilon of the choice": f"{self.plan.epsilon:.4f} at delta {self.plan.delta:g} (target {target:g})",
            "number of runs": f"secret: {self.mean:g} in the mean, a single one in {figures['chance_of_one_run']:.0%} of all "
            f"choices, at most {figures['most_runs_in_95_percent']} in 95%",
        }
        for number, setting in enumerate(self.settings, 1):
            sigma, bands = setting.mechanism.noise_multiplier, setting.mechanism.bands
            banded = f" with {bands} bands" if bands > 1 else ""
            alone = f"noise multiplier {sigma:g}{banded}, epsilon {setting.epsilon:.4f} if it were the only run"
            rows[f"setting {number}"] = f"{setting}: {alone}"
        return rows


def plan_choice(recipe: str | Path, overrides: Mapping[str, Any], over: str, mean: float) -> Choice:
    """Reads the settings and calibrates their noise so that the choice among their runs costs the recipe's epsilon.

    Args:
        recipe: YAML file.
        overrides: Dotted key -> value.
        over: Lists of values by key, such as ``train.learning_rate: [0.001, 0.002]; train.batch_size: [256, 512]``; the settings
            are all combinations.
        mean: Expected number of runs, above 1.

    Raises:
        ConfigError: The recipe, the lists or the data cannot be used for a choice.
        Refused: A guard refuses the data or a setting.
    """
    if not 1 < mean <= selection.MAX_MEAN_RUNS:
        raise ConfigError(
            f"--mean-runs {mean:g}: is not above 1 and at most {selection.MAX_MEAN_RUNS:,}, so no number can be drawn. "
            f"Type {EXAMPLE}"
        )
    config, settings = load_config(recipe, overrides), parse_settings(over)
    configs = [load_config(recipe, {**overrides, **values}) for values in settings]
    _check_recipe(config, recipe)
    subject = read_subject(config)
    with ledger.open_ledger(config.privacy.ledger, create=False) or contextlib.nullcontext() as book:
        largest_delta = dataset_policy.terms(book, subject.dataset, config.privacy.derived_from)["largest_delta"]
    # The number of bands is chosen for this epsilon of one run, and then kept.
    guess = {**subject.resolved, "privacy.epsilon": 0.7 * config.privacy.epsilon}
    guesses = [mechanism_of(each.changed(guess), subject.num_units, largest_delta=largest_delta) for each in configs]
    runs = calibrated(guesses, mean, config.privacy.epsilon)
    chosen_from = (
        Setting(values, _with_noise(each, run), run) for values, each, run in zip(settings, configs, runs, strict=True)
    )
    return Choice(config, tuple(chosen_from), mean, subject)


def parse_settings(over: str) -> list[dict[str, Any]]:
    """All combinations of the lists in ``--over``, in the order of the lists.

    Raises:
        ConfigError: A list cannot be read, a key may not differ, or there are too few, too many or repeated combinations.
    """
    lists: dict[str, list[Any]] = {}
    for part in filter(str.strip, over.split(";")):
        value: Any = None
        with contextlib.suppress(yaml.YAMLError):
            value = read_yaml(part)
        if not (
            isinstance(value, dict) and len(value) == 1 and all(isinstance(values, list) for values in value.values())
        ):
            raise ConfigError(f"--over {part.strip()!r}: is not a key with a list of values. Type {EXAMPLE}")
        [(key, values)] = value.items()
        free = key in FREE_KEYS or str(key).startswith(("train.", "adapter."))
        if not free or key in SCORE_KEYS or key in lists:
            raise ConfigError(
                f"--over {key}: is named twice, or is no key in which runs may differ and be compared. Name keys of train and "
                f"adapter, and of privacy max_grad_norm, clipping, noise or bands, but not {', '.join(SCORE_KEYS)}."
            )
        lists[key] = values
    settings = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    different = {digest(setting) for setting in settings}
    if not 1 < len(settings) <= MAX_SETTINGS or len(different) < len(settings):
        raise ConfigError(
            f"--over {over!r}: makes {len(settings)} settings, {len(different)} of them different, and a choice has 2 to "
            f"{MAX_SETTINGS}, each once. Type {EXAMPLE}"
        )
    return settings


def _check_recipe(config: RunConfig, recipe: str | Path) -> None:
    """Refuses a recipe that does not allow a choice."""
    privacy, data = config.privacy, config.data
    private = data.eval is not None and not data.eval_public
    problems = (
        (
            not privacy.enabled,
            "privacy.enabled is false, so a choice costs nothing. Train each setting, and compare them",
        ),
        (
            privacy.noise_multiplier is not None,
            "privacy.noise_multiplier is set, and a choice calibrates it. Set it to null",
        ),
        (privacy.fit_budget, "privacy.fit_budget lowers the epsilon of one run, and a choice has one. Set it to false"),
        (
            privacy.insecure_seed is not None,
            "privacy.insecure_seed lets anybody repeat the runs, and count them. Remove it",
        ),
        (data.eval is None, "data.eval names no rows, by which runs could be compared. Name rows that are public"),
        (
            private,
            "data.eval is not declared public, and no guarantee covers a choice by the exact loss on private rows. Name rows "
            "that are public, and set data.eval_public: true",
        ),
        (
            config.telemetry.private_metrics,
            "telemetry.private_metrics would send figures of every run away. Set it to false",
        ),
    )
    for applies, problem in problems:
        if applies:
            raise ConfigError(f"{recipe}: {problem}.")
    if of_base(config) is not None:
        raise ConfigError(
            f"{recipe}: the base model has a privacy statement of its own, with which a choice is not composed. Start from a "
            "model without one, or sweep epsilons: dpllm sweep RECIPE --privacy.epsilon 1,3,8"
        )


def calibrated(mechanisms: list[Mechanism], mean: float, target: float) -> list[Mechanism]:
    """Calibrates every mechanism to one epsilon per run: about the largest at which the choice among them meets the target."""
    low, high, guess, runs = 0.0, target, 0.7 * target, list[Mechanism]()
    while high - low > 1e-4 * target:
        candidates = [_with_epsilon(run, guess, target) for run in mechanisms]
        event = RepeatAndSelect(tuple(run.event_of_steps for run in candidates), mean, DISTRIBUTION)
        terms = event, mechanisms[0].delta, mechanisms[0].neighbouring_relation
        cost = accounting.epsilon(*terms, interval=COARSE_INTERVAL)
        if near := cost >= (1 - TOLERANCE) * target:
            cost = accounting.epsilon(*terms)
        if cost > target:
            high = guess
        else:
            low, runs = guess, candidates
            if near:
                break
        guess = min(max(guess * target / cost, low + 0.05 * (high - low)), high - 0.05 * (high - low))
    if not runs:
        raise ConfigError(
            f"privacy.epsilon {target:g}: no noise brings the best of {mean:g} runs in the mean down to it. Raise it, or lower "
            "--mean-runs."
        )
    return runs


def _with_epsilon(run: Mechanism, epsilon: float, target: float) -> Mechanism:
    terms = epsilon, run.delta, run.schedule, run.neighbouring_relation, run.bands
    sigma = noise_multiplier_for(*terms, group_size=run.group_size)
    return run.model_copy(update={"noise_multiplier": sigma, "target_epsilon": target})


def _with_noise(config: RunConfig, run: Mechanism) -> RunConfig:
    noise = {"noise": "banded", "bands": run.bands} if run.coefficients else {"noise": "independent", "bands": "auto"}
    fixed = {**noise, "noise_multiplier": run.noise_multiplier, "delta": run.delta}
    return config.changed({f"privacy.{key}": value for key, value in fixed.items()})
