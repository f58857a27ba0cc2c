"""The main job on the embedded model and data: train with and without differential privacy, audit, compare, card.

Started by scripts/quickstart. Prints the command that does the same before each part, so that it can be typed alone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rich.console import Console

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as dpllm.cli does, before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # rows of so small a model take half as long again on two threads
RECIPE = "recipes/smoke/clinic.yaml"


def typing(console: Console, command: str) -> None:
    """Shows what to type, whole, so that it can be copied."""
    console.print(f"\n[bold]$ {command}[/]", soft_wrap=True, highlight=False)


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
    ledger = {"privacy.ledger": str(output / "ledger.sqlite")}
    runs = {
        "baseline": {"privacy.enabled": False, **ledger, "output_dir": str(output / "baseline")},
        "dp": {**ledger, "output_dir": str(output / "dp")},
    }
    for name, overrides in runs.items():
        typed = " ".join(
            f"--{key} {str(value).lower() if value is False else value}" for key, value in overrides.items()
        )
        typing(console, f"dpllm train {RECIPE} --overwrite {typed}")
        train(load_config(RECIPE, overrides), Start(overwrite=True), console=console)
        twin = RunDir(output / "baseline") if name == "dp" else None
        typing(console, f"dpllm audit {output / name}" + (f" --twin {twin.root}" if twin else ""))
        console.print(terminal.table(audit(RunDir(output / name), twin=twin)))
    baseline, private = RunDir(output / "baseline"), RunDir(output / "dp")
    typing(console, f"dpllm card {private.root}; dpllm compare {baseline.root} {private.root}")
    card = write_card(private)
    write_card(baseline)
    comparison = compare([baseline, private])
    console.print(comparison.table())
    console.print(f"card    {card}\nfigure  {comparison.output / 'comparison.png'}\nledger  {output / 'ledger.sqlite'}")
    console.print(f"{time.time() - start:.0f} s after installation. Look at the card, then read recipes/lora/e2e.yaml.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart"))
