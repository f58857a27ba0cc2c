"""The quality of a synthetic data set: what is public reads nothing private, and each figure finds what was put there."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import cards
import pytest
import tiny
import tiny_models

from dpllm.canaries import canaries
from dpllm.card import synthetic
from dpllm.recipe.config import RunConfig
from dpllm.releases import quality
from dpllm.run.directory import RunDir
from dpllm.statement import privacy_record
from dpllm.text.data import load_table
from dpllm.text.prompts import keep_rows

Json = dict[str, Any]
Rows = list[Json]
Run = tuple[RunDir, RunConfig]
WORDS = {"home": "garden stairs kettle blanket", "clinic": "waiting corridor queue reception"}
GROUPS = {1: 60, 8: 60}


def rows(count: int, seed: int, *, shuffled: bool = False) -> Rows:
    """Notes of which some words tell the visit, unless it is shuffled."""
    draw, written = random.Random(seed), []
    for number in range(count):
        visit = draw.choice(sorted(WORDS))
        word = draw.choice(WORDS[draw.choice(sorted(WORDS)) if shuffled else visit].split())
        written.append({"visit": visit, "text": f"{tiny.sentence(number + seed)} Then by the {word} {draw.random()}"})
    return written


def a_run(root: Path, train: Rows, held: Rows | None, planted: bool = True, **data: Any) -> Run:
    run = RunDir(root / "run")
    run.make()
    tiny.tokenizer().save_pretrained(run.export)
    source = {"train": str(tiny.write_rows(root / "train.jsonl", train)), "control": ["visit"]}
    source |= {"eval": str(tiny.write_rows(root / "eval.jsonl", held))} if held else {}
    audit = {"canaries": {"groups": GROUPS, "references": 100}} if planted else {}
    config = tiny_models.recipe(data={**source, **data}, output_dir=str(run.root), audit=audit)
    files = (config.data.train, config.data.eval)
    tables = [load_table(file, config.data, "train", root) if file else None for file in files]
    keep_rows(run.rows, config.data, *tables)
    if config.audit.canaries:
        canaries.save(canaries.plan_canaries(config.audit.canaries, generator=random.Random(3)), run.canaries)
    return run, config


def statement(data: Json | None = None, **described: Any) -> privacy_record.PrivacyRecord:
    statistics = cards.described(**described) if described else None
    recipe = cards.config(data=data or {})
    return privacy_record.read(cards.render_card(recipe, cards.plan(), cards.record(), None, statistics=statistics)[1])


def measure(run: RunDir, config: RunConfig, samples: Rows, record: Any) -> tuple[quality.Quality, Json]:
    return quality.measure(samples, quality.of_run(run, config, record))


def write(run: RunDir, config: RunConfig, samples: Rows, record: Any) -> quality.Quality:
    return quality.report(samples, quality.of_run(run, config, record), run.private / quality.FOLDER, lambda line: None)


def measured(root: Path, train: Rows, held: Rows | None, samples: Rows, **data: Any) -> tuple[str, Json]:
    declared = {name: value for name, value in data.items() if "public" in name}
    result = measure(*a_run(root, train, held, **data), samples, statement(declared))
    return json.dumps(result[0].to_json(), sort_keys=True), result[1]


MADE = rows(60, 5)
TRAIN, HELD = rows(150, 1), rows(80, 2)
# Other lengths, codes, labels, words and numbers of rows: whichever figure read them would change.
OTHER = [
    {"visit": "ward", "text": f"{row['text']} and call 284-555-0119 again"} for row in rows(40, 9, shuffled=True)
] + MADE[:9]


@pytest.mark.parametrize("data", [{}, {"eval_public": True}])
def test_public_figures_are_the_same_whatever_the_training_rows_and_coins_are(tmp_path: Path, data: Json) -> None:
    public, private = measured(tmp_path / "a", TRAIN, HELD, MADE, **data)
    changed, other = measured(tmp_path / "b", OTHER, HELD, MADE, planted=False, **data)
    assert public == changed
    figures, figures_of_other = private["figures"], other["figures"]
    about_training = [name for name in figures if re.search("training|TRTR", name)]
    # All but those that are 0 or 1 on both sides can tell the two sets apart, so the equality above says something.
    differing = [name for name in about_training if figures[name] != figures_of_other.get(name)]
    assert len(differing) > 0.7 * len(about_training)
    assert not [name for name in json.loads(public)["figures"] if re.search("training|TRTR", name)]
    assert json.loads(public)["evaluation"] == ("eval.jsonl" if data else None)


def test_public_figures_read_evaluation_rows_only_where_these_are_declared_public(tmp_path: Path) -> None:
    public, _ = measured(tmp_path / "a", TRAIN, HELD, MADE, public=True)
    changed, _ = measured(tmp_path / "b", TRAIN, OTHER, MADE, public=True)
    assert public == changed
    assert json.loads(public)["evaluation"] == "train.jsonl"
    assert {"with 8 words of any training row", "rows: training"} <= json.loads(public)["figures"].keys()
    both = json.loads(measured(tmp_path / "c", TRAIN, HELD, MADE, public=True, eval_public=True)[0])
    assert {"visit by TRTR: accuracy", "visit by TSTR: accuracy"} <= both["figures"].keys()


def test_a_label_that_can_be_learned_is_found_and_a_shuffled_one_is_not(tmp_path: Path) -> None:
    assert measured(tmp_path / "a", TRAIN, HELD, MADE)[1]["figures"]["visit by TSTR: accuracy, low"] > 0.8
    shuffled = measured(tmp_path / "b", TRAIN, HELD, rows(60, 5, shuffled=True))[1]["figures"]
    assert shuffled["visit by TSTR: accuracy, low"] < 0.5 < shuffled["visit by TSTR: accuracy, high"] < 0.9
    assert shuffled["visit by TRTR: accuracy, low"] > 0.8


def test_repeated_words_are_counted_beside_held_out_rows(tmp_path: Path) -> None:
    words = "she told us all about the seven plums of the vicar"
    train = [{"visit": "home", "text": f"Once {words}."}, *TRAIN]
    repeated, nearly = f"He says that {words.upper()}, no less", "she told us all about the pears of the vicar"
    samples = [{"visit": "home", "text": text} for text in (repeated, "Ring us today", nearly, "Nothing here")]
    result = measured(tmp_path, train, HELD, samples)[1]["figures"]
    assert result["with 8 words of any training row"] == 0.25
    assert result["with 8 words of any evaluation row"] == 0
    assert result["with 8 words of equally many training rows"] == 0.25  # the first row is among them


@pytest.mark.parametrize(
    ("samples", "train", "held"),
    [
        ([], TRAIN, HELD),
        ([{"visit": "home", "text": "..."}] * 3, TRAIN, HELD),
        (MADE, [{"visit": "home", "text": "."}], None),
        (MADE, TRAIN, [{"visit": "", "text": "?"}]),
    ],
)
def test_nothing_to_measure_is_answered(tmp_path: Path, samples: Rows, train: Rows, held: Rows | None) -> None:
    run, config = a_run(tmp_path, train, held)
    assert write(run, config, samples, statement()).figures["rows: synthetic"] == len(samples)


def test_prompts_and_completions_are_measured_as_their_run_learned_them(tmp_path: Path) -> None:
    pairs = [{"question": item["visit"], "completion": item["text"]} for item in TRAIN]
    more: Json = {"format": "prompt_completion", "columns": {"prompt": "question"}, "control": []}
    run, config = a_run(tmp_path, pairs, None, planted=False, **more)
    samples = [{"prompt": "home", "completion": TRAIN[0]["text"]}, {"prompt": "home", "completion": "Nothing"}]
    public, private = measure(run, config, samples, statement())
    assert (public.figures["rows: synthetic"], private["figures"]["rows: training"]) == (2, len(TRAIN))
    assert private["figures"]["with 8 words of any training row"] == 0.5
    (missing,) = private["not_measured"]
    assert missing.startswith("evaluation rows: the evaluation data are not where the run read them")


def test_another_file_of_that_name_is_not_the_data_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows were declared public by nobody, and exact figures of them were published."""
    run, config = a_run(tmp_path, TRAIN, HELD, public=True, eval_public=True)
    before = measure(run, config, MADE, statement({"public": True}))[0]
    tiny.write_rows(tmp_path / "train.jsonl", [{"visit": "home", "text": "A private note."}] * 3)
    after, private = measure(run, config, MADE, statement({"public": True}))
    assert "rows: training" in before.figures
    assert "rows: training" not in {**after.figures, **private["figures"]}
    assert any("not those that the run read" in line for line in private["not_measured"])


