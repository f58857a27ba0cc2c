"""Processes of tests/distributed/test_runs.py: whole runs of several ranks, some of which go wrong.

Started with a folder and names of scenarios; leaves, for each, exit codes and what every rank wrote. Forked after the imports,
which take longer than a run.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import entropy
import remembered
import torch
from sharding_worker import LAUNCHED
from torch.distributed.fsdp import FSDPModule

from dpllm import cli
from dpllm.model import processes
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.noise import BandedNoise
from dpllm.run import loop

ROOT = Path(__file__).parents[2]
NOTES = ROOT / "dpllm" / "text" / "builtin" / "clinic"
STEPS = 4
RANK = "--rank"  # of a process that starts anew


def at_step(number: int, act: Callable[[StepEngine], object]) -> None:
    """Before the given step of this process, ``act``."""
    step, taken = StepEngine.step, [0]

    def acting(engine: StepEngine, *batches: object) -> object:
        taken[0] += 1
        if taken[0] == number:
            act(engine)
        return step(engine, *batches)  # type: ignore[arg-type]

    StepEngine.step = acting  # type: ignore[method-assign, assignment]


def killed(engine: StepEngine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(engine: StepEngine) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def frozen(engine: StepEngine) -> None:
    if os.environ["RANK"] == "0":  # as a machine that is lost: its process says nothing, nor does its store
        os.kill(os.getpid(), signal.SIGSTOP)


def moved(engine: StepEngine) -> None:
    with torch.no_grad():
        next(iter(engine.parameters.values())).view(-1)[0] += 1e-7


def other_version() -> None:
    result = processes.versions
    processes.versions = lambda: result() | {"peft": "0.0.1"}  # type: ignore[assignment]


def other_processor() -> None:
    torch.backends.cpu.get_cpu_capability = lambda: "older"  # type: ignore[assignment]


def unseen() -> None:
    """Nothing tells the processors apart but what they compute."""
    processes.kernels = lambda device: {}  # type: ignore[assignment]


def broken(engine: StepEngine) -> None:
    raise ValueError("a secret")


def cut(engine: StepEngine) -> None:
    assert isinstance(engine._model, FSDPModule)


def sharded(name: str) -> None:
    """Launches as recipes/accelerate/gpu_fsdp2.yaml does; a rank that adds noise keeps it, over its standard deviation."""
    os.environ.update(LAUNCHED)
    add, added = BandedNoise.add_to, []

    def noted(noise: BandedNoise, sum_P: torch.Tensor, scale: float) -> None:
        before_P = sum_P.clone()
        add(noise, sum_P, scale)
        added.append((sum_P - before_P) / scale)
        torch.save(torch.stack(added), Path(sys.argv[1]) / f"{name}.noise{os.environ['RANK']}.pt")

    BandedNoise.add_to = noted  # type: ignore[method-assign]
    at_step(1, cut)


@dataclass
class Scenario:
    """What the ranks do; ``odd`` and ``odd_words`` are for the last rank alone."""

    world: int
    words: dict[str, str] = field(default_factory=dict)
    odd: Callable[[], object] = lambda: None
    all_ranks: Callable[[], object] = lambda: None
    odd_words: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    odd_variables: dict[str, str] = field(default_factory=dict)  # the last rank starts anew with these
    of: str = ""  # whose run directory is used: its own, or that of a scenario before it


SEED = {"privacy.insecure_seed": "5"}
BANDED = {"privacy.noise": "banded", "privacy.bands": "3", "train.steps": "8"}
CANARIES = {"audit.canaries": "{groups: {1: 28}, references: 100}", "audit.gradient_canaries": "40"}
# An older processor:
OLDER = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SCENARIOS = {
    **{f"seeded_{world}": Scenario(world, SEED) for world in (1, 2, 3)},
    "banded": Scenario(1, SEED | BANDED),
    "banded_sharded": Scenario(2, SEED | BANDED, all_ranks=lambda: sharded("banded_sharded")),
    "sharded_stopped": Scenario(
        2, BANDED | CANARIES, odd=lambda: at_step(3, stopped), all_ranks=lambda: sharded("sharded_stopped")
    ),
    "sharded_resumed": Scenario(
        2, BANDED | CANARIES, all_ranks=lambda: sharded("sharded_resumed"), flags=("--resume",), of="sharded_stopped"
    ),
    "stopped": Scenario(2, odd=lambda: at_step(2, stopped)),
    "resumed_on_3": Scenario(3, flags=("--resume",), of="stopped"),
    "killed": Scenario(2, {"train.checkpoint_every": "1"}, odd=lambda: at_step(3, killed)),
    "resumed_on_1": Scenario(1, {"train.checkpoint_every": "1"}, flags=("--resume",), of="killed"),
    "broken": Scenario(2, odd=lambda: at_step(2, broken)),
    "hanging": Scenario(2, {"train.process_timeout": "2"}, odd=lambda: at_step(2, lambda engine: time.sleep(300))),
    "moved": Scenario(2, odd=lambda: at_step(3, moved)),
    "other_recipe": Scenario(2, odd_words={"train.learning_rate": "0.5"}),
    "other_train": Scenario(
        2, {"data.train": str(NOTES / "train.jsonl")}, odd_words={"data.train": str(NOTES / "eval.jsonl")}
    ),
    "other_eval": Scenario(
        2, {"data.eval": str(NOTES / "eval.jsonl")}, odd_words={"data.eval": str(NOTES / "train.jsonl")}
    ),
    "lost": Scenario(2, {"train.process_timeout": "2"}, all_ranks=lambda: at_step(2, frozen)),
    "other_version": Scenario(2, odd=other_version),
    "other_processor": Scenario(2, odd=other_processor),
    "rounds_bf16": Scenario(2, {"train.precision": "bf16"}, all_ranks=unseen, odd_variables=OLDER),
    "rounds_fp32": Scenario(2, {"train.precision": "fp32"}, all_ranks=unseen, odd_variables=OLDER),
    "no_model": Scenario(2, odd_words={"model.name_or_path": "nowhere"}),
    "over_target": Scenario(2, {"privacy.epsilon": "0.01"}),
    "too_many": Scenario(3, {"train.batch_size": "2"}),
}


def work(name: str, rank: int, port: int, folder: Path) -> None:
    scenario, odd = SCENARIOS[name], rank == SCENARIOS[name].world - 1 > 0
    if odd and not scenario.odd_variables.items() <= os.environ.items():
        words = [str(word) for word in (Path(__file__), RANK, name, rank, port, folder)]
        os.execve(sys.executable, [sys.executable, *words], os.environ | scenario.odd_variables)
    torch.set_num_threads(1)
    place = folder / (scenario.of or name)
    rendezvous = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": scenario.world, "MASTER_ADDR": "127.0.0.1"}
    if scenario.world > 1:
        os.environ |= {key: str(value) for key, value in rendezvous.items()} | {"MASTER_PORT": str(port)}
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{rank}.{stream}", os.O_WRONLY | os.O_CREAT), number)
    words = {
        "output_dir": str(place / "run"),
        "privacy.ledger": str(place / "ledger.sqlite"),
        "train.epochs": "null",
        "train.steps": str(STEPS),
        "audit.canaries": "null",
        "audit.gradient_canaries": "0",
        "data.eval": "null",
        "data.eval_public": "false",
        "train.batch_size": "24",
        "train.tokens_per_pass": "512",
        "privacy.noise_multiplier": "1.0",  # nothing to calibrate
        "privacy.epsilon": "50",
        **scenario.words,
    }
    scenario.all_ranks()
    if odd:
        words |= scenario.odd_words
        scenario.odd()
    loop.COMPARE_EVERY = 1
    overrides = [word for key, value in words.items() for word in (f"--{key}", value)]
    os.chdir(ROOT)
    with entropy.from_seed(name, rank):
        sys.exit(cli.main(["train", "recipes/smoke/clinic.yaml", *scenario.flags, *overrides]))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(folder: Path, names: list[str]) -> None:
    fork = multiprocessing.get_context("fork")
    for name in names:
        (folder / (SCENARIOS[name].of or name)).mkdir(exist_ok=True)
        port, began = free_port(), time.monotonic()
        ranks = [fork.Process(target=work, args=(name, r, port, folder)) for r in range(SCENARIOS[name].world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(90)
            if process.is_alive():  # a hang is what is tested: it must not hang the tests
                process.kill()
                process.join()
        codes = [process.exitcode for process in ranks]
        (folder / f"{name}.json").write_text(json.dumps({"codes": codes, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    if sys.argv[1] == RANK:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    with remembered.packages(), remembered.accounting(Path(sys.argv[1]) / "accounting"):
        main(Path(sys.argv[1]), sys.argv[2:])
