"""The section ``train`` of a recipe: the loop and its objective.

Comes in: values of a YAML file. Goes out: one ``TrainConfig``. Must not see data.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from dpllm.privacy.schedule import LARGEST_PASS
from dpllm.recipe.section import Section, number_or_auto


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

    @property
    def pairs(self) -> bool:
        """Whether preference pairs train."""
        return self.objective != "likelihood"

    @model_validator(mode="after")
    def _length(self) -> TrainConfig:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give train.epochs or train.steps, one of the two")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError("momentum is for sgd only, and adamw has its own; set optimizer: sgd or remove momentum")
        if self.label_smoothing and not self.pairs:
            raise ValueError("label_smoothing is for preference pairs only; set objective: cdpo or dpo, or remove it")
        return self
