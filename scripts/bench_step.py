"""Times whole logical steps on one model and one set of physical batches, interleaved, and compares with the bars.

Started by scripts/bench_step. A logical step is k physical batches, then clipping, noise and AdamW. Weights and tokens
are random. Every variant runs once in each repetition, in rotating order, on the same model object: its hooks go in
before the clock starts and out after it stops. A ratio is the median of the repetitions' ratios, so a slower machine
slows both sides. Peak memory is the allocator's on CUDA; on a CPU it is that of a separate process for each variant.

Shape suffixes: R sequences of a physical batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in dpllm.cli; spinning threads would count as CPU time

import scaling
import torch
from _machine import commit, matrix_rate
from _step_variants import (
    LEARNING_RATE,
    PEERS,
    SHAPES,
    VARIANTS,
    Batches,
    Bench,
    Step,
    attached,
    build,
    mixed_lengths,
    random_batches,
    warm_up_of,
)
from rich.console import Console
from rich.table import Table

from dpllm.model import processes

warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
warnings.filterwarnings("ignore", message="`gradient_checkpointing_")  # renamed during transformers 5

ROOT = Path(__file__).resolve().parents[1]
MEMORY_FLAG = "--measure-memory"
# Return small freed blocks to the system too, so that the peak is that of live tensors.
MALLOC = {
    "MALLOC_MMAP_MAX_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
NOTES = {
    "variants": "non_private and hf_loss are plain PyTorch; dpllm is Engine; opacus_hooks and "
    "opacus_ghost are stock Opacus (hooks and optimizers), not Engine, which would add float64 sums and checks to them; fastdp "
    "is fastDP as it comes, which trains no RMSNorm, adds noise in float32 and does not stop a gradient that is not finite.",
    "checkpointing": "Non-reentrant for non_private, hf_loss and dpllm. Opacus refuses that, so its variants run reentrant with "
    "enable_input_require_grads.",
    "mixed": "Rows of T / 8 to T tokens, evenly spread. Every variant but dpllm gets them sorted, padded to the longest of a "
    "physical batch (grouped by length); dpllm lays them one after the other in its passes.",
    "memory": "Weights and optimizer state included. CUDA: largest torch.cuda.max_memory_allocated of a step. CPU: VmHWM of a "
    "second step in a process of its own, less what the process held before the model was built.",
    "allocator": "CPU: timed with MALLOC_MMAP_MAX_=0 and no trimming (scripts/bench_step sets it), so that freed memory stays "
    "with the process; with --allocator default as glibc comes. Memory is measured with the opposite.",
    "limit": "LoRA: FLOPs of the step as scripts/scaling.py counts them, over matrix_flops_per_s, the best rate of one product "
    "of the model's width and inner width with these tokens, in the precision of the base, measured before and after.",
    "precision": "CUDA: bf16 autocast over a base in bf16 (lora) or float32 (frozen), as dpllm trains. CPU: float32.",
}


TOKENS = {"tiny": 64, "cpu": 1024, "body": 1024, "1b": 16_384, "8b": 4096}  # of a physical batch
MIXED_ROWS = {"1b": 64}  # of a logical batch, else 32
METHODS = ("lora", "frozen")
RAW = ("time_s", "cpu_time_s", "peak_memory_bytes")


def timed(step: Step, batches: Batches, device: torch.device) -> dict[str, float]:
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    cpu, start = time.process_time(), time.perf_counter()
    step(batches)
    if cuda:
        torch.cuda.synchronize()
    seconds = {"time_s": time.perf_counter() - start, "cpu_time_s": time.process_time() - cpu}
    return {**seconds, "peak_memory_bytes": torch.cuda.max_memory_allocated()} if cuda else seconds


def measure(
    bench: Bench, case: dict[str, Any], options: argparse.Namespace, deadline: float
) -> dict[str, dict[str, Any]]:
    """Interleaved repetitions of one configuration until the deadline, at least one; the first, a warm-up, is dropped."""
    names, shape = options.variants, options.shape
    if case["mixed"]:
        names = [name for name in names if not name.startswith("opacus")]
        lengths = mixed_lengths(case["length"], MIXED_ROWS.get(shape, 32))
    else:
        lengths = [case["length"]] * (case["rows"] * options.physical_batches)
    batches = random_batches(bench, shape, case["rows"], lengths, case["length"], options.tokens_per_pass)
    print(f"{len(batches.passes)} passes of {batches.packing}", file=sys.stderr, flush=True)
    warm_up = warm_up_of(bench, shape, batches)
    results: dict[str, dict[str, Any]] = {name: {"error": None, **{raw: [] for raw in RAW}} for name in names}
    for repetition in range(options.repetitions + 1):
        if repetition > 1 and time.monotonic() > deadline:
            break
        start = repetition % len(names)
        for name in names[start:] + names[:start]:
            if results[name]["error"]:
                continue
            try:
                with attached(bench, name, checkpointing=case["checkpointing"], warm_up=warm_up) as step:
                    seen = timed(step, batches, bench.device)
            except Exception as error:  # a variant that fails is a result too
                reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                results[name] = {"error": reason, **{raw: [] for raw in RAW}}
                continue
            print(f"{repetition}: {name} {seen['time_s']:.3f} s", file=sys.stderr, flush=True)
            for key, value in seen.items():
                results[name][key] += [value] if repetition else []
    if bench.device.type == "cpu" and options.memory:
        for name in names:
            if not results[name]["error"]:
                results[name].update(memory_alone(case | {"variant": name}, options))
    tokens = sum(lengths)
    for values in results.values():
        values["median_s"] = statistics.median(values["time_s"]) if values["time_s"] else None
        values["tokens_per_s"] = tokens / values["median_s"] if values["time_s"] else None
        for short, raw in zip(("time", "cpu_time", "memory"), RAW, strict=True):
            values[f"{short}_ratio"] = ratio(values, results[names[0]], raw)
    return results


def memory_alone(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of one variant in a separate process; empty without /proc."""
    if not Path("/proc/self/clear_refs").exists():
        return {}
    request = json.dumps(
        {**case, **{name: getattr(options, name) for name in ("shape", "physical_batches", "tokens_per_pass")}}
    )
    path = os.pathsep.join(sys.path)  # with fastDP's checkout
    command = [sys.executable, str(Path(__file__).resolve()), MEMORY_FLAG, request]
    done = subprocess.run(
        command, env={**os.environ, **MALLOC, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"memory_error": next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")}
    return {"peak_memory_bytes": [json.loads(done.stdout.splitlines()[-1])]}


def memory_child(request: dict[str, Any]) -> int:
    """Peak bytes of a second logical step, less the memory of the process before the model was built."""

    def status(key: str) -> int:
        match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert match is not None
        return 1024 * int(match[1])

    def step_twice(shape: str, rows: int, length: int) -> int:
        """Returns the memory before the model was built; afterwards the process's peak is that of the second step."""
        gc.collect()
        malloc_trim(0)
        before = status("VmRSS")
        bench = build(shape, request["method"], torch.device("cpu"))
        lengths = [length] * (rows * request["physical_batches"])
        batches = random_batches(bench, shape, rows, lengths, length, request["tokens_per_pass"])
        settings: Any = {"checkpointing": request["checkpointing"], "warm_up": batches}
        with attached(bench, request["variant"], **settings) as step:
            gc.collect()
            malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            step(batches)
        return before

    malloc_trim = ctypes.CDLL(None).malloc_trim
    step_twice("tiny", 1, 16)  # memory that libraries allocate on first use does not count
    before = step_twice(request["shape"], request["rows"], request["length"])
    return status("VmHWM") - before


def ratio(over: dict[str, Any], under: dict[str, Any], raw: str) -> float | None:
    """Median of the repetitions' ratios; None if one side has no numbers."""
    ratios = [numerator / denominator for numerator, denominator in zip(over[raw], under[raw], strict=False)]
    return statistics.median(ratios) if ratios else None


def limit(bench: Bench, case: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """The lower limit of a step's time: the FLOPs of its matrix products at the rate measured on this device."""
    shape, tokens = scaling.Shape(*SHAPES[options.shape].values()), case["rows"] * case["length"]
    flops_per_token = scaling.flops_per_token(shape, case["length"], checkpointing=case["checkpointing"])
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    rate = matrix_rate(bench.device, dtype, tokens, shape.width, shape.inner)
    flops = options.physical_batches * tokens * flops_per_token
    return {"flops": flops, "matrix_flops_per_s": rate, "limit_s": flops / rate}


def bars(result: dict[str, Any], *, memory: bool) -> list[dict[str, Any]]:
    """The bars between the variants of one configuration; ``met`` is None if a side has no numbers."""
    lora, rows = result["method"] == "lora", []
    wanted = [
        ("dpllm", "non_private", "time_s", "<=", 1.03 if lora else 1.12),
        ("dpllm", "non_private", "peak_memory_bytes", "<=", 1.10),
        ("opacus_ghost", "dpllm", "time_s", ">=", 1.5 if result["length"] < 1024 else 2.0),
    ]
    if result["mixed"]:
        wanted = [("dpllm", "non_private", "time_s", "<=", 1.10)]
    wanted += [("dpllm", "hf_loss", *row[2:]) for row in wanted if row[1] == "non_private"]
    for over, under, raw, sign, limit in wanted if lora else [row for row in wanted if row[0] == "dpllm"]:
        if not {over, under} <= result["variants"].keys() or (raw == RAW[2] and not memory):
            continue  # not asked for
        sides = [result["variants"][name] for name in (over, under)]
        measured, sides_compared = ratio(*sides, raw), f"{'memory' if raw == RAW[2] else 'time'} {over} / {under}"
        row = {
            "configuration": label(result),
            "what": sides_compared,
            "bar": f"{sign} {limit:.2f}",
            "measured": measured,
        }
        row["measured_cpu_time"] = None if raw == RAW[2] else ratio(*sides, "cpu_time_s")
        rows.append(
            {**row, "met": None if measured is None else measured <= limit if sign == "<=" else measured >= limit}
        )
    return rows


def label(case: dict[str, Any]) -> str:
    on = "on" if case["checkpointing"] else "off"
    upto = "<" if case["mixed"] else ""
    return f"{case['method']} T={upto}{case['length']} R={case['rows']} checkpointing {on}"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table_of(result: dict[str, Any]) -> Table:
    table = Table("variant", title=label(result), title_justify="left")
    for column in (
        "median s",
        "min s",
        "max s",
        "tokens/s",
        "of limit",
        "time ratio",
        "CPU ratio",
        "peak MB",
        "mem. ratio",
    ):
        table.add_column(column, justify="right")
    for name, v in result["variants"].items():
        times = [number(statistic(v["time_s"])) if v["time_s"] else "-" for statistic in (statistics.median, min, max)]
        megabytes = number(max(v["peak_memory_bytes"], default=0) / 1e6 or None, 0)
        ratios = [number(v[key]) for key in ("time_ratio", "cpu_time_ratio", "memory_ratio")]
        share = number(result["limit_s"] / v["median_s"], 2) if v["median_s"] and "limit_s" in result else "-"
        table.add_row(name, *times, number(v["tokens_per_s"], 0), share, *ratios[:2], megabytes, ratios[2])
    return table


def table_of_bars(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("configuration", "what", "bar", "measured", "CPU time", "", title="bars", title_justify="left")
    words = {True: "met", False: "[bold red]not met[/]", None: "not measured"}
    for row in rows:
        measured = number(row["measured"]), number(row["measured_cpu_time"])
        table.add_row(row["configuration"], row["what"], row["bar"], *measured, words[row["met"]])
    return table


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="scripts/bench_step", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b" if cuda else "cpu")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of a row (default: 256 1024)")
    parser.add_argument("--rows", type=int, help="rows of a physical batch (default: what fills the shape's tokens)")
    parser.add_argument(
        "--rows-of",
        nargs="+",
        choices=("equal", "mixed"),
        default=["equal"],
        help="lengths (default: equal; see notes)",
    )
    parser.add_argument("--checkpointing", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--fastdp", type=Path, metavar="DIR", help="a checkout of awslabs/fast-differential-privacy to add"
    )
    parser.add_argument(
        "--allocator",
        choices=("kept", "default"),
        default="kept",
        help="see notes; read by scripts/bench_step, on a CPU",
    )
    parser.add_argument("--repetitions", type=int, default=7, help="timed ones; one more comes first")
    parser.add_argument("--tokens-per-pass", type=int, help="of dpllm (default: as train.tokens_per_pass: auto has it)")
    parser.add_argument("--physical-batches", type=int, default=2, help="in a logical step (default: 2)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="no peak memory on a CPU")
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        help="seconds, of which each case has a share, after which one repetition is enough",
    )
    parser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/step-SHAPE-DATE.json)")
    parser.add_argument("--strict", action="store_true", help="exit code 1 unless every bar that was asked for is met")
    options = parser.parse_args(arguments)
    options.deadline = time.monotonic() + options.limit
    options.lengths = options.lengths or ([16, 32] if options.shape == "tiny" else [256, 1024])
    # The baseline of the ratios; on a GPU it is Trainer's loss, because losses in chunks are slower there.
    extra = [
        "hf_loss" if options.device == "cuda" else "non_private",
        *options.variants,
    ]
    if options.fastdp:
        sys.path.append(str(options.fastdp.resolve()))
        extra += PEERS
    options.variants = list(dict.fromkeys(extra))  # the baseline of the ratios always runs
    return options


def main(options: argparse.Namespace) -> int:
    started, begun = datetime.now(UTC), time.perf_counter()
    torch.set_float32_matmul_precision("highest")  # as dpllm.run.loop
    console = Console(width=None if sys.stdout.isatty() else 120)
    device = torch.device(options.device)
    output = options.output or ROOT / "benchmarks" / f"step-{options.shape}-{started.date()}.json"
    settings = {
        key: value for key, value in vars(options).items() if key not in ("output", "deadline", "limit", "fastdp")
    }
    report: dict[str, Any] = {
        "schema_version": 1,
        "date": started.isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": processes.versions(),
        "hardware": processes.hardware(),
        "settings": {**settings, "model": SHAPES[options.shape], "learning_rate": LEARNING_RATE},
        "notes": NOTES,
        "results": [],
        "bars": [],
    }
    console.print(f"{options.shape} on {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    cases = len(options.methods) * len(options.lengths) * len(options.checkpointing) * len(options.rows_of)
    for method in options.methods:
        bench = build(options.shape, method, device)
        print(f"model built after {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        for length in options.lengths:
            for on, kind in itertools.product(options.checkpointing, options.rows_of):
                if report["results"] and time.monotonic() > options.deadline:
                    print(
                        f"not measured for lack of time: rows of {kind} length, T {length}", file=sys.stderr, flush=True
                    )
                    continue
                rows = options.rows or max(1, TOKENS[options.shape] // length)
                case = {
                    "method": method,
                    "length": length,
                    "rows": rows,
                    "checkpointing": on == "on",
                    "mixed": kind == "mixed",
                }
                share = options.deadline - options.limit * (cases - 1 - len(report["results"])) / cases
                counted = method == "lora" and kind == "equal"
                before = limit(bench, case, options) if counted else {}
                result = {**case, "variants": measure(bench, case, options, share), **before}
                if counted:
                    result = min(result, {**result, **limit(bench, case, options)}, key=lambda one: one["limit_s"])
                report["results"].append(result)
                report["bars"] += bars(result, memory=options.memory or device.type == "cuda")
                console.print(table_of(result))
                for name, values in result["variants"].items():
                    if reason := values["error"] or values.get("memory_error"):
                        console.print(f"{name}: {reason}", markup=False)
                output.parent.mkdir(parents=True, exist_ok=True)  # each time, in case the run is interrupted
                output.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        del bench
        gc.collect()  # before the next model is built
    console.print(table_of_bars(report["bars"]))
    console.print(f"written to {output}")
    return int(options.strict and not all(row["met"] for row in report["bars"]))


if __name__ == "__main__":
    if sys.argv[1:2] == [MEMORY_FLAG]:
        print(memory_child(json.loads(sys.argv[2])))
        sys.exit()
    sys.exit(main(parse(sys.argv[1:])))
