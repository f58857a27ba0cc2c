"""Two processes against one, on the same logical batches: how much faster a step gets, printed and written as JSON.

    python scripts/bench_processes.py [--shape cpu] [--length 256] [--batches 4] [--repetitions 7] [--output FILE]

One process alone, and a group of two (gloo), wait with the model that bench_step builds; each in its turn takes a step over the
same rows, one thread for each process. A ratio is the median of the repetitions' ratios. The bar: 1.8, on a machine
with a core for each process that nobody else uses. The ratio of CPU time, of the one process over the busier of the two,
says what the machine's load does not change: how evenly the work is divided, and what the group adds to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from _machine import commit, machine, versions

ROOT = Path(__file__).resolve().parents[1]
BAR = 1.8
WORKER = "--worker"


def work(request: dict[str, Any]) -> None:
    """A process of the benchmark: takes a step for each line of input, and prints its times."""
    import torch
    from _step_variants import build, random_batches, with_engine
    from torch import distributed

    rank, world = request["rank"], request["world"]
    if world > 1:
        rendezvous = f"file://{request['store']}"
        distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    torch.set_float32_matmul_precision("highest")
    bench = build(request["shape"], "lora", torch.device("cpu"))
    lengths = [request["length"]] * (request["rows"] * request["batches"])
    batches = random_batches(bench, request["shape"], request["rows"], lengths, request["length"])
    batches = replace(batches, passes=batches.passes[rank::world])
    with with_engine(bench) as step:
        for _ in sys.stdin:  # one line for each step
            cpu, start = time.process_time(), time.perf_counter()
            step(batches)
            seconds = {"time_s": time.perf_counter() - start, "cpu_time_s": time.process_time() - cpu}
            print(json.dumps(seconds), flush=True)
    if world > 1:
        distributed.destroy_process_group()


class Group:
    """One or two processes that take a step on request."""

    def __init__(self, world: int, request: dict[str, Any]) -> None:
        """Starts the processes."""
        command = [sys.executable, str(Path(__file__).resolve()), WORKER]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        requests = [json.dumps({**request, "rank": rank, "world": world}) for rank in range(world)]
        environment = {**os.environ, "PYTHONPATH": paths}
        self._processes = [
            subprocess.Popen(
                [*command, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            for text in requests
        ]

    def step(self) -> dict[str, float]:
        """The times of the slowest process for one step.

        Raises:
            RuntimeError: A process has ended.
        """
        answers = []
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("step\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a process ended with exit code {process.wait()}; its message stands above")
            answers.append(json.loads(line))
        return {key: max(answer[key] for answer in answers) for key in answers[0]}

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.stdin.close() if process.stdin is not None else None
            process.wait()


def main(options: argparse.Namespace) -> int:
    """Measures, prints, writes."""
    output = options.output or ROOT / "benchmarks" / f"processes-cpu-{datetime.now(UTC).date()}.json"
    store = output.with_suffix(f".{os.getpid()}.store")
    request = {key: getattr(options, key) for key in ("shape", "rows", "length", "batches")}
    groups: dict[str, Group] = {}
    times: dict[str, list[dict[str, float]]] = {"one": [], "two": []}
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        for world, name in enumerate(times, start=1):
            groups[name] = Group(world, {**request, "store": str(store.resolve())})
        for repetition in range(options.repetitions + 1):
            order = list(times) if repetition % 2 else list(times)[::-1]
            for name in order:
                seconds = groups[name].step()
                times[name] += [seconds] if repetition else []  # the first is a warm-up
    finally:
        for group in groups.values():
            group.close()
        store.unlink(missing_ok=True)

    def ratio(key: str) -> float:
        pairs = zip(times["one"], times["two"], strict=True)
        return round(statistics.median(one[key] / two[key] for one, two in pairs), 3)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "settings": {**request, "repetitions": options.repetitions, "threads": 1, "backend": "gloo"},
        "machine": {**machine(), "cores_of_this_process": cores},
        "versions": versions("dpllm", "torch", "transformers", "accelerate"),
        "bar": BAR,
        "times": times,
        "speed_up": ratio("time_s"),
        "cpu_time_ratio": ratio("cpu_time_s"),
    }
    output.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    ratios = f"{report['speed_up']} (bar {BAR}), of CPU time {report['cpu_time_ratio']}"
    print(f"two processes over one: {ratios}; load {machine()['load']}")
    print(f"written to {output}")
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="cpu", help="of bench_step")
    parser.add_argument("--rows", type=int, default=4, help="of a physical batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--batches", type=int, default=4, help="physical batches of a logical one; an even number")
    parser.add_argument("--repetitions", type=int, default=7, help="timed ones; one more comes first")
    parser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/processes-cpu-DATE.json)")
    options = parser.parse_args(arguments)
    if options.batches % 2:
        parser.error("--batches: two processes share them, so their number must be even")
    return options


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(json.loads(sys.argv[2]))
        sys.exit()
    sys.exit(main(parse(sys.argv[1:])))
