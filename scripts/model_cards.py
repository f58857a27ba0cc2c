"""Makes the runs of model_cards/ anew, verifies them, and puts them there: export, Plan, record and recipe.

    python scripts/model_cards.py                                    ten to twenty minutes: the embedded model and data
    python scripts/model_cards.py --e2e-model MODEL --e2e-data E2E    two hours more; see model_cards/README.md
    python scripts/model_cards.py --only render                      the cards alone, from their own records; trains nothing

What came of an earlier call under runs/ is replaced. A directory of model_cards/ is a run directory without private/,
and *-synthetic and *-texts a data set.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dpllm.card import card as model_card
from dpllm.card import synthetic as data_set
from dpllm.card.synthetic import RECORD, Synthetic
from dpllm.files import CARD, read_json, sha256, write_json
from dpllm.recipe import names
from dpllm.recipe.config import dump_config
from dpllm.run.directory import RunDir
from dpllm.statement import privacy_record, section
from dpllm.verification.verify import verify

ROOT = Path(__file__).resolve().parents[1]
CARDS, RUNS = ROOT / "model_cards", ROOT / "runs" / "model_cards"
E2E = "recipes/smollm/smollm2-135m-e2e.yaml"
CONTACT = ("--card.contact", "the maintainers of dpllm, by an issue in its repository")
TUNING = (
    "Learning rate and batch were chosen at epsilon 3, by runs on the same rows, scored on public prompts that are not scored "
    "here: rates 0.0066, 0.01, 0.015 and 0.022 with 512 rows, and 1,024 rows at 0.0066. Before them, and in no ledger: 24 steps "
    "of 128 rows with LoRA of rank 8 and independent noise, and a warm-up on templated text. Without privacy: rate 0.0066, "
    "better than 0.003 on the scored prompts themselves."
)
Arguments = tuple[object, ...]


def clinic() -> None:
    """Generated notes at three epsilons and without privacy."""
    runs, ledger = _fresh("clinic")
    epsilons = ("--privacy.epsilon", "1,3,8,inf", "--train.steps", 150)
    _dpllm("sweep", "recipes/smoke/clinic.yaml", *epsilons, *CONTACT, "--output_dir", runs, "--privacy.ledger", ledger)
    made = {f"eps-{epsilon}": f"clinic-epsilon-{epsilon}" for epsilon in (1, 3, 8)}
    _publish(runs, {**made, "eps-inf": "clinic-without-privacy"}, ledger, "clinic")


def synthetic() -> None:
    """A synthetic data set at epsilon 8 from a model of generated notes, with the shares of visits from a statistic."""
    shares = "visit=clinic,home,paperwork,phone,review,urgent"
    _data_set(
        "clinic-synthetic", "recipes/smoke/synthetic.yaml", ("--shares", shares, "--lengths", "32:128:24"), (), ()
    )


def e2e(model: Path, data: Path) -> None:
    """A model of 135 million weights on public text, at epsilon 8 and 3 and without privacy, with equal rows."""
    runs, ledger = _fresh("smollm2-e2e")
    shared = ("--model.name_or_path", model, "--data.public", "true")
    rows = ("--data.train", data / "train.jsonl", "--data.eval", data / "score.jsonl")
    keys = (*shared, *rows, *CONTACT, "--card.tuning", TUNING)
    settings = {
        "epsilon-8": (),
        "without-privacy": ("--privacy.enabled", "false", "--train.learning_rate", "6.6e-3"),
        "epsilon-3": ("--privacy.epsilon", 3),
    }
    for name, own in settings.items():
        run = runs / f"smollm2-e2e-{name}"
        _dpllm("train", E2E, *keys, *own, "--privacy.ledger", ledger, "--output_dir", run)
        _dpllm("card", run)
    names = [f"smollm2-e2e-{name}" for name in settings]
    _publish(runs, {name: name for name in names}, ledger, "smollm2-e2e", "--tasks", 30)
    # Texts with food and area as control codes, at epsilon 8 together with the released shares.
    rows = ("--data.train", data / "texts-train.jsonl", "--data.eval", data / "texts-score.jsonl")
    keys = (*shared, *rows, "--data.control", "[food, area]", "--data.max_length", 96)
    shares = ("--shares", "food=Chinese,English,none;area=city centre,riverside,none", "--delta", "1e-6")
    own = ("--privacy.epsilon", 7.5, "--privacy.delta", "9e-6")
    _data_set("smollm2-e2e-texts", E2E, shares, (*keys, "--privacy.dataset", "e2e_nlg_texts"), own)


def render() -> None:
    """Renders the cards anew from the same statements; results of runs and audits do not change."""
    for recipe in sorted(CARDS.glob("*/config.yaml")):
        for name, text in model_card.rendered(RunDir(recipe.parent)).items():
            (recipe.parent / "export" / name).write_text(text, encoding="utf-8")
    for folder in (path.parent for path in sorted(CARDS.glob(f"*/{RECORD}"))):
        # Without the recipe: what stands outside the marked parts stays.
        statement = privacy_record.read(read_json(folder / data_set.MODEL_BLOCK))
        _reword(folder / data_set.MODEL_CARD, model_card.render(statement), model_card.matter(statement))
        hashed = {name: sha256(folder / name) for name in Synthetic.checked(read_json(folder / RECORD)).files}
        write_json(folder / RECORD, {**read_json(folder / RECORD), "files": hashed})
        record = Synthetic.checked(read_json(folder / RECORD))
        matter = data_set.front_matter(record, statement)["privacy"]
        _reword(folder / CARD, data_set.render(record, statement), matter)


def _reword(page: Path, parts: dict[str, str], privacy: dict[str, object]) -> None:
    """Replaces the marked parts of a card and the ``privacy`` entry of its front matter."""
    text = page.read_text(encoding="utf-8")
    old = section.front_matter(text)["privacy"]
    text = text.replace(f"sha256: {old['sha256']}", f"sha256: {privacy['sha256']}")
    for name, before in section.parts(text, tuple(parts)).items():
        text = text.replace(section.marked(name, before), section.marked(name, parts[name]))
    page.write_text(text, encoding="utf-8")


def copy(run: RunDir, to: Path) -> Path:
    """Copies what may be published of a finished run: its export unchanged, and the records that its card states."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(run.export, to / "export")
    for path in (run.plan, run.run):
        if path.exists():
            shutil.copy(path, to)
    (to / "config.yaml").write_text(dump_config(names.publishable(run.load_config())), encoding="utf-8")
    return to


