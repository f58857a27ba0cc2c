"""Membership inference on real rows: one unit is one observation, and nothing is called membership that words explain."""

import json
import random
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tiny_models as tm
from scipy import stats
from score_tables import token_table

from dpllm.auditing import members as audit
from dpllm.auditing.attacks import TOKEN_ATTACKS
from dpllm.auditing.members import MEMBERSHIP, SHIFT, audit_run_members, rows_of_run, scores
from dpllm.errors import ConfigError, DataError
from dpllm.recipe.config import DataConfig, dump_config
from dpllm.run.directory import Run, RunDir
from dpllm.text import data
from dpllm.text.data import load_held_out, load_table
from dpllm.text.prompts import keep_rows
from dpllm.text.tokens import encode

SIGNIFICANCE = 1e-8
SECRET = "Sigrid Forsberg owes 4711"


@pytest.fixture(scope="module")
def models():
    return SimpleNamespace(tokenizer=tiny.tokenizer())


def typed(groups):
    return [tiny.rows(group, "who") for group in groups]


def audit_members(models, members, others, fmt, data):
    return audit.audit_members(models, typed(members), typed(others), fmt, data)


def check_overlap(members, others, fmt, **data):
    audit.check_overlap(typed(members), typed(others), fmt, settings(**data))


def settings(**changes):
    return DataConfig(**{"train": "rows.jsonl", "max_length": 128, **changes})


def rows(rng, count, **columns):
    """Rows of one kind, no two alike."""
    words = [f"{a}{b}" for a in "bdfgk" for b in "aeiou"]
    chosen = [[*rng.choices(words, k=rng.randint(4, 9)), str(rng.randrange(10**9))] for _ in range(count)]
    return [[{"text": f"{' '.join(text)}.", **columns}] for text in chosen]


def log_probs(ids, shift=0.0):
    """A model whose log-probability of a token depends on nothing but the token."""
    return -1 - np.array([(token * 7919) % 101 for token in ids]) / 50 + shift


def scoring(monkeypatch, gain=None, drift=None):
    """Puts arithmetic in the place of two models: ``gain`` and ``drift`` are added, by sequence, to tuned and to both."""
    seen = {}

    def score_sequences(models, sequences, masks):
        chosen = [np.array(one.input_ids)[list(mask)] for one, mask in zip(sequences, masks, strict=True)]
        assert all(len(found) for found in chosen)
        base = [log_probs(found, drift(place) if drift else 0.0) for place, found in enumerate(chosen)]
        tuned = [values + (gain(place) if gain else 0.0) for place, values in enumerate(base)]
        seen["sequences"] = sequences
        columns = vars(token_table(tuned, base))
        return {name: column for name, column in columns.items() if name[:5] in ("tuned", "base_")}

    monkeypatch.setattr(audit, "score_sequences", score_sequences)
    return seen


def test_what_the_tuned_model_learned_is_membership_inference(models, monkeypatch):
    rng, draw = random.Random(0), np.random.default_rng(0)  # of other rows, one set in fourteen is called a shift
    scoring(monkeypatch, gain=lambda place: draw.normal(0.5 if place < 120 else 0.0, 0.15))
    report = audit_members(models, rows(rng, 120), rows(rng, 110), "text", settings())
    assert report["word"] == MEMBERSHIP
    assert (report["members"], report["non_members"], report["unit"]) == (120, 110, "row")
    ratio = report["scores"]["ratio"]
    assert ratio["auc"] > 0.95
    assert ratio["auc_interval"][0] > 0.9
    assert ratio["tpr_at_1_percent_fpr"] > 0.3
    assert ratio["tpr_at_0.1_percent_fpr"] is None  # 110 negatives cannot speak of one in a thousand
    assert set(report["scores"]) == {"calibrated", "ratio", "loss", *TOKEN_ATTACKS}
    low, high = report["controls"]["base_model"]["auc_interval"]
    assert low <= 0.5 <= high
    assert "must not be published" in report["note"]
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert not {"epsilon", "verdict", "claim"} & set(report)


