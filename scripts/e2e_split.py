"""Splits the E2E data into files for training, for choosing settings and for scoring.

    python scripts/e2e_split.py TRAIN.jsonl EVAL.jsonl OUT

Rows are {prompt, completion, restaurant}; no prompt (meaning representation) of TRAIN.jsonl is in EVAL.jsonl. Every second prompt
of EVAL.jsonl, sorted by text, goes to choose.jsonl, the others to score.jsonl, each with all its references. A newline
ends each prompt. The texts-*.jsonl files hold the completions as texts, with the food and area that their prompts name.
"""

import json
import pathlib
import re
import sys

COLUMNS = ("food", "area")


def rows(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text("utf-8").splitlines()]


def text(row):
    named = dict(re.findall(r"(\w+)\[([^\]]*)\]", row["prompt"]))
    return {column: named.get(column, "none") for column in COLUMNS} | {"text": row["completion"]}


def main(train, held_out, out):
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    prompts = sorted({row["prompt"] for row in rows(held_out)})
    trained = {row["prompt"] for row in rows(train)}
    if trained & set(prompts):
        sys.exit(f"{len(trained & set(prompts))} prompts are in both files: what is scored must be new to the model.")
    parts = {"choose": set(prompts[::2]), "score": set(prompts[1::2]), "train": trained}
    for name, part in parts.items():
        chosen = [row for row in rows(train if name == "train" else held_out) if row["prompt"] in part]
        prompted = [{**row, "prompt": row["prompt"] + "\n"} for row in chosen]
        for file, written in ((name, prompted), (f"texts-{name}", map(text, chosen))):
            (out / f"{file}.jsonl").write_text("\n".join(map(json.dumps, written)) + "\n", "utf-8")
        print(f"{out / name}.jsonl: {len(chosen):,} rows of {len(part):,} meaning representations")


if __name__ == "__main__":
    main(*sys.argv[1:])
