"""The sections privacy, train, audit, card and telemetry of a recipe, and csv of its data.

Comes in: values of a YAML file. Goes out: one frozen value for each section. Must not know data, scores or coins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from dpllm.privacy.plan import AuditSettings
from dpllm.privacy.schedule import LARGEST_PASS, Clipping
from dpllm.recipe.section import Section, number_or_auto

if TYPE_CHECKING:
    from dpllm.privacy.loss import ExampleLoss


class CsvConfig(Section):
    """What a csv file does not state; read only for csv files."""

    delimiter: str | None = None
    """Delimiter between columns; null: a tab in .tsv, otherwise the first of comma, semicolon, tab and bar that occurs in the
    header line."""
    encoding: str | None = None
    """Encoding, such as cp1252 or latin-1; null: UTF-8, or UTF-16 where the file starts with its byte order mark."""

    @field_validator("delimiter")
    @classmethod
    def _one_character(cls, value: str | None) -> str | None:
        if value is not None and (len(value) != 1 or value in '"\r\n'):
            raise ValueError("should be one character, such as ';' or \"\\t\", and no quote or line end")
        return value


class PrivacyConfig(Section):
    """The promise, and where it is booked."""

    enabled: bool = True
    """false: no differential privacy at all; only for data declared public."""
    epsilon: float = Field(default=8.0, gt=0)
    """Target epsilon; the stated epsilon is at most this."""
    delta: Literal["auto"] | float = "auto"
    """auto: 1/(10 N) rounded down to one digit. 1/N or more is refused."""
    noise_multiplier: float | None = Field(default=None, gt=0)
    """Noise standard deviation divided by max_grad_norm; null: calibrated to epsilon. If set, the resulting epsilon is stated,
    and refused above the target."""
    max_grad_norm: float = Field(default=1.0, ge=1e-20, le=1e20)
    """C: the L2 norm to which each privacy unit's gradient is clipped."""
    noise: Literal["independent", "banded"] = "independent"
    """independent: each step draws its own noise. banded: later noise cancels a part of earlier noise, and groups of units take
    turns (Choquette-Choo et al. 2023), so the same epsilon leaves less noise in the weights. Each step's noise is then larger,
    and so is the best train.learning_rate for adamw."""
    bands: Literal["auto"] | PositiveInt = "auto"
    """With noise: banded, the number of bands, which is also the number of groups that take turns. auto: the number that leaves
    the least noise in the last weights, or 1 (independent noise) where the gain is below 5%."""
    clipping: Clipping = "flat"
    """The clipping function, part of the Plan; docs/concepts/engine.md describes each."""
    ledger: str | None = None
    """Path of the ledger, or a postgresql:// URL; null: one file in the user's data directory."""
    dataset: str | None = None
    """Name of the dataset in the ledger; null: the name under which it already knows these records, or one made from
    data.train."""
    derived_from: str | None = None
    """Name of the ledger's dataset of which data.train is a subset, an extended or a re-tokenised copy; that dataset is
    charged."""
    fit_budget: bool = False
    """true: where the dataset's budget has no room for epsilon, lower it to the largest that fits, and say so; false: refuse."""
    final: bool = False
    """true: the first and last reservation on the dataset, admitted by its exact epsilon: no other run can follow. `--final` sets
    it. Only so can a budget admit `data.sampling: example`."""
    secure_noise: bool = False
    """true: noise comes from AES, a cryptographic generator on the CPU, also when a GPU trains. Slower; meant for adapters."""
    insecure_seed: int | None = Field(default=None, ge=0, lt=2**128)
    """For tests only: seeds noise and sampling, so that the run says guarantee: false; refused on data with a budget."""

    @field_validator("delta")
    @classmethod
    def _delta(cls, value: str | float) -> str | float:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError("delta must lie strictly between 0 and 1, and well below 1/N; or type auto")
        return value

    _bands = field_validator("bands", mode="wrap")(number_or_auto("steps"))

    @model_validator(mode="after")
    def _banded(self) -> Self:
        if self.noise == "independent" and self.bands != "auto":
            raise ValueError("privacy.bands needs banded noise; set privacy.noise: banded, or leave privacy.bands out")
        return self

    @model_validator(mode="after")
    def _final(self) -> Self:
        if self.fit_budget and self.final:
            raise ValueError(
                "privacy.fit_budget leaves room for other runs, but none can follow a final run; leave privacy.fit_budget "
                "out, and set privacy.epsilon to that of the budget or less"
            )
        return self


