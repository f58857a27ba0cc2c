"""What a classifier learns of a label from synthetic rows: TSTR beside TRTR, by the figures of ``dpllm.publish.quality``.

    python scripts/tstr.py ROWS.jsonl --train TRAIN.jsonl --eval EVAL.jsonl --label food area [--rows 66]

Rows are {text, and a column for each label}. Prints accuracy with 95% limits and macro F1; ``--rows N`` takes
the first N of ROWS.jsonl, and as many training rows, evenly spread, for TRTR.
"""

import argparse
import json
from pathlib import Path

from dpllm.publish import quality


def side(path, labels, most=None):
    rows = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()][:most]
    return quality.Side([row["text"] for row in rows], [], {label: [row[label] for row in rows] for label in labels})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows_file", metavar="ROWS.jsonl")
    parser.add_argument("--train", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--label", nargs="+", required=True)
    parser.add_argument("--rows", type=int)
    known = parser.parse_args()
    made = side(known.rows_file, known.label, known.rows)
    sides = {quality.SYNTHETIC: made}
    sides |= {quality.TRAINING: side(known.train, known.label), quality.EVALUATION: side(known.eval, known.label)}
    print(f"{len(made.texts)} rows, {sum(len(text.split()) for text in made.texts) / len(made.texts):.1f} words each")
    for label in known.label:
        figures = quality.label_figures(sides, label)
        for name in sorted({key.rsplit(":", 1)[0] for key in figures if key.endswith("accuracy")}):
            low, high = (figures[f"{name}: accuracy, {end}"] for end in ("low", "high"))
            print(
                f"{name}: {figures[f'{name}: accuracy']:.3f} ({low:.3f} to {high:.3f}), F1 {figures[f'{name}: macro F1']:.3f}"
            )


if __name__ == "__main__":
    main()
