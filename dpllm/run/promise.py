"""Decides whether a run may happen and what it promises, and makes the Plan of a recipe.

Comes in: a recipe, and how the run would begin. Goes out: a ``Decision``, which ``dpllm plan`` prints, training obeys, and sweeps
and shadow runs use. Refusals are collected, not raised, so that everything else is still computed. Must not import torch, read
weights or write to the ledger.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from dpllm.errors import BudgetExceeded, ConfigError, DpllmError, Refused, need
from dpllm.files import read_json
from dpllm.ledger import Outlook, RunRequest, dataset_policy, open_ledger
from dpllm.ledger.dataset_policy import DatasetPolicy
from dpllm.privacy import accounting, banded
from dpllm.privacy.banded import LearningRate
from dpllm.privacy.plan import (
    Mechanism,
    Neighbours,
    Plan,
    fitting,
    noise_multiplier_for,
    resolved_delta,
    steps_event,
    strategy_for,
)
from dpllm.privacy.renyi import Fit
from dpllm.privacy.schedule import Schedule, make_schedule
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, LoraConfig, RunConfig, TrainConfig
from dpllm.recipe.sections import AuditConfig
from dpllm.run.advice import advise, check_learning_rate
from dpllm.run.base_model import of_base
from dpllm.run.checkpoint import ResumeState, check_promise, read_resume_state, same_lineage, same_recipe
from dpllm.run.directory import RunDir, check_directory
from dpllm.run.subject import Refusals, Subject, look
from dpllm.statement import lineage
from dpllm.statement.formatting import html_table
from dpllm.statement.privacy_record import Lineage
from dpllm.statement.released import Labels
from dpllm.text import builtin, rendering
from dpllm.text.prompts import read_prompts

UNBOUNDED = 1e9  # a target epsilon that refuses nothing


@dataclass(frozen=True)
class Start:
    """How a run begins."""

    resume: bool = False  # continue the interrupted run in ``output_dir``: same reservation, fresh noise
    overwrite: bool = False  # replace a run in ``output_dir``
    entry: str | None = None  # an existing reservation for this run, as in a tuning group


@dataclass(frozen=True)
class Decision:
    """What is known of a run before it starts."""

    config: RunConfig  # with the detected format of the data
    subject: Subject | None = None  # None if the data could not be read
    schedule: Schedule | None = None  # None if there is none, such as when the batch is larger than the dataset
    # The promise. If it exceeds its target or the budget, these are the figures of the refused run.
    plan: Plan | None = None  # None if it cannot be computed, or without differential privacy
    ledger: Outlook | None = None  # the budget before and after the run; None without a ledger or a Plan
    lineage: Lineage | None = None  # what this run and its ancestor models promise together
    resumed: ResumeState | None = None  # the run to continue; None for a new one
    # Every reason to refuse the run, except those that need a tokenizer, the model or a second accountant (which needs torch):
    # rows and canaries longer than data.max_length, unsupported models, PRV.
    refusals: tuple[DpllmError, ...] = ()
    # SHA-256 of the checked weights of model.adapter; the same ones must be loaded.
    weights: str | None = None
    labels_before: tuple[Labels, ...] = ()  # label draws that ancestor models learned from

    @property
    def exit_code(self) -> int:
        """0 if nothing refuses; else the largest exit code of the refusals."""
        return max((error.exit_code for error in self.refusals), default=0)

    @property
    def flaw(self) -> str | None:
        """Why the run gives no guarantee; None if it gives one."""
        return self.config.flaw or lineage.why_not(self.lineage)

    @property
    def labels(self) -> Labels | None:
        """The randomised labels of the training pairs; None if none were randomised."""
        return self.subject.labels if self.subject else None

    @cached_property
    def advice(self) -> list[str]:
        """What is likely to hurt, and what to type; none without differential privacy."""
        return advise(self.config, self.plan) if self.plan else []

    @property
    def lowered(self) -> str:
        """Says that ``privacy.fit_budget`` lowered the requested epsilon; empty if it did not."""
        plan = self.plan
        fits_budget = self.config.privacy.fit_budget and self.config.privacy.noise_multiplier is None
        if plan is None or not fits_budget or plan.epsilon > 0.99 * plan.target_epsilon:
            return ""
        return (
            f"privacy.fit_budget: epsilon is lowered to {plan.epsilon:.3f} from the {plan.target_epsilon:g} asked for, the most "
            "that the budget has room for, so next to nothing is left for other runs."
        )

    @property
    def policy(self) -> DatasetPolicy:
        """The policy of the dataset, for a decision without refusals."""
        assert self.subject is not None
        assert self.subject.policy is not None
        return self.subject.policy

    def _in_words(self) -> dict[str, str]:
        words = {}
        if self.plan is not None:
            words["Plan"] = str(self.plan)
        elif self.schedule is not None and not self.config.privacy.enabled:
            words["No differential privacy"] = f"{self.schedule.num_steps} steps"
        if self.lowered:
            words["Beware"] = self.lowered
        if (wrong := self.config.objective.wrong_labels) is not None:
            words["Labels"] = wrong
        if self.ledger is not None:
            words["Ledger"] = str(self.ledger)
        if self.subject and self.subject.reads:
            words["Data"] = self.subject.reads
        if self.subject and self.subject.graph:
            words["Rows kept"] = str(self.subject.graph)
        return words

    def __str__(self) -> str:
        """``repr`` and the advice."""
        return "\n".join([repr(self), *(f"Advice: {text}" for text in self.advice)])

    def __repr__(self) -> str:
        """One line for each part of the promise, and one for each refusal."""
        lines = [f"{name}: {text}" for name, text in self._in_words().items()]
        return "\n".join([*lines, *(f"Refused: {error}" for error in self.refusals)])

    def _repr_html_(self) -> str:
        remarks = {"Advice": " ".join(self.advice) or None, "Refused": "; ".join(map(str, self.refusals)) or None}
        return html_table("Decision", {**self._in_words(), **remarks})

    def without_rows(self) -> Self:
        """A copy for other processes, which do not have this one's files open."""
        return replace(self, subject=self.subject and replace(self.subject, rows=None))

    def at(self, config: RunConfig) -> Self:
        """A copy with the paths of another machine, taken from ``config``."""
        data = self.config.data
        resolved = {f"data.{name}": getattr(data, name) for name in ("format", "label_epsilon", "chat_template")}
        return replace(self, config=config.changed(resolved))

    def obeyed(self) -> Self:
        """Returns itself, or raises the first refusal."""
        if self.refusals:
            raise self.refusals[0]
        return self


