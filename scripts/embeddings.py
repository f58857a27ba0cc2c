r"""Clusters and classifiers on embeddings, beside scikit-learn without privacy and diffprivlib at the same epsilon.

    python scripts/embeddings.py --train builtin:clinic --test builtin:clinic/eval --label visit --encoder builtin:tiny \
        --max-length 64 --cache embeddings --diffprivlib other/bin/python --json clinic.json

In: rows with a column `text` and a label; a model. Out: a Markdown table, and JSON. Each row is a unit. Vectors are computed
once and kept in the cache folder, without privacy: use public data. diffprivlib's epsilon has no delta. Version 0.6.6
needs an older scikit-learn than dpllm: python -m venv other; other/bin/pip install diffprivlib==0.6.6 "scikit-learn<1.6".
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from dpllm.files import digest, scratch, write_json
from dpllm.privacy import embedded
from dpllm.privacy.accounting import calibrate_noise_multiplier
from dpllm.privacy.embedded import DIMENSIONS, Floats, Projection, lattice, nearest
from dpllm.recipe.config import DataConfig, ModelConfig
from dpllm.releases.embeddings import Encoder
from dpllm.text import data
from dpllm.text.data import each_row, value_name

DELTA, ROUNDS, EPSILONS = 1e-5, 5, (0.5, 1.0, 3.0)
PROGRAM = """
import json, sys, warnings
import numpy as np
from diffprivlib.models import KMeans, LogisticRegression
warnings.simplefilter("ignore")
given, clusters, runs, *epsilons = np.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *map(float, sys.argv[4:])
found = {"accuracy": {}, "inertia": {}}
for epsilon in epsilons:
    fits = [
        (
            LogisticRegression(epsilon=epsilon, data_norm=1.0, max_iter=1000, random_state=seed),
            KMeans(clusters, epsilon=epsilon, bounds=(-1.0, 1.0), random_state=seed),
        )
        for seed in range(runs)
    ]
    found["accuracy"][epsilon] = [
        one.fit(given["train"], given["numbers"]).predict(given["test"]).tolist() for one, _ in fits
    ]
    found["inertia"][epsilon] = [two.fit(given["rows"]).cluster_centers_.tolist() for _, two in fits]
print(json.dumps(found))
"""
"""Program for a Python with diffprivlib: computes labels of the test rows, and centres."""


def vectors(options: argparse.Namespace, source: str) -> tuple[Floats, list[str], Floats]:
    """Returns the vectors and labels of a file's rows, and the public centre."""
    config = DataConfig(train=source, max_length=options.max_length)
    key = digest({"encoder": options.encoder, "source": source, "max_length": options.max_length})[:16]
    with scratch() as folder:
        rows = data.load_table(config.train, config, None, folder, [options.label]).rows
        if not (path := options.cache / f"{key}.npz").exists():
            encoder = Encoder(ModelConfig(name_or_path=options.encoder), options.max_length)
            centre_D = encoder.around(1).centre_D
            found_RD = encoder.of_rows(each_row(rows), ("text",), lambda vectors_RD: vectors_RD)  # as they are
            options.cache.mkdir(parents=True, exist_ok=True)
            np.savez(path, vectors=found_RD, centre=centre_D)
        labels = [value_name(row.codes.get(options.label)) for row in rows]
    stored = np.load(path)
    return stored["vectors"], labels, stored["centre"]