def _fresh(name: str) -> tuple[Path, Path]:
    runs = RUNS / name
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    return runs, runs / "ledger.sqlite"


def _publish(runs: Path, names: dict[str, str], ledger: Path, comparison: str, *also: object) -> None:
    _dpllm("compare", "--public", *(runs / name for name in names), "--output", runs / "public", *also)
    for name, card in names.items():
        run = RunDir(runs / name)
        checks = [*verify(run.root, ledger=str(ledger)).checks, *verify(copy(run, CARDS / card) / "export").checks]
        if wrong := "; ".join(f"{check.name}: {check.detail}" for check in checks if check.status == "failed"):
            raise SystemExit(f"{run.root}: does not verify ({wrong})")
    shutil.rmtree(CARDS / comparison, ignore_errors=True)
    shutil.copytree(runs / "public", CARDS / comparison)


def _data_set(card: str, recipe: str, asked: Arguments, keys: Arguments, own: Arguments) -> None:
    """500 rows by a model trained with ``keys`` and ``own``, with the shares ``asked`` for at epsilon 0.5."""
    runs, ledger = _fresh(card)
    statistics, run, keys = runs / "describe.json", runs / "run", (*keys, "--privacy.ledger", ledger)
    _dpllm("describe", recipe, *keys, "--epsilon", 0.5, *asked, "--output", statistics)
    _dpllm("train", recipe, *keys, *own, *CONTACT, "--output_dir", run)
    _dpllm("card", run, "--describe", statistics)
    _dpllm("synthesize", run, "--rows", 500, "--seed", 1)
    _dpllm("verify", run / "synthetic")
    shutil.rmtree(CARDS / card, ignore_errors=True)
    shutil.copytree(run / "synthetic", CARDS / card)


def _dpllm(*arguments: object) -> None:
    command = [sys.executable, "-m", "dpllm", *map(str, arguments)]
    print("$ dpllm", *command[3:], flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def main() -> None:
    """Makes the clinic's cards, and those of the E2E text if a model and data are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["clinic", "synthetic", "render"], help="one of those that need nothing else")
    parser.add_argument("--e2e-model", type=Path, metavar="MODEL", help="directory of scripts/get_model")
    parser.add_argument("--e2e-data", type=Path, metavar="E2E", help="directory of scripts/e2e_split.py")
    options = parser.parse_args()
    if (options.e2e_model is None) != (options.e2e_data is None):
        parser.error("--e2e-model and --e2e-data belong together: give both, or neither")
    for make in (clinic, synthetic):
        if options.only in (None, make.__name__):
            make()
    if options.only == render.__name__:
        render()
    if options.e2e_model:
        e2e(options.e2e_model.resolve(), options.e2e_data.resolve())


if __name__ == "__main__":
    main()
