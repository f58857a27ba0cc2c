"""What a LoRA step with differential privacy costs on paper: products, and memory of one GPU, for models of 1B to 70B.

    python scripts/scaling.py                      prints the tables of docs/howto/several-gpus.md
    python scripts/scaling.py --check FILE ...     against steps that bench_step measured

Comes in: shapes of models. Goes out: FLOPs and bytes. Must not read weights or data, and needs no torch. Every figure rests on
the constants below; each says where it comes from. Units: FLOP (a multiplication and an addition are two), bytes. Names: T tokens
of a row, R rows of a physical batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPU_MEMORY = 80e9  # of an A100 or H100
MEMORY_SHARE = 0.9  # as in dpllm.model.memory: the rest is for allocators and kernels

# The engine.
RANK = 16  # of LoRA, on every linear layer of the blocks
STATE = 32  # bytes per trainable number: itself 4, AdamW's moments 8, the sum in float64 8, the noisy sum 4, and
# 8 temporary bytes of AdamW's update
UNIT_GRADIENTS = 4  # bytes per trainable number and row: its gradient in float32, until the row's norm is known
CHUNK = 2**26 * 6  # bytes: logits of one chunk (dpllm.privacy.loss) and their float32 copy
# Bytes that a block keeps for the backward pass, per token and unit of: width, inner width, the keys' width, LoRA's rank.
# Derived from transformers' Llama in bf16 (tests/run/test_scaling.py compares them with dpllm.run.footprint).
KEPT = 36, 10, 4, 28
RECOMPUTED = 2  # bytes per token, block and unit of width that checkpointing keeps instead
LAST = 6  # bytes per token and unit of width: the last norm and its output


@dataclass(frozen=True)
class Shape:
    """A decoder such as Llama, Mistral or Qwen: gated MLP, grouped keys and values, negligible biases."""

    blocks: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False

    @property
    def kv_width(self) -> int:
        """Width of all keys of a token."""
        return self.width // self.heads * self.kv_heads

    @property
    def block(self) -> int:
        """Weights of one block's matrix products."""
        return 2 * self.width * (self.width + self.kv_width) + 3 * self.width * self.inner

    @property
    def head(self) -> int:
        """Weights of the output head, and equally of the embedding."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Weights of the whole model without norms."""
        return self.blocks * self.block + self.head * (1 if self.tied else 2)

    @property
    def trainable(self) -> int:
        """Weights of LoRA: rank times (inputs + outputs) of each of seven layers per block."""
        attention = 2 * 2 * self.width + 2 * (self.width + self.kv_width)
        return self.blocks * RANK * (attention + 3 * (self.width + self.inner))


SHAPES = {
    "1B": Shape(16, 2048, 8192, 32, 8, 128_256, tied=True),  # Llama 3.2
    "3B": Shape(28, 3072, 8192, 24, 8, 128_256, tied=True),  # Llama 3.2
    "8B": Shape(32, 4096, 14_336, 32, 8, 128_256),  # Llama 3.1
    "13B": Shape(40, 5120, 13_824, 40, 40, 32_000),  # Llama 2
    "32B": Shape(64, 5120, 27_648, 40, 8, 152_064),  # Qwen 2.5
    "70B": Shape(80, 8192, 28_672, 64, 8, 128_256),  # Llama 3.1
}


def flops_per_token(shape: Shape, length: int, *, checkpointing: bool) -> float:
    """FLOPs per token of a row of ``length``: forward, backward and clipping.

    The forward pass costs 2 P for P weights in products, and the gradient of the activations as much; frozen weights have no
    gradient. LoRA's gradients cost 2 P_lora more; keeping them per row needs the same products, without the sum over rows.
    Attention takes 4 T d a block, and 2.5 times that backward, where a fused kernel computes the weights once more.
    Checkpointing computes the blocks' forward pass once more.
    """
    products, adapters = shape.blocks * shape.block, shape.trainable
    attention = shape.blocks * 4 * length * shape.width
    once = 2 * products + 2 * adapters + attention
    backward = 2 * products + 4 * adapters + 2.5 * attention
    return once * (2 if checkpointing else 1) + backward + 4 * shape.head