@pytest.mark.parametrize("change", [str.upper, lambda text: text + " and so on", lambda text: text[: len(text) // 2]])
def test_rows_of_another_kind_are_called_a_shift_whatever_the_model_shows(models, monkeypatch, seed, change):
    rng = random.Random(seed)
    scoring(monkeypatch, gain=lambda place: 1.0 if place < 60 else 0.0)
    others = [[{"text": change(row["text"])}] for (row,) in rows(rng, 60)]
    report = audit_members(models, rows(rng, 60), others, "text", settings())
    assert report["word"] == SHIFT
    assert report["scores"]["ratio"]["auc"] == 1.0
    assert "sees the words" in report["reason"]
    assert "No score below is membership inference" in report["reason"]
    rest = {name: value for name, value in report.items() if name not in ("reason", "note")}
    assert "inference" not in json.dumps(rest)


def test_what_the_base_already_tells_apart_is_called_a_shift(models, monkeypatch, seed):
    rng = random.Random(seed)
    scoring(monkeypatch, drift=lambda place: 0.5 if place < 60 else 0.0)
    report = audit_members(models, rows(rng, 60), rows(rng, 60), "text", settings())
    assert report["word"] == SHIFT
    assert "base model" in report["reason"]
    # As wrong the other way round: the direction of an attack is fixed, that of a control is not.
    scoring(monkeypatch, drift=lambda place: 0.0 if place < 60 else 0.5)
    assert audit_members(models, rows(rng, 60), rows(rng, 60), "text", settings())["word"] == SHIFT


def test_alike_rows_are_called_a_shift_no_more_often_than_stated(models, monkeypatch, seed, full):
    rng, repeats = random.Random(seed), 400 if full else 60
    scoring(monkeypatch)
    reports = (audit_members(models, rows(rng, 50), rows(rng, 50), "text", settings()) for _ in range(repeats))
    alarms = sum(report["word"] == SHIFT for report in reports)
    assert alarms <= stats.binom.isf(SIGNIFICANCE, repeats, 0.075)


def test_the_classifier_reads_what_the_models_read_and_no_more(models, monkeypatch, seed):
    """Beyond max_length nothing was scored, so a difference there explains no score."""
    rng = random.Random(seed)
    scoring(monkeypatch)
    head = " ".join(["bo"] * 40)
    long = [[[{"text": f"{head} {side} {rng.randrange(10**9)}"}] for _ in range(60)] for side in ("in", "out")]
    report = audit_members(models, *long, "text", settings(max_length=20))
    assert report["word"] == MEMBERSHIP
    assert report["controls"]["blind"]["auc"] == 0.5


def test_a_row_in_chunks_is_one_observation(models, monkeypatch, seed):
    rng, reports = random.Random(seed), []
    sides = rows(rng, 60), rows(rng, 60)
    for long_examples, max_length in (("chunk", 5), ("refuse", 128)):
        seen = scoring(monkeypatch)
        reads = settings(long_examples=long_examples, max_length=max_length)
        reports.append(audit_members(models, *sides, "text", reads))
        assert (len(seen["sequences"]) > 240) == (long_examples == "chunk")
    chunked, whole = reports
    assert (chunked["members"], chunked["non_members"]) == (60, 60)
    for name in ("loss", "min_k_plus"):
        assert chunked["scores"][name]["auc"] == whole["scores"][name]["auc"]


def test_a_unit_is_one_observation_of_all_its_tokens(models, monkeypatch, seed):
    rng = random.Random(seed)
    kept = {}
    scoring(monkeypatch, gain=lambda place: 0.1 * (place % 7))
    monkeypatch.setattr(audit, "scores", lambda tokens: kept.setdefault("tokens", tokens) and {})
    groups = [[row | {"who": f"u{place}"} for (row,) in rows(rng, 3)] for place in range(110)]
    report = audit_members(models, groups[:60], groups[60:], "text", settings(unit="who", max_examples_per_unit=5))
    assert (report["members"], report["non_members"], report["unit"]) == (60, 50, "who")
    tokens = kept["tokens"]
    assert len(tokens.canary_ids) == 110
    for place in (0, 17, 109):
        ids, gains = [], []
        for number, row in enumerate(groups[place]):
            (sequence,) = encode(row, "text", models.tokenizer, tiny.reads(128, "refuse"))
            ids += sequence.input_ids[1:]
            gains += [0.1 * ((3 * place + number) % 7)] * (len(sequence.input_ids) - 1)
        result = scores(tokens)
        assert result["loss"][place] == pytest.approx(np.mean(log_probs(ids) + gains))
        assert result["ratio"][place] == pytest.approx(np.mean(gains))
        text = "\n".join(row["text"] for row in groups[place])
        assert tokens.zlib_bytes_S[place] == len(zlib.compress(text.encode()))


def test_at_most_the_limit_is_drawn_at_random_and_always_the_same(models, monkeypatch, seed):
    rng = random.Random(seed)
    sides = rows(rng, 300), rows(rng, 70)
    drawn = []
    monkeypatch.setattr(audit, "LIMIT", 60)
    for _ in range(2):
        seen = scoring(monkeypatch)
        report = audit_members(models, *sides, "text", settings())
        ids = [sequence.input_ids for sequence in seen["sequences"]]
        drawn.append([models.tokenizer.decode(row, skip_special_tokens=True) for row in ids])
    assert (report["members"], report["non_members"]) == (60, 60)
    assert drawn[0] == drawn[1]
    places = [[row["text"] for (row,) in sides[0]].index(text) for text in drawn[0][:60]]
    assert max(places) > 200


def test_rows_without_anything_to_predict_are_no_observations(models, monkeypatch, seed):
    rng = random.Random(seed)
    scoring(monkeypatch)

    def chats(*kinds):
        said = [(row["text"], roles) for (row,) in rows(rng, 60) for roles in kinds]
        return [[{"messages": [{"role": role, "content": text} for role in roles]}] for text, roles in said]

    sides = chats(("user", "assistant")), chats(("user", "assistant"), ("user",))
    report = audit_members(models, *sides, "messages", settings())
    assert (report["members"], report["non_members"]) == (60, 60)


@pytest.mark.parametrize(("few", "side"), [((49, 80), "members"), ((80, 49), "non-members")])
def test_too_few_rows_are_refused(models, monkeypatch, few, side):
    rng = random.Random(0)
    scoring(monkeypatch)
    with pytest.raises(ConfigError, match=f"^49 {side} ") as caught:
        audit_members(models, rows(rng, few[0]), rows(rng, few[1]), "text", settings())
    assert caught.value.exit_code == 2


def test_members_among_non_members_are_refused_by_number(models, monkeypatch):
    rng = random.Random(0)
    inside, outside = rows(rng, 300), rows(rng, 80)
    inside[299] = [{"text": f"{SECRET} crowns to  ANNA"}]
    outside[5] = [{"text": f" {SECRET.upper()}\ncrowns to Anna "}]
    outside[9] = [{"text": inside[3][0]["text"]}]
    scoring(monkeypatch)
    with pytest.raises(ConfigError, match="2 of 80 rows are identical to members") as caught:
        audit_members(models, inside, outside, "text", settings())
    assert caught.value.exit_code == 2
    assert "sigrid" not in str(caught.value).casefold()


def test_every_column_of_a_row_counts():
    member = [{"prompt": "who is it", "completion": "Anna"}]
    check_overlap([member], [[{"prompt": "who is it", "completion": "Bo"}]], "prompt_completion")
    with pytest.raises(ConfigError, match="identical to members"):
        check_overlap([member], [[dict(member[0], extra=1)]], "prompt_completion")
    turns = [{"role": "user", "content": "who is it"}, {"role": "assistant", "content": "Anna"}]
    with pytest.raises(ConfigError, match="identical to members"):
        check_overlap([[{"messages": turns}]], [[{"messages": turns}]], "messages")


def test_a_unit_on_both_sides_is_refused():
    inside, outside = [[{"text": "a", "who": 7}]], [[{"text": "b", "who": " 7.0"}], [{"text": "c", "who": 8}]]
    with pytest.raises(ConfigError, match="1 of 2 units are units of members too"):
        check_overlap(inside, outside, "text", unit="who", max_examples_per_unit=1)
    check_overlap(inside, outside, "text")
    inside = [[{"text": "a", "who": ["ana", "ben"]}]]
    outside = [[{"text": "b", "who": "cy; ben"}], [{"text": "c", "who": ["cy"]}]]
    with pytest.raises(ConfigError, match="1 of 2 units are units of members too"):
        check_overlap(inside, outside, "text", unit="who", max_examples_per_unit=1, owners="several")


def write_run(tmp_path, **changes):
    rng = random.Random(0)
    sources = {"train": tmp_path / "train.jsonl", "eval": tmp_path / "eval.jsonl"}
    for place, path in enumerate(sources.values()):
        tiny.write_rows(path, [row | {"who": f"{place}-{number // 2}"} for number, (row,) in enumerate(rows(rng, 120))])
    run = RunDir(tmp_path / "run")
    run.make()
    read = {"max_length": 128, **{name: str(path) for name, path in sources.items()}, **changes}
    recipe = tm.recipe(model={"name_or_path": "builtin:tiny"}, data=read, output_dir=str(run.root))
    run.config.write_text(dump_config(recipe), encoding="utf-8")
    note(run)
    return run


def note(run):
    """What training keeps of its rows."""
    settings, cache = run.load_config().data, run.root / "cache"
    run.rows.unlink(missing_ok=True)
    keep_rows(run.rows, settings, load_table(settings.train, settings, "train", cache), load_held_out(settings, cache))


def opened(run):
    """Without a record, which nothing here asks for."""
    return Run(run, None, run.load_config())


def test_members_of_a_run_are_its_training_rows_and_the_report_stays_private(models, monkeypatch, tmp_path):
    scoring(monkeypatch)
    run = write_run(tmp_path)
    report = audit_run_members(opened(run), models)
    assert (report["members"], report["non_members"]) == (120, 120)
    path = run.private / "audit_members.json"
    assert json.loads(path.read_text())["note"] == report["note"]
    assert {file for file in run.root.rglob("*") if file.is_file()} == {run.config, run.rows, path}
    for row in data.load_table(str(tmp_path / "train.jsonl"), settings(), "train", tmp_path).rows:
        assert row.parts["text"] not in path.read_text()


def test_units_of_a_run_bring_the_rows_that_trained(tmp_path):
    run = write_run(tmp_path, unit="who", max_examples_per_unit=1, sampling="example")
    inside, outside, fmt = rows_of_run(opened(run))
    assert (len(inside), len(outside), fmt) == (60, 60, "text")
    assert {len(group) for group in (*inside, *outside)} == {1}
    config = run.load_config()
    trained = data.sampled_rows(data.load_table(config.data.train, config.data, "train", tmp_path), config.data)
    assert sorted(row.parts["text"] for (row,) in inside) == sorted(row.parts["text"] for (row,) in trained)


def test_a_run_without_held_out_rows_is_refused(tmp_path):
    run = write_run(tmp_path, eval=None)
    with pytest.raises(ConfigError, match=r"data\.eval") as caught:
        rows_of_run(opened(run))
    assert caught.value.exit_code == 2


def test_held_out_rows_of_another_form_or_without_a_unit_are_refused(tmp_path):
    run = write_run(tmp_path, format="text")  # which training writes, where it found it
    tiny.write_rows(tmp_path / "eval.jsonl", [{"prompt": "a", "completion": "b"}] * 60)
    with pytest.raises(DataError, match="text"):
        rows_of_run(opened(run))
    run = write_run(tmp_path, unit="who", max_examples_per_unit=1)
    tiny.write_rows(tmp_path / "eval.jsonl", [{"text": "a"}] * 60)
    note(run)
    with pytest.raises(DataError, match="who"):
        rows_of_run(opened(run))


@pytest.mark.parametrize("side", ["train", "eval"])
def test_rows_that_changed_after_training_are_no_members_and_no_others(tmp_path, side):
    run = write_run(tmp_path)
    rows_of_run(opened(run))
    with open(tmp_path / f"{side}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "one more", "who": "z"}) + "\n")
    with pytest.raises(DataError, match="not those that the run read"):
        rows_of_run(opened(run))