def decide(
    config: RunConfig,
    start: Start | None = None,
    *,
    subject: Subject | None = None,
    terms: dataset_policy.Terms | None = None,
    fetch: bool = False,
    cache: Path | None = None,
) -> Decision:
    """Combines what the recipe, the data, the ledger and the base model's statement say about a run.

    Args:
        config: The recipe.
        start: How the run would begin; None: the run directory is not checked.
        subject: The data if they were read already; None: they are read.
        terms: What a budget leaves to this one of several runs that are reserved together; None: the ledger's answer.
        fetch: Whether the base model's statement may be downloaded.
        cache: Where to keep the rows for training; None: they are not kept.
    """
    refusals, run, privacy = Refusals(), RunDir(Path(config.output_dir)), config.privacy
    template = refusals.attempt(rendering.read_template, config.data.chat_template)
    config = config.changed({"data.chat_template": template})
    refusals.attempt(check_modes, config)
    if start is not None:
        refusals.attempt(check_directory, config, run, resume=start.resume, overwrite=start.overwrite)
        if start.resume:
            refusals.attempt(same_recipe, config, run)
    ledger = refusals.attempt(open_ledger, config.privacy.ledger, create=False)
    with ledger or contextlib.nullcontext():
        subject = subject or look(config, ledger, refusals, cache)
        if subject is None:
            return Decision(config, refusals=tuple(refusals.errors))
        config, resumed = config.changed(subject.resolved), None
        refusals.attempt(_check_machine, config, start)
        dataset, parent = subject.dataset, config.privacy.derived_from if subject.policy else None
        if start and start.resume:
            if subject.policy:
                resumed = refusals.attempt(read_resume_state, config, run, ledger, subject.policy)
            if refusals.errors:
                return Decision(config, subject, resumed=resumed, refusals=tuple(refusals.errors))
        schedule, plan, outlook = refusals.attempt(schedule_of, config, subject.num_units), None, None
        if start and resumed and schedule and config.privacy.enabled:
            plan = refusals.attempt(_resumed_plan, config, subject.num_units, resumed)
            schedule = plan.schedule if plan else schedule
        elif config.privacy.enabled:
            limits = terms or refusals.attempt(dataset_policy.terms, ledger, dataset, parent, privacy.fit_budget)
            plan, over = _plan(config, subject.num_units, schedule, limits, refusals)
            if ledger and plan and terms is None and not (start and start.entry):
                outlook = refusals.attempt(ledger.outlook, dataset, [RunRequest.of(plan, final=privacy.final)], parent)
            if error := (outlook.error if outlook else None) or over:
                refusals.add(error)
        refusals.attempt(check_learning_rate, config, plan)
        base = refusals.attempt(of_base, config, fetch=fetch)
        if resumed and not refusals.errors:
            refusals.attempt(same_lineage, base, config, run)
        subject = replace(subject, labels=refusals.attempt(lineage.of_labels, subject.labels, base, ledger))
        about = {"dataset": dataset, "derived_from": parent, "book": ledger, "plan": plan}
        ancestry = refusals.attempt(lineage.compose_with_base, base, config, **about)
        before = (base.weights, base.labels) if base else ()
        return Decision(config, subject, schedule, plan, outlook, ancestry, resumed, tuple(refusals.errors), *before)


