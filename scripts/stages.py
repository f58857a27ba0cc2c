"""Processor time of a recipe's steps by stage, and their peak memory.

    python scripts/stages.py recipes/smollm/smollm2-135m-e2e.yaml --train.steps 2 --train.batch_size 120 --output_dir runs/x

Trains as ``dpllm train`` does, under cProfile with the processor time of all threads, so that other work on the machine has
little effect on it. Seconds are processor time, not wall-clock time. Another thread draws the batches, which is not counted.
"""

import cProfile
import pstats
import sys
import time

from dpllm.cli import main
from dpllm.model.memory import peak_memory
from dpllm.run import loop

STAGES = {  # label of a stage: a file of the package and functions in it
    "steps, all of them": ("run/loop.py", "_take_steps"),
    "forward pass and losses": ("privacy/engine.py", "losses"),
    "head and losses, of that": ("privacy/loss.py", "fused_losses"),
    "backward pass, with taps": ("torch/_tensor.py", "backward"),
    "gradients of units, of that": ("privacy/clipping.py", "_receive"),
    "norms of units": ("privacy/gradients.py", "square_norm"),
    "clip and add up": ("privacy/gradients.py", "add_all"),
    "noise": ("privacy/engine.py", "_release"),
    "update": ("privacy/engine.py", "_apply"),
    "ledger": ("ledger/budgets.py", "charge"),
    "checkpoint": ("run/record.py", "save"),
}


def run(arguments):
    profile, steps = cProfile.Profile(time.process_time), loop._take_steps
    loop._take_steps = lambda *step_arguments: profile.runcall(
        steps, *step_arguments
    )  # without the self-check and evaluations
    code = main(["train", *arguments])
    seconds = {}
    for (path, _, function), (*_, cumulative, _) in pstats.Stats(profile).stats.items():
        for stage, (file, name) in STAGES.items():
            if path.endswith(file) and function == name:
                seconds[stage] = cumulative
    total = seconds["steps, all of them"]
    for stage in STAGES:
        if stage in seconds:
            print(f"{stage:30} {seconds[stage]:8.1f} s  {seconds[stage] / total:6.1%}")
    print(f"peak memory {(peak_memory() or 0) / 1e9:.2f} GB")
    return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