class TrainConfig(Section):
    """The loop. Nothing here is read from private data while it runs."""

    objective: Literal["likelihood", "dpo", "cdpo", "ipo"] = "likelihood"
    """What is learned: likelihood, the next token; or the preference in pairs (data.format: preference), by DPO, by conservative
    DPO, whose labels are wrong with some probability, or by IPO. The reference is the model that the run starts from."""
    beta: float = Field(default=0.1, gt=0)
    """Of the objectives on pairs: how much a difference of log-likelihoods to the reference counts as reward."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Of the objectives on pairs: the probability that a label is wrong. cdpo learns a soft label; the loss of dpo and ipo is
    debiased, and that of dpo then has no lower bound, so stop by the schedule. data.label_record sets it by itself."""
    batch_size: PositiveInt = 256
    """Expected logical batch size B, in privacy units (rows, with data.sampling: example); the sampling rate is B / N and
    the divisor of the sum is B."""
    tokens_per_pass: Literal["auto"] | Annotated[PositiveInt, Field(le=LARGEST_PASS)] = "auto"
    """Tokens of one forward pass, in which whole units lie one after the other without padding. It changes memory and speed,
    never the guarantee. auto: from batch_size and data.max_length; rounded up so that the longest row fits. Recorded in
    run.json."""
    epochs: float | None = Field(default=None, gt=0)
    """Expected passes over the data; give epochs or steps."""
    steps: PositiveInt | None = None
    """Number of logical steps; give epochs or steps."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate, reached after the warm-up."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer that receives the noised gradients."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """With optimizer: sgd. What one step releases acts on later steps too, 1 / (1 - momentum) times in all."""
    lr_scheduler: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate schedule after the warm-up; it depends on the step alone."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps over which the learning rate rises from zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay, as PyTorch's optimizer defines it."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast of the forward pass; auto is bf16 on a GPU that has it and fp32 elsewhere. fp16 uses a constant loss scale."""
    seed: int = 0
    """Seeds initialisation, and dropout without differential privacy, only. Noise and sampling are seeded by the operating
    system."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations; null: only before the first and after the last step."""
    checkpoint_every: PositiveInt | None = None
    """Steps between checkpoints; null: only when interrupted."""
    sample_prompts: list[str] | str | None = None
    """Public prompts, or a file with one per line (jsonl: as `dpllm generate --prompts` reads it). During training the model
    completes each by greedy decoding; prompts and texts are printed. Naming prompts here declares them public."""
    sample_every: PositiveInt | None = None
    """Steps between samples; null: only after the last step."""
    process_timeout: float = Field(default=1800.0, gt=0)
    """With several processes: seconds that a step may take before the run is ended (a process hangs, or the network fails)."""

    _tokens = field_validator("tokens_per_pass", mode="wrap")(number_or_auto("tokens", LARGEST_PASS))

    @model_validator(mode="after")
    def _length(self) -> TrainConfig:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either train.epochs or train.steps")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError("momentum is for sgd only, and adamw has its own; set optimizer: sgd or remove momentum")
        return self


