"""Scores the same texts with dpllm and with the E2E challenge's own scripts, which need Java and their requirements.txt.

    git clone https://github.com/tuetschek/e2e-metrics
    python scripts/e2e_metrics.py e2e-metrics eval.jsonl train.jsonl

Comes in: a clone, and files of rows with prompt and completion. Of every prompt with two references or more, the first is
taken out as the text of a system; a second system drops words of it and shuffles some texts. Goes out: a line of each, a table.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from dpllm.comparison import text_scores
from dpllm.comparison.tasks import by_prompt


def worse(text: str, generator: random.Random) -> str:
    """The text without 15 % of its words; three of ten are shuffled too."""
    kept = [word for word in text.split() if generator.random() > 0.15]
    if generator.random() < 0.3:
        generator.shuffle(kept)
    return " ".join(kept) or "the"


def official(clone: Path, texts: list[str], references: list[list[str]]) -> list[float]:
    """BLEU, NIST, ROUGE-L and CIDEr as the scripts print them; METEOR, which they print too, is left out."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, given = Path(folder, "references.txt"), Path(folder, "texts.txt")
        wanted.write_text("\n\n".join("\n".join(row) for row in references) + "\n", encoding="utf-8")
        given.write_text("\n".join(texts) + "\n", encoding="utf-8")
        command = [sys.executable, str(clone / "measure_scores.py"), "-p", str(wanted), str(given)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"^(\w+): ([\d.]+)$", said, re.MULTILINE))
    return [float(found[name]) for name in ("BLEU", "NIST", "ROUGE_L", "CIDEr")]


def own(texts: list[str], references: list[list[str]]) -> list[float]:
    """The same by dpllm, in the scripts' units."""
    bleu, nist = (score(texts, references)["value"] for score in (text_scores.bleu, text_scores.nist))
    rouge, cider = (score(texts, references) for score in (text_scores.rouge_l, text_scores.cider))
    return [bleu / 100, nist, sum(rouge) / len(rouge), sum(cider) / len(cider)]


def main(clone: Path, files: list[Path]) -> None:
    """Prints the table."""
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    answers = [row for row in by_prompt(rows, len(rows)).values() if len(row) > 1]
    generator = random.Random(0)
    systems = {"a person's": [row[0] for row in answers]}
    systems["the same with words dropped and shuffled"] = [worse(row[0], generator) for row in answers]
    references = [row[1:] for row in answers]
    print(f"{len(references)} prompts, {sum(map(len, references))} references")
    print("| text | BLEU | NIST | ROUGE-L | CIDEr |\n|---|---|---|---|---|")
    for name, texts in systems.items():
        for who, scores in (("official", official(clone, texts, references)), ("dpllm", own(texts, references))):
            print(f"| {name}: {who} | " + " | ".join(f"{score:.4f}" for score in scores) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), list(map(Path, sys.argv[2:])))