def _check_machine(config: RunConfig, start: Start | None) -> None:
    """Refuses, with a ConfigError, what this machine lacks for the run: packages, a local model, its chat template."""
    if start is None:
        return
    if config.model.quantization:
        need("bitsandbytes", "model.quantization")
    for package in config.telemetry.trackers:
        need(package, "telemetry.trackers")
    if isinstance(config.train.sample_prompts, str):
        read_prompts(Path(config.train.sample_prompts))
    name = config.model.name_or_path
    folder = builtin.NAMES.get(name, Path(name))
    if not (folder.is_dir() or names.is_hub_id(name)):
        raise ConfigError(
            f"model.name_or_path {name!r}: is not a folder, a Hub id or builtin:tiny. Check the spelling."
        )
    files = ("config.json", "adapter_config.json", "run.json")  # of_base refuses the last two by name
    if folder.is_dir() and not any((folder / file).exists() for file in files):
        raise ConfigError(
            f"model.name_or_path {name}: holds no config.json, so it is not a model. Name the folder of a model."
        )
    settings = folder / "tokenizer_config.json"
    with_template = any((folder / file).exists() for file in ("chat_template.jinja", "additional_chat_templates"))
    # A model without a tokenizer can still be planned.
    if config.data.format != "messages" or with_template or not settings.exists():
        return
    if not (read_json(settings).get("chat_template") or config.data.chat_template):
        raise ConfigError(
            f"model.name_or_path {name}: has no chat template (most base models have none), so messages cannot be read. Set "
            "data.chat_template, name a model with a chat template, or use rows with prompt and completion."
        )


def _plan(
    config: RunConfig, num_units: int, schedule: Schedule | None, terms: dataset_policy.Terms | None, refusals: Refusals
) -> tuple[Plan | None, BudgetExceeded | None]:
    """The Plan, and the error if the budget leaves too little to calibrate its noise."""
    over, terms = None, terms or dataset_policy.terms(None, "", None)
    if schedule is None:  # delta can still be checked
        refusals.attempt(resolved_delta, config.privacy.delta, terms["largest_delta"], num_units)
        return None, None
    try:
        return plan_of(config, num_units, **terms), None
    except BudgetExceeded as error:
        over = error
    except DpllmError as error:
        refusals.add(error)
    # Computes the cost anyway: without the filter, and without a target if the recipe sets the noise multiplier.
    relaxed = config.changed({"privacy.epsilon": UNBOUNDED}) if config.privacy.noise_multiplier else config
    try:
        plan = plan_of(relaxed, num_units, largest_delta=terms["largest_delta"])
    except DpllmError:  # this error was reported above
        return None, over
    return plan.model_copy(update={"target_epsilon": config.privacy.epsilon}), over


def _resumed_plan(config: RunConfig, num_units: int, resumed: ResumeState) -> Plan:
    """Repeats the promise with its old noise, which was calibrated to what the budget had left then."""
    before = resumed.plan
    assert before is not None
    repeated = config.changed({"privacy.noise_multiplier": before.noise_multiplier, "privacy.delta": before.delta})
    coefficients = before.coefficients  # another machine's may differ in their last bits
    check_promise(plan_of(repeated, num_units, coefficients=coefficients), before)
    return before


def plan_of(
    config: RunConfig,
    num_units: int,
    *,
    fit: Fit | None = None,
    largest_delta: float = 1.0,
    coefficients: tuple[float, ...] | None = None,
) -> Plan:
    """The Plan of a recipe; see ``mechanism_of``."""
    return Plan.of(mechanism_of(config, num_units, fit=fit, largest_delta=largest_delta, coefficients=coefficients))