def test_what_is_damaged_changes_no_figure_that_does_not_read_it(tmp_path: Path) -> None:
    run, config = a_run(tmp_path, TRAIN, HELD, eval_public=True)
    public, private = measure(run, config, MADE, statement())
    Path(config.data.train or "").write_text("{")
    changed, private_of_damaged = measure(run, config, MADE, statement())
    assert changed == public
    assert [line.split(":")[0] for line in private_of_damaged["not_measured"]] == ["training rows"]
    assert private_of_damaged["figures"].items() <= private["figures"].items()


def test_released_statistics_stand_beside_the_rows(tmp_path: Path) -> None:
    base = cards.described()["releases"][0]
    shares = {**base, "statistic": "shares of visit", "declared": {"values": ["home", "clinic"]}}
    shares |= {"value": {"home": 30, "clinic": 70, "other": -4}}
    declared = {"numbers": [64, 128], "quantile": 0.5}
    lengths = {"statistic": "quantile 0.5 of token lengths", "declared": declared, "value": {"candidate": 64}}
    releases = [shares, {**base, **lengths, "entry": "2c3d"}]
    record = statement(releases=releases)
    result = measure(*a_run(tmp_path, TRAIN, HELD, control=["visit"]), MADE, record)[0].figures
    assert (result["share of home: released"], result["share of other: released"]) == (0.3, 0)
    assert result["tokens, quantile 0.5: released"] == 64
    assert result["share of home: synthetic"] == sum(row["visit"] == "home" for row in MADE) / len(MADE)


