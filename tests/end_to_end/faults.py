"""Kills training runs with SIGKILL at random moments and starts them again until they are complete.

Run as a program: it imports everything once and forks a child for each attempt. A child tells through a pipe which phase
it is in, and appends each noised sum to a file before the sum exists. Goes out: ROOT/attempts.json, for test_faults.py.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import remembered

STEPS = 8
TARGETS = {
    "prepare": "before the reservation",
    "step": "between charge and update",
    "checkpoint": "while a checkpoint is written",
    "export": "during the export",
    "finish": "after the export",
}


@dataclass
class Attempt:
    """One process: how it was started, how it was to be killed, and what it was doing then."""

    run: str
    command: list[str]
    aim: str
    killed: bool = False
    code: int = 0
    seen: list[str] = field(default_factory=list)

    @property
    def hit(self) -> str | None:
        """The phase in which the process was killed."""
        if not self.killed:
            return None
        inside: list[str] = []
        for word in self.seen:
            phase = word[1:].split()[0]
            if word[0] == "+":
                inside.append(phase)
            elif phase in inside:
                inside.remove(phase)
        if "prepare" in inside and ("+reserve" in self.seen or "--resume" in self.command):
            return "elsewhere"
        return next((TARGETS[phase] for phase in reversed(inside) if phase in TARGETS), "elsewhere")


def instrument(attempt: int, pipe: int, noise: Path, die_in_step: int | None) -> None:
    """Wraps what a child calls, so that it says where it is."""
    from dpllm.ledger import Ledger
    from dpllm.privacy.engine import StepEngine
    from dpllm.privacy.noise import GaussianNoise
    from dpllm.run import checkpoint, loop

    log = os.open(noise, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    charged: list[tuple[str, int]] = []

    def say(text: str) -> None:
        os.write(pipe, f"{text}\n".encode())

    def marked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any, **more: Any) -> Any:
            say(f"+{name}")
            result = call(*arguments, **more)
            say(f"-{name}")
            return result

        return inner

    charge, step, draw = Ledger.charge, StepEngine.step, GaussianNoise.draw

    def charging(ledger: Any, entry: str, number: int) -> None:
        charge(ledger, entry, number)
        charged.append((entry, number))

    def stepping(engine: Any, *batches: Any) -> Any:
        if charged[-1][1] == die_in_step:
            os.kill(os.getpid(), signal.SIGKILL)
        say("+step")
        result = step(engine, *batches)
        say("-step")
        return result

    def drawing(stream: Any, size: int) -> Any:
        value = draw(stream, size)
        entry, number = charged[-1]
        os.write(log, f"{attempt} {entry} {number}\n".encode())
        return value

    loop.prepare = marked("prepare", loop.prepare)
    checkpoint.save_resume = marked("checkpoint", checkpoint.save_resume)
    checkpoint.export = marked("export", checkpoint.export)
    loop.reserve_all = marked("reserve", loop.reserve_all)
    Ledger.charge, StepEngine.step, GaussianNoise.draw = charging, stepping, drawing  # type: ignore[method-assign]
    finish = Ledger.finish

    def finishing(*arguments: Any) -> None:  # the phase lasts until the process ends
        say("+finish")
        finish(*arguments)

    Ledger.finish = finishing  # type: ignore[method-assign]


def fork(attempt: int, arguments: list[str], folder: Path, die_in_step: int | None) -> tuple[int, int]:
    """A child that runs ``dpllm ARGUMENTS``: its process id and the end of its pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 70
    try:
        os.close(reading)
        output = os.open(folder / f"attempt-{attempt}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        instrument(attempt, writing, folder / "noise.log", die_in_step)
        from dpllm.cli import main

        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def words(pipe: int, wait: float) -> Iterator[str]:
    """What a child says within so many seconds, word by word; ends early where it ends."""
    end, rest = time.monotonic() + wait, b""
    while (left := end - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        chunk = os.read(pipe, 4096)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode() for line in lines)


def attempt_once(number: int, attempt: Attempt, folder: Path, draw: random.Random, lasts: dict[str, float]) -> None:
    """Runs one child and kills it as its aim says; ``lasts`` is how long phases take, and learns from what is seen."""
    begun = {"all": time.monotonic()}
    child, pipe = fork(number, attempt.command, folder, 3 if attempt.aim == "itself" else None)
    skip = draw.choice([0, 1, 2]) if attempt.aim in {"step", "checkpoint"} else 0
    for word in words(pipe, draw.uniform(0, lasts["all"]) if attempt.aim == "moment" else 120):
        attempt.seen.append(word)
        phase = word[1:]
        if word[0] == "+":
            begun[phase] = time.monotonic()
        else:
            lasts[phase] = min(lasts.get(phase, 1.0), time.monotonic() - begun[phase])
        if word == f"+{attempt.aim}":
            skip -= 1
            if skip < 0:
                time.sleep(draw.uniform(0, 0.8 * lasts.get(attempt.aim, 0.01)))
                break
    else:
        if attempt.aim == "none":
            lasts["all"] = max(lasts["all"], time.monotonic() - begun["all"])
    if attempt.aim == "moment" or attempt.aim in TARGETS:
        os.kill(child, signal.SIGKILL)  # not waited for yet, so that the number is still this child's
    attempt.seen += words(pipe, 120)
    attempt.code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    attempt.killed = attempt.code == -signal.SIGKILL
    os.close(pipe)
    if attempt.code not in (0, -signal.SIGKILL):
        output = (folder / f"attempt-{number}.log").read_text()[-4000:]
        raise SystemExit(f"attempt {number} {attempt} ended with {attempt.code}:\n{output}")


def missing(attempts: list[Attempt]) -> list[str]:
    """Phases in which no process was killed yet."""
    hit = {attempt.hit for attempt in attempts}
    return [aim for aim, name in TARGETS.items() if name not in hit]


def enough(attempts: list[Attempt], kills: int) -> bool:
    return sum(attempt.killed for attempt in attempts) >= kills and not missing(attempts)


def next_aim(attempts: list[Attempt], typed: list[str], kills: int, draw: random.Random) -> str:
    """Where the next kill goes: first to every phase once, then mostly to random moments."""
    if not attempts:
        return "itself"  # in its third step, after the charge: the exact case
    if len(attempts) == 1 or enough(attempts, kills):
        return "none"  # goes on to the end, and says how long phases last
    wanted = missing(attempts)
    aims = [aim for aim in wanted or TARGETS if aim != "prepare" or "--resume" not in typed]
    if not aims:
        return "none"  # only a new run can be killed before its reservation
    return draw.choice(aims) if draw.random() < (0.9 if wanted else 0.45) else draw.choice(["moment"] * 5 + ["none"])


def command(place: Any) -> list[str] | None:
    """What a user types next; None where the run is complete."""
    from dpllm.files import read_json
    from dpllm.run.directory import RunDir

    run = RunDir(place.run)
    if run.run.exists() and read_json(run.run)["status"] == "completed":
        return None
    how = ["--resume"] if run.checkpoints() else ["--overwrite"] if run.root.exists() else []
    return ["train", str(place.recipe), *how]


def main(root: Path, base: Path, kills: int, seed: int) -> None:
    """Runs until so many kills happened and every phase was hit; writes what happened."""
    import peft.tuners.lora  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    from running import done, make_place

    import dpllm.run.loop  # noqa: F401  the slow imports, once for all children

    torch.set_num_threads(1)
    draw, lasts = random.Random(seed), {"all": 1.0}
    attempts: list[Attempt] = []
    number = 0
    while not enough(attempts, kills):
        folder = root / f"run-{number}"
        number += 1
        settings = {
            "train.steps": STEPS,
            "train.checkpoint_every": draw.choice([1, 2]),
            "privacy.epsilon": 2.0,
            "privacy.secure_noise": draw.random() < 0.5,
        }
        place = make_place(folder, base, settings)
        done("plan", place.recipe)  # keeps the answers of the accountant, for the children too
        shutil.rmtree(place.run, ignore_errors=True)
        while (typed := command(place)) is not None:
            attempts.append(Attempt(folder.name, typed, next_aim(attempts, typed, kills, draw)))
            attempt_once(len(attempts) - 1, attempts[-1], folder, draw, lasts)
            if len(attempts) > 3 * kills + 40:
                raise SystemExit(f"no end in sight: {attempts}")
    report = [{**asdict(attempt), "hit": attempt.hit} for attempt in attempts]
    (root / "attempts.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    with remembered.packages(), remembered.accounting(Path(sys.argv[1]) / "accounting"):  # for all children
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
