"""Throughput of scoring against the forward pass alone: the price of the statistics, printed as JSON.

python scripts/bench_scoring.py [--repeats 7] [--sequences 64] [--device cpu]

Both do the same batches, in turns, in one process; the ratio is of medians. On a CPU it is the processor's time that counts,
so that other processes do not; on a GPU the wall clock. The bar: scoring has 0.9 of the throughput of
plain forward passes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _machine import machine, versions
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import dpllm
from dpllm.auditing import scores
from dpllm.privacy.schedule import TokenSequence

SHAPES: dict[str, Callable[[], Any]] = {
    "GPT-2 small (124M, 50,257 tokens)": lambda: GPT2LMHeadModel(GPT2Config()),
    "Llama shape (30M, 32,000 tokens)": lambda: LlamaForCausalLM(
        LlamaConfig(hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6)
    ),
}
TOKEN_BUDGET = 1024


def make_sequences(count: int, vocabulary: int, scored: int | None) -> tuple[list[TokenSequence], list[list[bool]]]:
    """Rows of 16 to 96 random tokens; the last ``scored`` of a row are scored, or all but the first."""
    draw = random.Random(0)
    sequences, masks = [], []
    for _ in range(count):
        length = draw.randint(16, 96)
        first = 1 if scored is None else length - scored
        sequences.append(
            TokenSequence(tuple(draw.randrange(vocabulary) for _ in range(length)), (True,) * length, length)
        )
        masks.append([place >= first for place in range(length)])
    return sequences, masks


def forward_alone(model: Any, sequences: list[TokenSequence]) -> None:
    """The forward pass alone, on the batches of scoring."""
    device = next(model.parameters()).device
    lengths = [len(sequence.input_ids) for sequence in sequences]
    order = sorted(range(len(sequences)), key=lambda index: (lengths[index], index))
    with torch.inference_mode():
        for rows in scores._batches(order, lengths, TOKEN_BUDGET):
            width = max(lengths[row] for row in rows)
            ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
            real_BT = torch.zeros(len(rows), width, dtype=torch.long)
            for place, row in enumerate(rows):
                ids_BT[place, : lengths[row]] = torch.tensor(sequences[row].input_ids)
                real_BT[place, : lengths[row]] = 1
            model(input_ids=ids_BT.to(device), attention_mask=real_BT.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measures every shape, with the secret scored and with every token scored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    cases: dict[str, Any] = {}
    for shape, build in SHAPES.items():
        torch.manual_seed(0)
        with torch.device(options.device):
            model = build().eval()
        for name, scored in (("8 tokens of each", 8), ("every token", None)):
            sequences, masks = make_sequences(options.sequences, model.config.vocab_size, scored)
            times: dict[str, list[float]] = {"forward": [], "scoring": []}
            jobs: dict[str, Callable[[], object]] = {
                "forward": lambda: forward_alone(model, sequences),  # noqa: B023
                "scoring": lambda: scores.score(model, sequences, masks, TOKEN_BUDGET),  # noqa: B023
            }
            for repeat in range(options.repeats + 1):
                for job, work in jobs.items():
                    began = clock()
                    work()
                    if repeat:
                        times[job].append(clock() - began)
            middle = {job: statistics.median(values) for job, values in times.items()}
            cases[f"{shape}, {name}"] = {
                **{f"{job}_s": round(value, 4) for job, value in middle.items()},
                "ratio": round(middle["forward"] / middle["scoring"], 3),
            }
    print(
        json.dumps(
            {
                "repeats": options.repeats,
                "sequences": options.sequences,
                "token_budget": TOKEN_BUDGET,
                "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
                "threads": torch.get_num_threads(),
                "machine": machine(),
                "versions": versions("torch", "transformers") | {"dpllm": dpllm.__version__},
                "bar": 0.9,
                "cases": cases,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
