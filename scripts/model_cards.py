"""Copies what may be published of finished runs, without weights, into model_cards/: card, statement, record, audit, check.

    python scripts/model_cards.py runs/clinic/eps-1=clinic-epsilon-1 runs/clinic/eps-inf=clinic-without-privacy

tests/unit/test_model_cards.py makes every card again from what lies there. model_cards/README.md names the commands that
made the runs.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from dpllm.artifacts import BLOCK, CARD
from dpllm.config import dump_config
from dpllm.report import recipe
from dpllm.report.person import FILE
from dpllm.report.verify import verify
from dpllm.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]


def publish(run: RunDir, to: Path) -> None:
    found = verify(run.export)
    if found.failed:
        wrong = "; ".join(f"{check.name}: {check.detail}" for check in found.checks if check.status == "failed")
        raise SystemExit(f"{run.root}: does not verify ({wrong})")
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for path in (run.plan, run.run, *(run.export / name for name in (CARD, BLOCK, FILE))):
        if path.exists():
            shutil.copy(path, to)
    if (run.export / "audit").exists():
        shutil.copytree(run.export / "audit", to / "audit")
    (to / "config.yaml").write_text(dump_config(recipe.publishable(run.load_config())), encoding="utf-8")
    lines = [f"{check.status:9} {check.name}: {check.detail}\n" for check in found.checks]
    (to / "verification.txt").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    for word in sys.argv[1:]:
        path, _, name = word.partition("=")
        publish(RunDir(Path(path)), ROOT / "model_cards" / (name or Path(path).name))
        print(f"model_cards/{name or Path(path).name}")
