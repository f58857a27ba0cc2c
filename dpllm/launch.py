"""What the launcher was asked for, against what it started.

Comes in: the command line of ``accelerate launch``, its launch file, the devices of this machine. Goes out: nothing, or an
error. Must not know the recipe or the data, and must not start or stop anything.

``accelerate launch`` starts one process where the file asks for several, without a word: with ``use_cpu`` or ``--cpu``, and
with ``distributed_type: "NO"``. And a launch file for GPUs starts as many gloo processes on a machine that has none. Both would
train, for days, on something else than was meant. torchrun does neither: it says in WORLD_SIZE what it started.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpllm.errors import ConfigError

# How a command line names the launcher, and the program of which `launch` is a subcommand.
_LAUNCHERS = ("accelerate-launch", "accelerate-launch.exe", "accelerate.commands.launch")
_PROGRAMS = ("accelerate", "accelerate.exe", "accelerate.commands.accelerate_cli")


@dataclass(frozen=True)
class Asked:
    """What somebody asked ``accelerate launch`` for.

    Attributes:
        num_processes: On all machines together; None where nobody said a number.
        gpus: Whether GPUs were asked for: ``--multi_gpu``, ``--gpu_ids``, or a launch file with the key ``gpu_ids``.
        cpu: Whether a CPU was asked for: ``--cpu``, or ``use_cpu: true``.
        where: The launch file, or "the command line", for messages.
    """

    num_processes: int | None
    gpus: bool
    cpu: bool
    where: str


def check(num_processes: int) -> None:
    """Compares the processes that run with those that were asked for. Call it once the process group is there.

    Only the process that started this one is looked at: it is the launcher, or this run was not launched by one. What cannot
    be read (no permission, another launcher, a launch file that is gone by now) is no error.

    Args:
        num_processes: Of this run, on all machines.

    Raises:
        ConfigError: Fewer processes run than were asked for.
    """
    asked = started_by()
    if asked is None or asked.num_processes is None or num_processes >= asked.num_processes:
        return
    number = asked.num_processes
    told = "With --cpu or use_cpu accelerate starts one process only. " if asked.cpu else ""
    file = "cpu_2.yaml" if asked.cpu or not _gpus() else "gpu_ddp.yaml"
    raise ConfigError(
        f"{asked.where} asks for {number} processes, and {num_processes} {'was' if num_processes == 1 else 'were'} started: "
        f"the run would take longer than was meant. {told}Type accelerate launch --config_file recipes/accelerate/{file} "
        f"--num_processes {number} recipes/train.py RECIPE, or --num_processes {num_processes} if that is what you want."
    )


def check_devices() -> None:
    """Compares the processes of this machine with its GPUs. Call it before the process group is made.

    Raises:
        ConfigError: More processes than GPUs, of which several would share one or fail; or GPUs were asked for and there is none.
    """
    gpus = _gpus()
    local = max(_number("LOCAL_WORLD_SIZE", 1), _number("LOCAL_RANK", 0) + 1)
    if gpus and local > gpus:
        raise ConfigError(
            f"{local} processes were started on a machine that shows {gpus} GPU{'s' if gpus > 1 else ''}: each needs one of its "
            f"own. Type --num_processes {gpus} (accelerate; for several machines, of all of them together) or "
            f"--nproc_per_node {gpus} (torchrun), or free the other GPUs; CUDA_VISIBLE_DEVICES may hide some."
        )
    asked = None if gpus else started_by()
    if asked is not None and asked.gpus and not asked.cpu:
        raise ConfigError(
            f"{asked.where} asks for GPUs, and torch sees none here: the run would train on the CPU, many times slower. Check "
            "the driver and CUDA_VISIBLE_DEVICES; to train on the CPU, type accelerate launch --config_file "
            "recipes/accelerate/cpu_2.yaml recipes/train.py RECIPE (two processes), or cpu.yaml (one)."
        )


def started_by() -> Asked | None:
    """What this process's launcher was asked for; None where it was not ``accelerate launch`` or cannot be read."""
    import psutil

    try:
        parent = psutil.Process(os.getppid())
        command, folder = parent.cmdline(), Path(parent.cwd())
    except (psutil.Error, OSError):
        return None
    return asked_for(command, folder)


def asked_for(command: Sequence[str], folder: Path) -> Asked | None:
    """Reads a command line as accelerate does.

    Args:
        command: Words, the program first.
        folder: Working directory of the launcher, to which the name of the launch file is relative.

    Returns:
        None where the command is not ``accelerate launch``, or its launch file cannot be read.
    """
    words = _arguments(command)
    if words is None:
        return None
    from accelerate.commands.config import config_args
    from accelerate.commands.launch import launch_command_parser

    parser: argparse.ArgumentParser = launch_command_parser()
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            typed = parser.parse_args(words)
    except SystemExit:
        return None
    number, gpus, cpu, where = typed.num_processes, typed.multi_gpu or bool(typed.gpu_ids), typed.cpu, ""
    name = typed.config_file
    if name is None and not cpu and Path(config_args.default_config_file).is_file():
        name = config_args.default_config_file  # accelerate reads it, too, where no other is named
    if name is not None:
        try:
            file = config_args.load_config_from_file(str(folder / name))
        except Exception:  # whatever a file can be; the launcher has read it, and said so if it could not
            return None
        if number is None:
            number, where = (file.num_processes if file.num_processes > 0 else None), f"the launch file {name}"
        if not gpus and file.gpu_ids is not None:
            gpus, where = True, f"the launch file {name}"
        cpu = cpu or bool(file.use_cpu)
    return Asked(number, gpus, cpu, where or "the command line of accelerate launch")


def _arguments(command: Sequence[str]) -> list[str] | None:
    """The words behind ``accelerate launch``, however it was called; None where it was not."""
    for place, word in enumerate(command[:4]):
        # python -m shows the module's file in place of its name
        module = ".".join(Path(word).with_suffix("").parts[-3:]) if word.endswith(".py") else Path(word).name
        rest = list(command[place + 1 :])
        if module in _LAUNCHERS:
            return rest
        if module in _PROGRAMS:
            return rest[1:] if rest[:1] == ["launch"] else None
    return None


def _gpus() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _number(name: str, otherwise: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return otherwise
