"""How the processor time of a recipe's steps divides into stages, and its peak memory.

    python scripts/stages.py recipes/smollm/smollm2-135m-e2e.yaml --train.steps 2 --train.batch_size 120 --output_dir runs/x

Trains as ``dpllm train`` does, under cProfile with the processor time of all threads, so that other work on the machine moves the
stages little; seconds are those of a busy processor, not of a clock. Batches are drawn by another thread, and are not counted.
"""

import cProfile
import pstats
import sys
import time

from dpllm.cli import main
from dpllm.model.memory import peak_memory
from dpllm.run import loop

STAGES = {  # what is printed: a file of the package and the functions in it
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
    )  # and neither the self-check nor evaluations
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