def compare(options: argparse.Namespace) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Figure -> method -> epsilon ("none": without privacy) -> one number for each run."""
    from sklearn.cluster import KMeans
    from sklearn.linear_model import LogisticRegression

    train, labels, centre_D = vectors(options, options.train)
    test, truth, _ = vectors(options, options.test)
    many, few = (Projection(centre_D, DIMENSIONS[kind]) for kind in ("classifier", "clusters"))
    train_RP, test_RP, rows_RP, units_R = many(train), many(test), few(train), np.arange(len(train))
    values = sorted(set(labels))
    numbers_R, free = np.array([values.index(value) for value in labels]), lambda _: None

    def accuracy(chosen: Any) -> float:
        return float(np.mean([values[int(value)] == label for value, label in zip(chosen, truth, strict=True)]))

    def inertia(centres: Any) -> float:
        """Mean squared distance to the nearest centre, divided by the mean squared distance to the mean."""
        centres = embedded.within_ball(np.asarray(centres))
        spread = ((rows_RP - rows_RP.mean(axis=0)) ** 2).sum()
        return float(((rows_RP - centres[nearest(lattice(rows_RP), centres)]) ** 2).sum() / spread)

    def classified(sigma: float) -> float:
        weights = embedded.ada_ssp(train_RP, numbers_R, units_R, len(values), sigma, free)[1]
        return accuracy(embedded.scores(test_RP, weights).argmax(axis=1))

    def clustered(sigma: float) -> float:
        return inertia(embedded.k_means(rows_RP, units_R, options.clusters, sigma, ROUNDS, free)[1])

    ours: dict[str, dict[str, list[float]]] = {"accuracy": {}, "inertia": {}}
    for epsilon in (*EPSILONS, None):
        for by_epsilon, steps, score in zip(ours.values(), (2, ROUNDS), (classified, clustered), strict=True):
            sigma = 1e-4 if epsilon is None else calibrate_noise_multiplier(epsilon, DELTA, 1.0, steps, "zero_out")
            by_epsilon["none" if epsilon is None else str(epsilon)] = [score(sigma) for _ in range(options.runs)]
    plain = LogisticRegression(max_iter=1000).fit(train_RP, numbers_R).predict(test_RP)
    centres = [
        KMeans(options.clusters, n_init=5, random_state=seed).fit(rows_RP).cluster_centers_
        for seed in range(options.runs)
    ]
    arrays = {"train": train_RP, "numbers": numbers_R, "test": test_RP, "rows": rows_RP}
    theirs = run_diffprivlib(options, arrays) if options.diffprivlib else {"accuracy": {}, "inertia": {}}
    return {
        "accuracy": {
            "dpllm": ours["accuracy"],
            "diffprivlib": {key: list(map(accuracy, by_epsilon)) for key, by_epsilon in theirs["accuracy"].items()},
            "scikit-learn": {"none": [accuracy(plain)]},
        },
        "inertia": {
            "dpllm": ours["inertia"],
            "diffprivlib": {key: list(map(inertia, by_epsilon)) for key, by_epsilon in theirs["inertia"].items()},
            "scikit-learn": {"none": list(map(inertia, centres))},
        },
    }


def run_diffprivlib(options: argparse.Namespace, arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Runs ``PROGRAM`` and returns its figures."""
    with scratch() as folder:
        np.savez(folder / "given.npz", **arrays)
        command_arguments = map(str, (folder / "given.npz", options.clusters, options.runs, *EPSILONS))
        done = subprocess.run(
            [options.diffprivlib, "-c", PROGRAM, *command_arguments], capture_output=True, text=True, check=True
        )
    results: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return results


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("train", "test", "label", "encoder"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--clusters", type=int, default=6)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cache", type=Path, required=True, help="folder for vectors of public data")
    parser.add_argument("--diffprivlib", metavar="PYTHON", help="a Python that has diffprivlib; default: leave it out")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    options = parser.parse_args()
    comparison = compare(options)
    print(f"{options.train}, {options.label}, {options.encoder}, delta {DELTA:g} (diffprivlib: 0)\n")
    print("| figure | method | epsilon 0.5 | 1 | 3 | without privacy |\n|---|---|---|---|---|---|")
    for figure, methods in comparison.items():
        for method, figures in methods.items():
            cells = (figures.get(str(epsilon)) for epsilon in (*EPSILONS, "none"))
            formatted = (
                f"{np.mean(runs):.3f} ± {np.std(runs, ddof=len(runs) > 1):.3f}" if runs else "" for runs in cells
            )
            print(f"| {figure} | {method} | {' | '.join(formatted)} |")
    if options.json:
        named = {name: str(getattr(options, name)) for name in ("train", "label", "encoder", "clusters", "max_length")}
        write_json(options.json, {**named, "delta": DELTA, "rounds": ROUNDS, "figures": comparison})


if __name__ == "__main__":
    main()