@dataclass(frozen=True)
class Objective:
    """The training objective: the next token of a text, or the preference between two answers."""

    name: Literal["likelihood", "dpo", "cdpo", "ipo"]
    beta: float
    flip: float  # the probability that a label is wrong

    @property
    def rows_each(self) -> int:
        """Number of texts of an example, all in one pass, and of secrets of a canary."""
        return 1 if self.name == "likelihood" else 2

    def learns_from(self, fmt: str) -> bool:
        """Whether rows of a format, see ``text.layouts``, suit this objective."""
        return (fmt == "preference") == (self.rows_each == 2)

    def reference(self, adapter: str | None) -> str | None:
        """The adapter of the reference policy in a run that starts from ``adapter``; None: the base model."""
        return adapter if self.rows_each == 2 else None

    def loss(self) -> ExampleLoss:
        """The function from the token losses of a pass to one loss for each example."""
        from dpllm.privacy.loss import likelihood  # imports torch
        from dpllm.privacy.preference import PairLoss

        return likelihood if self.name == "likelihood" else PairLoss(self.name, self.beta, self.flip)

    @property
    def wrong_labels(self) -> str | None:
        """How the loss treats wrong labels; None if there are none."""
        if not self.flip:
            return None
        treatment = "learns a soft label" if self.name == "cdpo" else "is debiased"
        caveat = " and has no lower bound: it stops by the schedule, not by the loss" if self.name == "dpo" else ""
        return f"wrong with probability {self.flip:.3g}; the loss of {self.name} {treatment}{caveat}"

    def check(self, fmt: str, long_examples: str, label_record: str | None) -> None:
        """Raises ValueError for keys of the section data that do not suit it, and for labels of texts, which have none."""
        pairs = self.rows_each == 2
        if self.flip and not pairs:
            raise ValueError(
                "train.label_smoothing is for preference pairs only; set train.objective: dpo, or remove it"
            )
        if fmt != "auto" and not self.learns_from(fmt):
            fix = "set train.objective: dpo and data.format: preference, or neither"
            raise ValueError(f"train.objective: {self.name} does not learn from data.format: {fmt}; {fix}")
        if pairs and long_examples == "chunk":
            raise ValueError("data.long_examples: chunk would split the answers of a pair; set it to truncate")
        if label_record is not None and (self.flip or not pairs):
            raise ValueError(
                "data.label_record is about the labels of preference pairs and sets how often they are wrong; set "
                "train.objective: dpo, and no train.label_smoothing"
            )


