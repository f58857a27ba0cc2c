"""The main workflow on the embedded model and data: train with and without differential privacy, audit, compare, card.

Started by scripts/quickstart. Prints the equivalent dpllm command of each part.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in dpllm.cli, before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # with so small a model, two threads take half as long again
RECIPE = "recipes/smoke/clinic.yaml"


def typing(console: Console, command: str) -> None:
    """Shows a command on one line, so that it can be copied."""
    console.print(f"\n[bold]$ {command}[/]", soft_wrap=True, highlight=False)


def dpllm_(*command: str) -> tuple[str, subprocess.CompletedProcess[str]]:
    """Runs a command; returns it as a line, and the finished process."""
    done = subprocess.run(
        [sys.executable, "-m", "dpllm", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return shlex.join(["dpllm", *command]), done


def main(output: Path) -> None:
    start = time.time()
    from dpllm.auditing import terminal
    from dpllm.auditing.run import audit
    from dpllm.card.card import write_card
    from dpllm.comparison.compare import compare
    from dpllm.recipe.config import load_config
    from dpllm.run.directory import RunDir
    from dpllm.run.loop import train
    from dpllm.run.promise import Start

    console = Console()
    baseline, private = RunDir(output / "baseline"), RunDir(output / "dp")
    ledger = ["--privacy.ledger", str(output / "ledger.sqlite")]
    alone = ["train", RECIPE, "--overwrite", "--privacy.enabled", "false", *ledger, "--output_dir", str(baseline.root)]
    with ThreadPoolExecutor(1) as executor:  # in separate processes, on the other core
        baseline_work = executor.submit(
            lambda: [dpllm_(*command) for command in (alone, ["audit", str(baseline.root)])]
        )
        typing(console, f"dpllm train {RECIPE} --overwrite {shlex.join(ledger)} --output_dir {private.root}")
        overrides = {"privacy.ledger": ledger[1], "output_dir": str(private.root)}
        train(load_config(RECIPE, overrides), Start(overwrite=True), console=console)
        for command, done in baseline_work.result():
            typing(console, command)
            console.out(done.stdout, highlight=False)
            if done.returncode:
                sys.exit(done.returncode)
    typing(console, f"dpllm audit {private.root} --positive-control {baseline.root}")
    console.print(terminal.table(audit(private, positive_control=baseline)))
    typing(console, f"dpllm card {private.root}; dpllm compare {baseline.root} {private.root}")
    card = write_card(private)
    write_card(baseline)
    comparison = compare([baseline, private])
    console.print(comparison.table())
    console.print(f"card    {card}\nfigure  {comparison.output / 'comparison.png'}\nledger  {output / 'ledger.sqlite'}")
    console.print(f"{time.time() - start:.0f} s after installation. Look at the card, then read recipes/lora/e2e.yaml.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart"))