def mechanism_of(
    config: RunConfig,
    num_units: int,
    *,
    fit: Fit | None = None,
    largest_delta: float = 1.0,
    coefficients: tuple[float, ...] | None = None,
) -> Mechanism:
    """The mechanism of a recipe with ``privacy.enabled``; its noise is calibrated unless the recipe sets it.

    Args:
        config: The recipe.
        num_units: Privacy units without canaries, >= 1.
        fit: The remainder of a Renyi filter that the run has to fit: calibrated noise is then the larger of what meets the target
            epsilon and what fits. Noise set in the recipe stays, and the ledger judges it.
        largest_delta: Delta of the dataset's budget, if any: an upper bound on ``privacy.delta: auto``.
        coefficients: Those of a resumed run; None: they are optimised for the recipe's steps.

    Raises:
        Refused: delta >= 1/N; the given noise misses the target; the filter cannot count the event; or bands do not fit.
        BudgetExceeded: No noise makes the run fit.
        ConfigError: The target epsilon cannot be reached.
    """
    privacy, data, schedule = config.privacy, config.data, schedule_of(config, num_units)
    relation = data.relation
    delta = resolved_delta(privacy.delta, largest_delta, schedule.dataset_size, canary_slots=schedule.canary_slots)
    group = (data.max_examples_per_unit or 1) if data.sampling == "example" else 1
    if coefficients is None:
        coefficients = _coefficients(config, schedule, delta, relation)
    bands, sigma = max(1, len(coefficients)), privacy.noise_multiplier
    if sigma is None:
        sigma = noise_multiplier_for(privacy.epsilon, delta, schedule, relation, bands, group_size=group)
        if fit is not None:
            sigma = fitting(sigma, lambda sigma: steps_event(sigma, schedule, group, bands), fit)
    epsilon = accounting.epsilon(steps_event(sigma, schedule, group, bands), delta, relation)
    if epsilon > privacy.epsilon:
        raise Refused(
            f"privacy.noise_multiplier {sigma:g} gives epsilon {epsilon:.3f}, above the target privacy.epsilon "
            f"{privacy.epsilon:g}. Set privacy.noise_multiplier: null to calibrate it, or raise privacy.epsilon."
        )
    return Mechanism(
        unit=data.unit,
        max_examples_per_unit=data.max_examples_per_unit,
        sampling=data.sampling,
        neighbouring_relation=relation,
        dataset_size=schedule.dataset_size,
        canary_slots=schedule.canary_slots,
        expected_batch_size=schedule.expected_batch_size,
        num_steps=schedule.num_steps,
        noise_multiplier=float(sigma),
        coefficients=coefficients,
        clipping=privacy.clipping,
        max_grad_norm=privacy.max_grad_norm,
        delta=delta,
        target_epsilon=privacy.epsilon,
    )


def _coefficients(config: RunConfig, schedule: Schedule, delta: float, relation: Neighbours) -> tuple[float, ...]:
    """Coefficients of banded noise; empty for independent noise."""
    privacy, rate = config.privacy, learning_rate_of(config.train)
    if privacy.noise == "independent":
        return ()
    banded.check(privacy.bands, schedule, config.data.sampling)
    return strategy_for(privacy.epsilon, delta, schedule, relation, rate, privacy.bands)


def schedule_of(config: RunConfig, num_units: int) -> Schedule:
    """The schedule of a recipe; ConfigError for a canary of more rows than one unit may bring, else as ``make_schedule``."""
    train, slots = config.train, num_slots(config.audit, config.data)
    return make_schedule(num_units, train.batch_size, train.steps, train.epochs, slots=slots)


def num_slots(audit: AuditConfig, data: DataConfig) -> int:
    """The number of slots in N: every candidate has its own, whatever its coin, and so has a gradient canary.

    If whole units are sampled, a candidate is one unit with all of its repetitions, and has one slot. If rows are sampled, each
    repetition has a slot. More repetitions than one unit may have are a ConfigError.
    """
    groups, max_rows = audit.canaries.groups if audit.canaries else {}, data.max_examples_per_unit
    if max_rows is not None and max(groups, default=0) > max_rows:
        raise ConfigError(
            f"audit.canaries.groups: all {max(groups)} repetitions of a canary belong to one {data.unit}, of which only "
            f"data.max_examples_per_unit ({max_rows}) rows train. Lower the repetitions in audit.canaries.groups, or raise "
            "data.max_examples_per_unit."
        )
    return sum(data.slots_each(group) * number for group, number in groups.items()) + audit.gradient_canaries


def learning_rate_of(train: TrainConfig) -> LearningRate:
    """The recipe's learning rate as a function of the step."""
    return LearningRate(train.learning_rate, train.lr_scheduler, train.warmup)


def check_modes(config: RunConfig) -> None:
    """Refuses adapter dropout, which couples units."""
    if config.privacy.enabled and isinstance(config.adapter, LoraConfig) and config.adapter.dropout > 0:
        raise Refused(
            f"adapter.dropout is {config.adapter.dropout:g}, and its masks depend on a row's place in the batch, so one unit "
            "would change the contributions of all others, which clipping does not bound. Set adapter.dropout: 0."
        )
