"""What the guarantee of a run is not about: every use of data, and every property, named in a sentence.

Comes in: the recipe, the Plan, the record. Goes out: lines for the privacy block. Must not read any file.
"""

from __future__ import annotations

from typing import Any

from dpllm.config import RunConfig

Json = dict[str, Any]


def not_covered(config: RunConfig, plan: Json | None, record: Json) -> list[str]:
    """Every use of data that the guarantee is not about, each named."""
    data, tuning = config.data, config.card.tuning
    evaluation = "evaluation data: this run had none"
    if data.eval is not None:
        declared = "declared public" if data.eval_public else "not declared public; no figure from them is published"
        evaluation = f"evaluation data ({declared}) and every figure computed from them"
    logs = "un-noised figures of the training, such as logs and telemetry, kept by whoever trained the model"
    if config.telemetry.private_metrics and not data.public:
        logs += "; here they also went to metrics and trackers"
    lines = [
        "the data on which the base model was trained, and any text that they share with the data of this run",
        "the tokenizer, which came with the base model and was not made from the data of this run",
        "the format of prompts, the chat template, and the filters and clean-up of the data before this run, where somebody "
        "chose them by looking at the data",
        "facts that many units share; k units together have k times the epsilon and a larger delta",
        "what can be learnt about a person from other sources, or from what all people of the data have in common",
        evaluation,
        "the choice of hyper-parameters and of this run among others, where un-noised figures guided it"
        + ("; what is stated about it stands in the table above" if tuning else ""),
        logs,
        "text given to the model when it is used",
        "who could read the data, the logs and the checkpoints on the machines that trained the model",
        "side channels such as time and memory, and that a generator has finitely many states"
        if record.get("lattice")  # runs of before noise was added on a lattice
        else "the difference between floating-point arithmetic and real numbers (in bf16 or fp16 one unit can move the "
        "rounding of the others' gradients), and side channels such as time and memory",
    ]
    if plan is not None and plan["neighbouring_relation"] == "zero_out":
        lines.append("the number of units, which is published")
    if record["status"] == "interrupted":
        lines.append("the decision when to stop the run, which may rest on un-noised figures")
    return lines