def test_shares_are_those_of_the_commonest_codes_so_that_a_record_stays_small(tmp_path: Path) -> None:
    samples = [{"visit": f"ward {number // 2}", "text": f"Note {number}"} for number in range(1, 1000)]
    base = cards.described()["releases"][0]
    value = {f"ward {number}": number for number in range(500)} | {"other": 0}
    shares = {"statistic": "shares of visit", "declared": {"values": [*value][:-1]}}
    record = statement(releases=[{**base, **shares, "value": value}])
    result = measure(*a_run(tmp_path, TRAIN, None, planted=False), samples, record)[0].figures
    for side in ("synthetic", "released"):
        names = {name for name in result if name.startswith("share of") and name.endswith(side)}
        assert len(names) == quality.MOST_CODES
        assert f"share of ward 0: {side}" not in names
    assert result["share of ward 499: released"] == 499 / sum(range(500))


def test_private_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    run, config = a_run(tmp_path, TRAIN, HELD)
    write(run, config, MADE, statement())
    (path,) = (run.private / quality.FOLDER).iterdir()
    assert path.stat().st_mode & 0o077 == 0
    text = path.read_text()
    assert TRAIN[0]["text"] not in text
    assert not any(canary.secret in text for canary in canaries.load(run.canaries).canaries)


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("eval_public", [False, True])
def test_the_statement_decides_what_is_public_and_names_tell(tmp_path: Path, public: bool, eval_public: bool) -> None:
    """So that verify, which sees names alone, finds whatever the writer would not have written."""
    run, config = a_run(tmp_path, TRAIN[:20], HELD[:20], planted=False, public=True, eval_public=True)
    declared = statement({"public": public, "eval_public": eval_public})
    measured_in_public, private = measure(run, config, MADE[:20], declared)
    sides = synthetic.public_sides(declared)
    assert sides == {"synthetic", "released", *["training"] * public, *["evaluation"] * eval_public}
    assert all(synthetic.reads(name) <= sides for name in measured_in_public.figures)
    assert not any(synthetic.reads(name) <= sides for name in private["figures"])
    assert len(measured_in_public.figures) + len(private["figures"]) > 30
    if not (public and eval_public):
        assert all(synthetic.reads(name) > sides for name in ("MAUVE", "share of x: people", ""))