def memory(shape: Shape, length: int, rows: int, *, checkpointing: bool, shards: int = 1) -> dict[str, float]:
    """Bytes on one GPU at the peak of a step.

    Args:
        shape: The model.
        length: T.
        rows: R.
        checkpointing: Blocks keep only their input; one block at a time keeps everything for its backward pass.
        shards: Processes over which the base is sharded; 1: not sharded. Two blocks are whole at a time, the one that
            computes and the next; so are embedding and head.
    """
    saved_widths = [shape.width, shape.inner, shape.kv_width, RANK]
    block = sum(size * bytes_ for size, bytes_ in zip(saved_widths, KEPT, strict=True))
    inputs = RECOMPUTED * shape.width
    base = 2 * shape.parameters
    if shards > 1:
        base = base / shards + 2 * (2 * shape.block + shape.head * (1 if shape.tied else 2))
    return {
        "base": base,
        "trainable": STATE * shape.trainable,
        "unit_gradients": UNIT_GRADIENTS * rows * shape.trainable,
        "activations": rows
        * length
        * ((shape.blocks * inputs + block if checkpointing else shape.blocks * block) + LAST * shape.width),
        "loss": CHUNK + rows * length * 2 * shape.width,
    }


def rows_that_fit(shape: Shape, length: int, *, checkpointing: bool, shards: int = 1) -> int:
    """The largest R that fits, 0 for none; every part of the memory is linear in R."""
    none, one = (sum(memory(shape, length, r, checkpointing=checkpointing, shards=shards).values()) for r in (0, 1))
    return max(0, int((GPU_MEMORY * MEMORY_SHARE - none) // (one - none)))


def memory_table(length: int) -> str:
    """Memory of one GPU in GB, and the number of rows that fit on one GPU and on eight."""
    lines = [
        f"| T = {length} | base | cut over 8 | LoRA | a row | a row, checkpointing | rows on 1 GPU | rows on each of 8, cut |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, shape in SHAPES.items():
        unsharded, sharded = (memory(shape, length, 0, checkpointing=False, shards=shards) for shards in (1, 8))
        row = {}
        for on in (False, True):
            none, one = (sum(memory(shape, length, r, checkpointing=on).values()) for r in (0, 1))
            row[on] = one - none
        fit = [
            "/".join(str(rows_that_fit(shape, length, checkpointing=on, shards=shards)) for on in (False, True))
            for shards in (1, 8)
        ]
        sizes = (unsharded["base"], sharded["base"], unsharded["trainable"], row[False], row[True])
        lines.append(
            f"| {name} | " + " | ".join(f"{size / 1e9:.2f}" for size in sizes) + " | " + " | ".join(fit) + " |"
        )
    return "\n".join(lines)


def tables() -> str:
    """The tables of docs/howto/several-gpus.md, separated by an empty line."""
    return "\n\n".join(map(memory_table, (512, 2048)))


def check(report: dict[str, Any]) -> list[str]:
    """Lines of a table: time of the products at the measured matrix rate, divided by the time of a step.

    Args:
        report: The JSON that bench_step writes.
    """
    clock = "cpu_time_s" if report["settings"]["device"] == "cpu" else "time_s"  # other processes take time from a CPU
    lines = []
    for result in report["results"]:
        on = "on" if result["checkpointing"] else "off"
        for name, values in result["variants"].items():
            if values[clock] and "limit_s" in result:
                measured = statistics.median(values[clock])
                lines.append(
                    f"| {result['method']}, T = {result['length']}, checkpointing {on} | {name} | {result['limit_s']:.2f} | "
                    f"{measured:.2f} | {result['limit_s'] / measured:.2f} |"
                )
    return lines


def main() -> None:
    """Prints the tables, or the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", type=Path, metavar="FILE", help="JSON of bench_step")
    options = parser.parse_args()
    if not options.check:
        print(tables())
        return
    print("| step | variant | predicted s | measured s | predicted over measured |\n|---|---|---|---|---|")
    for path in options.check:
        print("\n".join(check(json.loads(path.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