def default_ways(candidates: int) -> dict[str, list[int]]:
    """The tests for a group of ``candidates`` canaries, planted or not, for ``dpllm.auditing.bounds.epsilon_lower_bound``.

    References:
        They were chosen by the table of ``scripts/audit_mechanisms.py`` in benchmarks/NOTES.md.
    """
    root = math.sqrt(candidates)
    few, near, far = round(root), round(4 * root), min(round(16 * root), candidates)
    if candidates < 64:  # near would be more than half of them, almost the same test as far
        return {"falling": [far] if far else [], "falling_in": [few] if few <= candidates // 2 and few else []}
    return {"falling": [near, far], "falling_in": [few, near]}


class CanaryConfig(Section):
    """Random secrets behind carrier sentences, each inserted or not by its own fair coin."""

    kind: Literal["digits", "random_tokens", "new_tokens"] = "digits"
    """Kind of secret. digits: a number. random_tokens: ordinary tokens at random. new_tokens: one existing token per canary that
    the base model hardly expects after the carrier."""
    groups: dict[Annotated[int, Field(ge=1, le=32)], PositiveInt] = Field(
        default_factory=lambda: {1: 1000, 4: 20, 32: 20}, min_length=1
    )
    """Repetitions, 1 to 32 -> number of candidates. Every candidate occupies its slots in N, whatever its coin says."""
    digits: int = Field(default=8, ge=4, le=16)
    """With kind: digits: length of the secret; it is one of 10^digits."""
    place: Literal["target", "prompt"] = "target"
    """Where the secret stands. target: the model learns to predict it. prompt (kind: digits): at the end of a prompt, which the
    model reads and never learns to predict; every row then has the same public completion."""
    tokens: int = Field(default=6, ge=1, le=32)
    """With kind: random_tokens: length of the secret, in tokens of the base model."""
    references: int = Field(default=1000, ge=100)
    """Number of candidates that are never inserted, against which exposure is ranked (at most log2 of this number, in bits)."""

    @classmethod
    def usual_groups(cls, max_examples_per_unit: int | None) -> dict[int, int]:
        """Default ``groups`` whose copies fit into a unit."""
        return {copies: number for copies, number in cls().groups.items() if copies <= (max_examples_per_unit or 32)}

    @model_validator(mode="after")
    def _prompts_hold_digits(self) -> Self:
        if self.place == "prompt" and self.kind != "digits":
            raise ValueError(
                "place: prompt goes with kind: digits alone, since the other kinds are drawn for the place of a target. Set "
                "kind: digits, or leave place out"
            )
        return self


class AuditConfig(Section):
    """What is planted before training and measured afterwards."""

    canaries: CanaryConfig | None = None
    """null: no canary text is planted, as in a run that is published. On the command line it also sets gradient_canaries to 0,
    unless they are given too."""
    gradient_canaries: int = Field(default=0, ge=0, le=100_000)
    """Number of vectors of norm C that fair coins add to the summed gradients, with or without text canaries: the strongest test
    of sampling, clipping and noise, by an observer of every step. They leave no text in the weights. Each occupies a slot in N,
    whatever its coin says."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Probability that the epsilon lower bound exceeds the truth."""

    @property
    def plants(self) -> bool:
        """Whether there is anything to audit."""
        return self.canaries is not None or self.gradient_canaries > 0

    @property
    def texts(self) -> CanaryConfig:
        """The text canaries that are drawn; with gradient canaries alone, references that are never planted."""
        return self.canaries or CanaryConfig.model_construct(groups={}, references=100)

    def fixed(self) -> AuditSettings:
        """The settings of the test that are fixed before training, as plan.json commits to them."""
        ways = default_ways(self.canaries.groups.get(1, 0) if self.canaries else 0)
        return AuditSettings.checked(
            {"alpha": self.alpha, **ways, "score": "calibrated", "version": 2, "control_level": 0.001}
        )


_Words = Annotated[str, Field(pattern=r"\S")] | None


class DeploymentConfig(Section):
    """What only the author can say to a regulator; stated in their words, checked by nobody, and absent where it is null."""

    curator: _Words = None
    """Who publishes the model and answers for it."""
    intended_use: _Words = None
    """What the model is meant for."""
    sector: Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"] | None = None
    """Which field the data are from, as the DP Deployments Registry names it."""
    region: _Words = None
    """Whom the data describe by region, or whose law applies."""
    further_releases: _Words = None
    """What else is to be released from the same data, and when."""
    epsilon_rationale: _Words = None
    """Why epsilon is what it is."""
    epsilon_decided_by: _Words = None
    """Who decided on epsilon."""
    review_date: str | None = None
    """Day on which the release is looked at again, as YYYY-MM-DD."""
    incident_contact: _Words = None
    """Whom to tell of an incident, such as text of a person that the model repeats."""

    @field_validator("review_date", mode="before")
    @classmethod
    def _day(cls, value: object) -> object:
        """YAML reads a day without quotes as a date."""
        try:
            return None if value is None else date.fromisoformat(str(value)).isoformat()
        except ValueError:
            raise ValueError("should be a day, such as 2027-06-30") from None


class CardConfig(Section):
    """What the model card says beside the numbers."""

    title: str | None = None
    """Title of the card; null: the name of the run directory."""
    license: str | None = None
    """The adapter's licence, as a Hub identifier."""
    language: str | list[str] | None = None
    """Code of the language for the Hub, such as en, or a list of them."""
    tags: list[str] = Field(default_factory=list)
    """More tags for the Hub; differential-privacy and dp-sgd are added only where there is a guarantee."""
    description: str | None = None
    """One paragraph on what the model is for."""
    contact: str | None = None
    """Contact for questions about the privacy statement."""
    tuning: str | None = None
    """How hyper-parameters were chosen: on which data, in how many runs, and whether those runs are in the ledger."""
    deployment: DeploymentConfig = DeploymentConfig()


class TelemetryConfig(Section):
    """Metrics for those who run the job. Released and public values only, unless said otherwise."""

    textfile: str | None = None
    """Directory of the node exporter's textfile collector; each run writes one .prom file there and updates it."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port on the loopback interface where Prometheus can scrape the running job."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(default_factory=list)
    """Experiment trackers, through accelerate. They receive released and public values only."""
    project: str = Field(default="dpllm", pattern=r"^[\w ][\w .-]*$")
    """With trackers: the project (mlflow: experiment) that the run belongs to."""
    run_name: str | None = None
    """With trackers: name of the run; null: the name of the run directory."""
    group: str | None = None
    """With trackers: the group of the run (mlflow: a tag; tensorboard has none)."""
    entity: str | None = None
    """With trackers: wandb's user or team; null: the user's default."""
    private_metrics: bool = False
    """true: metrics and trackers also receive un-noised figures of private data, such as the loss and the share of clipped
    gradients. They are outside the guarantee, and the card says so."""
