"""Differential privacy for a training loop of one's own: sampling, clipping, noise, accounting and the ledger.

Comes in: a model in memory, units of tokens, a Plan, an open ledger. Goes out: updates of the model. Must not read files.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from dpllm.errors import ConfigError, Refused, RoundsByCompany
from dpllm.ledger import Ledger
from dpllm.model import loading, processes
from dpllm.privacy import guards
from dpllm.privacy.engine import Diagnostics
from dpllm.privacy.engine import Engine as StepEngine
from dpllm.privacy.noise import key_bits, os_entropy
from dpllm.privacy.plan import Plan, make_plan
from dpllm.privacy.sampling import PoissonSampler, physical_batches
from dpllm.recipe.config import RunConfig
from dpllm.text.data import Unit


def promise(num_units: int, *, epsilon: float, batch_size: int, steps: int, max_grad_norm: float = 1.0) -> Plan:
    """The Plan of a loop of one's own: flat clipping, units sampled whole, delta by ``privacy.delta: auto``.

    Args:
        num_units: N, which is published.
        epsilon: The target; the noise is calibrated to it.
        batch_size: B, expected units of a step.
        steps: T.
        max_grad_norm: C.

    Raises:
        ConfigError: The target cannot be reached.
        Refused: The batch is larger than N.
    """
    config = RunConfig.model_validate(
        {
            "model": {"name_or_path": "a model in memory"},
            "data": {"train": "units in memory"},
            "privacy": {"epsilon": epsilon, "max_grad_norm": max_grad_norm},
            "train": {"batch_size": batch_size, "steps": steps},
            "output_dir": "nowhere",
        }
    )
    return make_plan(config, num_units)


class Engine:
    """Takes the steps of one reservation on one model, in one process; use it in a ``with`` statement.

    Guarantee:
        Once all T steps are taken, the trainable parameters are (epsilon, delta)-differentially private, as ``plan`` states,
        if each of ``units`` holds all rows of one privacy unit and was encoded from them alone, and if nothing else that was
        computed from these data reaches the parameters: no other optimizer step, no decision taken on what ``step`` returns.
        Steps that were taken count when the loop ends early: the ledger keeps the whole reservation.

    Attributes:
        plan: What is promised.
        entry: The reservation.
        dropout_off: Rates of the model that were set to zero.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        units: Sequence[Unit],
        *,
        ledger: Ledger,
        dataset: str,
        max_length: int,
        physical_batch_size: int = 8,
    ) -> None:
        """Checks everything, then reserves.

        Args:
            model: A causal LM of transformers, with or without LoRA of peft, on its device; float32 throughout.
            optimizer: Over exactly what trains.
            plan: Of ``promise``.
            units: N of them.
            ledger: Where the run is charged.
            dataset: The name of the data in it.
            max_length: Tokens of the longest row allowed; public.
            physical_batch_size: Rows in one forward pass, at most.

        Raises:
            ConfigError: There are not N units, or a row is too long.
            Refused: Several processes; a model or an optimizer for which the guarantee does not hold; low precision; a
                self-check that fails; a budget without room. Nothing is spent.
        """
        if processes.several():
            raise Refused(
                "dpllm.Engine draws its own samples and noise in one process. Use accelerate launch and a recipe."
            )
        if len(units) != plan.schedule.dataset_size:
            raise ConfigError(
                f"there are {len(units)} units, and the Plan samples from {plan.schedule.dataset_size}, at another rate. "
                "Make the Plan with promise(len(units), ...)."
            )
        if any(len(row.input_ids) > max_length for unit in units for row in unit.sequences):
            raise ConfigError("a row is longer than max_length, to which rows are padded. Cut it, or raise max_length.")
        device = next(model.parameters()).device
        if torch.is_autocast_enabled(device.type) or any(
            p.is_floating_point() and p.dtype != torch.float32 for p in model.parameters()
        ):
            raise Refused(
                "the model is not float32 throughout, and a self-check of low precision needs a recipe. Load it with "
                "dtype=torch.float32, without autocast."
            )
        guards.check_model(model)
        self.plan, self.dropout_off = plan, loading.without_dropout(model.train())
        self._units, self._max_length, self._steps = units, max_length, 0
        self._pad_id = getattr(model.config, "pad_token_id", None) or 0
        torch.set_float32_matmul_precision("highest")
        self._engine = StepEngine(
            model,
            optimizer,
            plan.schedule,
            plan,
            grad_sample_mode="auto",
            noise_entropy=os_entropy(key_bits(False)),
            device=device,
            max_length=max_length,
        )
        vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._rows = self._checked(vocabulary, physical_batch_size)
        self._sampler = PoissonSampler(plan.schedule, len(units), os_entropy(key_bits(False)))
        self._ledger = ledger
        self.entry = ledger.reserve(
            dataset,
            event=plan.event,
            delta=plan.delta,
            unit=plan.unit,
            relation=plan.neighbouring_relation,
            num_steps=plan.schedule.num_steps,
            run="own loop",
        ).entry

    def _checked(self, vocabulary: int, rows: int) -> int:
        """The physical batch size after the self-check: 1 where a kernel rounds rows by company."""
        check: Any = self._engine.self_check
        try:
            check(vocabulary, self._max_length, physical_batch_size=rows, pad_id=self._pad_id)
        except RoundsByCompany:
            rows = 1
            check(vocabulary, self._max_length, physical_batch_size=rows, pad_id=self._pad_id)
        return rows

    def step(self) -> Diagnostics:
        """Charges one step, draws a logical batch, and updates the model.

        Returns:
            Un-noised facts about it, which are private: do not publish them, nor decide by them.

        Raises:
            Refused: All T steps were taken, or a gradient cannot be clipped.
        """
        self._ledger.charge(self.entry, self._steps + 1)  # written before the update exists
        drawn = self._sampler.draw()
        seen = self._engine.step(physical_batches(drawn, self._units, self._rows, self._pad_id, self._max_length))
        self._steps += 1
        return seen

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the reservation; what was not taken stays charged unless the ledger gives it back."""
        self._engine.close()
        self._ledger.finish(self.entry, "completed" if self._steps == self.plan.schedule.num_steps else "interrupted")
