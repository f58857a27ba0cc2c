"""Times a head and its losses, forward and backward, three ways, and measures what each holds at its peak.

all: cross entropy over all logits in float32, as torch computes it. chunks: ``token_losses``, used for a trained head.
none: ``fused_losses``, used for a frozen head. Weights, hidden states and tokens are random; every position of a row but the
first is a target. Times are medians of processor time over interleaved repetitions; memory is the growth of a separate process
for each of them.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench_loss.py

Shape suffixes: R rows, T tokens, d hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpllm.model import processes
from dpllm.privacy.loss import fused_losses, pack_of, token_losses
from dpllm.privacy.packing import Targets

ROOT = Path(__file__).resolve().parents[1]
ROWS, TOKENS, HIDDEN = 4, 512, 512
# Return freed memory at once while memory is measured, and keep it while time is measured.
GIVES_BACK = {"MALLOC_MMAP_MAX_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
KEEPS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}


class Case:
    """One size of vocabulary."""

    def __init__(self, vocabulary: int, rows: int = ROWS, tokens: int = TOKENS) -> None:
        """Random weights, states and tokens."""
        torch.manual_seed(0)
        self.head = nn.Linear(HIDDEN, vocabulary, bias=False).requires_grad_(False)
        self.hidden_RTd = torch.randn(rows, tokens, HIDDEN, requires_grad=True)
        self.ids_RT = torch.randint(0, vocabulary, (rows, tokens))
        positions = [row * tokens + place for row in range(rows) for place in range(tokens - 1)]
        pack = pack_of(vocabulary, torch.device("cpu"))
        self.targets = Targets.of(self.ids_RT.flatten().tolist(), positions, (rows, tokens), pack)

    def run(self, way: str) -> None:
        """Forward and backward pass of one of ``WAYS``."""
        (self._losses(way).sum() / (self.ids_RT.shape[1] - 1)).backward()
        self.hidden_RTd.grad = None

    def _losses(self, way: str) -> Tensor:
        if way == "none":
            return fused_losses(self.head, self.hidden_RTd, self.targets).nll_M
        logits_RTV = self.head(self.hidden_RTd)
        if way == "chunks":
            return token_losses(logits_RTV, self.targets)
        return functional.cross_entropy(
            logits_RTV[:, :-1].float().flatten(0, 1), self.ids_RT[:, 1:].flatten(), reduction="none"
        )


WAYS = ("all", "chunks", "none")


def seconds(vocabulary: int, repetitions: int) -> dict[str, list[float]]:
    case, seconds_by_way = Case(vocabulary), {way: [] for way in WAYS}
    for repetition in range(repetitions):
        start = repetition % len(WAYS)
        for way in WAYS[start:] + WAYS[:start]:
            before = time.process_time()
            case.run(way)
            seconds_by_way[way].append(time.process_time() - before)
    return seconds_by_way


def peak(vocabulary: int, way: str) -> int:
    def status(key: str) -> int:
        match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert match is not None
        return 1024 * int(match[1])

    Case(100, 1, 8).run(way)  # memory that libraries allocate on first use does not count
    case = Case(vocabulary)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    case.run(way)
    return status("VmHWM") - before


def child(*arguments: object, allocator: dict[str, str]) -> object:
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **allocator}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[32_000, 128_256])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/loss-cpu-DATE.json)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, vocabulary = options.child[0], options.vocabularies[0]
        print(json.dumps(seconds(vocabulary, options.repetitions) if kind == "time" else peak(vocabulary, kind)))
        return
    now = datetime.now(UTC)
    results = []
    for vocabulary in options.vocabularies:
        common = ("--vocabularies", vocabulary, "--repetitions", options.repetitions, "--child")
        times = child(*common, "time", "-", allocator=KEEPS)
        for way in WAYS:
            size = child(*common, way, "-", allocator=GIVES_BACK)
            row = {"vocabulary": vocabulary, "way": way, "cpu_time_s": times[way], "peak_memory_bytes": size}
            results.append({**row, "median_s": statistics.median(times[way])})
            print(f"V {vocabulary}  {way:7}{results[-1]['median_s']:8.2f} s {size / 1e6:8.0f} MB", flush=True)
    report = {
        "schema_version": 1,
        "date": now.isoformat(timespec="seconds"),
        "versions": processes.versions(),
        "hardware": processes.hardware(),
        "settings": {"rows": ROWS, "tokens": TOKENS, "hidden": HIDDEN, "repetitions": options.repetitions},
        "results": results,
    }
    output = options.output or ROOT / "benchmarks" / f"loss-cpu-{now.date()}.json"
    output.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
