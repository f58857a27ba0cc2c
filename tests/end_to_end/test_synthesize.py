"""``dpllm synthesize``: whole or not at all, the same after an interruption, and a function of what the run released."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hub_stand_in
import pytest
import tiny
from published import carry, read
from running import Place, contents, done, dpllm_, edit_recipe, make_place, refused, results

import dpllm
from dpllm.card.synthetic import Synthetic
from dpllm.errors import ConfigError
from dpllm.files import sha256
from dpllm.publish import generate, synthesize
from dpllm.releases import draft
from dpllm.run.directory import RunDir
from dpllm.text.data import load_table
from dpllm.text.prompts import keep_rows, private_among

Json = dict[str, Any]
BRIEF = ("--rows", 9, "--max-new-tokens", 8, "--keep-unfinished", "--seed", 3)
FEW = (*BRIEF, "--no-quality")
UNSEEDED = tuple(one for one in FEW if one not in ("--seed", 3))
CODES = ["visit", "age"]
SHARES = "visit=home,clinic;age=old,young"


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Any:
    """Several for nine rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthesize, "BATCH", 4)
        yield


@pytest.fixture(scope="session")
def coded(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Place:
    """A run with control codes, and their released shares on its card; read only."""
    place = make_place(tmp_path_factory.mktemp("coded"), base)
    visits = ("home", "clinic", "elsewhere")
    tiny.write_rows(
        place.train,
        [{"text": tiny.sentence(n), "visit": visits[n % 3], "age": "old" if n % 4 else "young"} for n in range(40)],
    )
    place.write({"data.control": CODES})
    done("describe", place.recipe, "--epsilon", 2, "--shares", SHARES, "--output", place.root / "describe.json")
    done("train", place.recipe)
    done("card", place.run, "--describe", place.root / "describe.json")
    return place


def written(output: Path) -> tuple[list[Json], Json]:
    lines = (output / "data" / "train.jsonl").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [json.loads(line) for line in lines], json.loads((output / "synthetic.json").read_text())


def made(run: Path, output: Path, *arguments: object) -> tuple[list[Json], Json]:
    done("synthesize", run, "--output", output, *arguments)
    return written(output)


def test_the_folder_and_its_record(finished: Place, tmp_path: Path) -> None:
    before = contents(finished.run)
    rows, record = made(finished.run, tmp_path / "new" / "set", *FEW)
    assert contents(finished.run) == before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["set"], "neither draft nor lock is left"
    assert len(rows) == 9
    assert all(list(row) == ["text"] and row["text"] for row in rows)
    result = Synthetic.pick(record)
    assert result.to_json() == record
    assert (result.rows, result.columns, result.control) == (9, ("text",), ())
    assert result.shares is result.prompts is None
    sampling = {"engine": "transformers", "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8, "seed": 3}
    assert result.sampling.to_json() == sampling
    assert result.attempts == 9 + sum(result.dropped.values())
    assert set(result.dropped) == {"empty", draft.DUPLICATE}
    copied = ("run/README.md", "run/privacy.json", "run/privacy.svg")
    hashes = {name: sha256(finished.run / "export" / Path(name).name) for name in copied}
    assert result.files == hashes | {"data/train.jsonl": sha256(tmp_path / "new" / "set" / "data" / "train.jsonl")}
    assert {name: sha256(tmp_path / "new" / "set" / name) for name in result.files} == result.files
    assert (tmp_path / "new" / "set" / "README.md").is_file()


def test_a_seed_decides_and_python_writes_the_same(finished: Place, tmp_path: Path) -> None:
    first = made(finished.run, tmp_path / "a", *FEW)
    settings = {"quality": False, "max_new_tokens": 8, "keep_unfinished": True, "seed": 3}
    assert contents(dpllm.synthesize(finished.run, 9, tmp_path / "b", **settings)) == contents(tmp_path / "a")
    assert made(finished.run, tmp_path / "c", *FEW, "--seed", 4)[0] != first[0]
    drawn = [made(finished.run, tmp_path / name, *UNSEEDED) for name in "de"]
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1]["sampling"]["seed"] is None


def test_texts_are_those_of_generate(finished: Place, tmp_path: Path) -> None:
    """Of one batch, whose seed is a function of the seed and its number."""
    rows, _ = made(finished.run, tmp_path / "set", *FEW, "--rows", 3, "--keep-duplicates")
    seed = random.Random("3 batch 0").getrandbits(63)
    result = generate.sample(generate.load(finished.run), None, 3, max_new_tokens=8, seed=seed)
    assert [row["text"] for row in rows] == [item.text for item in result]


# --- interruption ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seeded", "torn"), [(True, b""), (False, b'{"texts": {"7": "ha')])
def test_an_interrupted_data_set_ends_in_the_same_bytes(
    finished: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeded: bool, torn: bytes
) -> None:
    order = (*(FEW if seeded else UNSEEDED), "--min-words", 2)
    monkeypatch.setattr(synthesize.secrets, "randbits", lambda bits: 77)
    uninterrupted = tmp_path / "whole"
    made(finished.run, uninterrupted, *order)
    sample, calls = generate.sample, []

    def breaks(*arguments: Any, **settings: Any) -> Any:
        calls.append(settings["seed"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sample(*arguments, **settings)

    monkeypatch.setattr(generate, "sample", breaks)
    part = tmp_path / "part"
    stopped = dpllm_("synthesize", finished.run, "--output", part, *order)
    assert (stopped.code, part.exists()) == (1, False)
    assert "The same command continues" in stopped.err
    left = tmp_path / ".part.draft.jsonl"
    with open(left, "ab") as file:
        file.write(torn)
    assert "another min_words, temperature" in refused(
        "synthesize", finished.run, "--output", part, *order, "--temperature", 0.5, "--min-words", 1
    )
    monkeypatch.setattr(synthesize.secrets, "randbits", lambda bits: 78)  # the draft's seed counts
    made(finished.run, part, *order)
    assert contents(part) == contents(uninterrupted)
    assert not left.exists()
    assert len(set(calls)) == len(calls) - 1, "only the batch that broke is drawn again, and no other twice"


def test_nothing_that_is_there_is_overwritten(finished: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    made(finished.run, tmp_path / "set", *FEW)
    before = contents(tmp_path)
    for output in (tmp_path / "set", ".", "", ".."):
        assert "already exists" in refused("synthesize", finished.run, "--output", output, *FEW)
    assert contents(tmp_path) == before
    for folder in ("export", "private"):
        own = finished.run / folder / "set"
        assert "reserved for the run" in refused("synthesize", finished.run, "--output", own, *FEW)


def test_what_fails_while_it_is_written_leaves_no_folder(
    finished: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = Mock(side_effect=RuntimeError)
    with monkeypatch.context() as patch:
        patch.setattr(synthesize, "write_json", fails)
        with pytest.raises(RuntimeError):
            dpllm_("synthesize", finished.run, "--output", tmp_path / "set", *FEW)
    assert [path.name for path in tmp_path.iterdir()] == [".set.draft.jsonl"]
    monkeypatch.setattr(generate, "sample", fails)
    made(finished.run, tmp_path / "set", *FEW)  # nothing is drawn again


# --- filters ---------------------------------------------------------------------------------------------------------


def test_unfinished_texts_are_dropped_and_counted(finished: Place, tmp_path: Path) -> None:
    rows, record = made(finished.run, tmp_path / "set", "--rows", 9, "--seed", 3, "--no-quality")
    assert record["sampling"]["max_new_tokens"] == 127, "the model's positions, less the token that begins a text"
    assert record["dropped"]["did not end"] > 0
    assert record["attempts"] == 9 + sum(record["dropped"].values())
    assert len({row["text"] for row in rows}) == 9


def test_a_model_that_never_ends_publishes_nothing_and_says_so(
    finished: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--rows", 9, "--seed", 3, "--max-new-tokens", 2, "--attempts", 2, "--no-quality")
    sample = generate.sample

    def endless(*arguments: Any, **settings: Any) -> Any:
        return [replace(item, ended=False) for item in sample(*arguments, **settings)]

    with monkeypatch.context() as patch:
        patch.setattr(generate, "sample", endless)
        message = refused("synthesize", finished.run, "--output", tmp_path / "set", *options)
    assert "of 16 texts 0 passed the filters, of 9 wanted" in message, "never more than attempts times rows"
    assert "did not end: 16" in message
    assert not (tmp_path / "set").exists()
    assert made(finished.run, tmp_path / "set", *options, "--attempts", 2000)[1]["attempts"] > 16


def test_duplicates_are_dropped_unless_they_are_kept(finished: Place, tmp_path: Path) -> None:
    greedy = (*FEW, "--temperature", 0)
    refusal = refused("synthesize", finished.run, "--output", tmp_path / "set", *greedy, "--attempts", 1)
    assert f"{draft.DUPLICATE}: " in refusal
    (tmp_path / ".set.draft.jsonl").unlink()
    rows, record = made(finished.run, tmp_path / "set", *greedy, "--keep-duplicates")
    assert len({row["text"] for row in rows}) == 1
    assert draft.DUPLICATE not in record["dropped"]


# --- whose rows they are ---------------------------------------------------------------------------------------------


def test_a_run_needs_its_card(finished: Place, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.run, tmp_path / "run"))
    (run / "export" / "privacy.json").unlink()
    assert f"Type dpllm card {run} first" in refused("synthesize", run, *FEW)
    shutil.copy(finished.run / "export" / "privacy.json", run / "export")
    (run / "export" / "audit" / "audit.json").write_text("{}")
    assert "was written before what lies there now" in refused("synthesize", run, *FEW)


def test_without_guarantee_only_public_data_give_public_rows(baseline: Place, finished: Place, tmp_path: Path) -> None:
    made(baseline.run, tmp_path / "set", *FEW)
    run = Path(shutil.copytree(finished.run, tmp_path / "run"))
    block = read(run / "export")
    attempted = block.pop("plan")
    carry(run / "export", {**block, "guarantee": False, "reason": "a test", "attempted": attempted})
    assert "gives no guarantee" in refused("synthesize", run, *FEW, code=3)
    assert not (run / "synthetic").exists()


@pytest.mark.parametrize("which", ["finished", "coded"])
def test_rows_are_a_function_of_what_the_run_released(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Nothing private is read, even where quality is measured: every byte is the same when it is changed, or gone."""
    place: Place = request.getfixturevalue(which)
    outputs = []
    for name in ("as it was", "changed", "gone"):
        root = Path(shutil.copytree(place.root, tmp_path / name))
        for path in contents(root / "run" / "private") if name == "changed" else ():
            (root / "run" / "private" / path).write_bytes(b"{}")
        if name == "gone":
            shutil.rmtree(root / "run" / "private")
        outputs.append(root / "set")
    # The training data and the ledger lie where the recipe says no more.
    moved = place.root.rename(place.root.with_name("elsewhere"))
    try:
        for output in outputs:
            made(output.parent / "run", output, *BRIEF)
    finally:
        moved.rename(place.root)
    assert contents(outputs[0]) == contents(outputs[1]) == contents(outputs[2])


# --- control codes and prompts ---------------------------------------------------------------------------------------


def test_each_row_is_asked_for_by_its_codes(coded: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = results(monkeypatch, generate, "sample")
    rows, record = made(coded.run, tmp_path / "set", *FEW)
    assert all(list(row) == [*CODES, "text"] for row in rows)
    texts = {f"{sample.prompt}{sample.text}" for batch in drawn for sample in batch}
    assert {f"visit: {row['visit']} | age: {row['age']}\n{row['text']}" for row in rows} <= texts
    assert (record["control"], record["shares"]) == (CODES, "shares of visit;age")
    (released,) = coded.json("export/privacy.json")["statistics"]["releases"]
    assert {f"{row['visit']};{row['age']}" for row in rows} <= released["value"].keys() - {"other"}


def test_a_data_set_with_a_guarantee_is_pushed_as_it_verifies(
    coded: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(coded.run, tmp_path / "set", *FEW)
    ledger = ("--ledger", coded.ledger)
    with hub_stand_in.running(monkeypatch) as hub:
        refused("push", tmp_path / "set", "alice/notes", code=3)
        assert hub.asked == []
        done("push", tmp_path / "set", "alice/notes", *ledger)
        arrived = dict(hub.repositories["datasets/alice/notes"].files)
        del arrived[".gitattributes"]
        assert arrived == contents(tmp_path / "set")
        assert ", 0 failed" in done("verify", "datasets/alice/notes", *ledger).out


def test_without_guarantee_codes_are_as_often_as_in_training_rows(coded: Place, tmp_path: Path) -> None:
    """A control for what privacy costs: "elsewhere" is in a third of the rows, and no value that was declared."""
    run = tmp_path / "open"
    done("train", coded.recipe, "--privacy.enabled", "false", "--data.public", "true", "--output_dir", run)
    done("card", run)
    rows, record = made(run, run / "synthetic", *FEW, "--rows", 40, "--keep-duplicates")
    assert (record["control"], record["shares"]) == (CODES, None)
    assert {row["visit"] for row in rows} == {"home", "clinic", "elsewhere"}
    assert ", 0 failed" in done("verify", run / "synthetic").out
    record["shares"] = "shares of visit;age"
    (run / "synthetic" / "synthetic.json").write_text(json.dumps(record))
    assert "shares names no statistic" in dpllm_("verify", run / "synthetic").out


def test_filters_do_not_change_the_codes(coded: Place, tmp_path: Path) -> None:
    plain, _ = made(coded.run, tmp_path / "a", *FEW)
    strict, record = made(coded.run, tmp_path / "b", *FEW, "--min-words", 2, "--attempts", 200)
    assert record["dropped"]["under 2 words"] > 0
    assert [[row[name] for name in CODES] for row in plain] == [[row[name] for name in CODES] for row in strict]


def test_codes_follow_the_noisy_counts_without_other_and_negative_ones(coded: Place) -> None:
    run = RunDir(coded.run)
    config, statement = run.load_config(), synthesize.carded(run)[1]
    assert statement.statistics
    first = statement.statistics.releases[0]

    def shares(value: Any) -> Any:
        other = first.model_copy(update={"value": {"home;old": 1}, "statistic": "shares of visit"})
        both = (other, first.model_copy(update={"value": value}))
        statistics = statement.statistics.model_copy(update={"releases": both})  # type: ignore[union-attr]
        return synthesize._shares(run, config, statement.model_copy(update={"statistics": statistics}))[1]

    positive = {("home", "old"): 30, ("clinic", "old"): 10}
    assert shares({"home;old": 30, "home;young": -9, "clinic;old": 10, "clinic;young": 0, "other": 99}) == positive
    heads = synthesize._heads(CODES, 10_000, None, positive, seed=5)
    counts = Counter((head["visit"], head["age"]) for head in heads)
    # 30 of 40; a binomial share of 10,000 rows is 0.0043 off, and six times that by chance once in 1e9.
    assert abs(counts["home", "old"] / 10_000 - 0.75) < 0.026
    assert counts.keys() == positive.keys()
    for nothing in ({"home;old": -1, "home;young": 0, "clinic;old": 0, "clinic;young": 0, "other": 99}, None):
        with pytest.raises(ConfigError, match="its card has no 'shares of visit;age'"):
            shares(nothing)


def test_codes_without_released_shares_are_refused_with_what_to_type(coded: Place, tmp_path: Path) -> None:
    run = Path(shutil.copytree(coded.run, tmp_path / "run"))
    (run / "describe.json").unlink()
    done("card", run)
    message, shares = refused("synthesize", run, *FEW), "--shares 'visit=VALUE,VALUE;age=VALUE,VALUE'"
    assert f"Type dpllm describe {run / 'config.yaml'} --epsilon E {shares}" in message
    assert f"dpllm card {run} --describe describe.json" in message


def as_format(finished: Place, run: Path, fmt: str) -> Path:
    """The finished run, as if it had been trained on such rows."""
    return edit_recipe(Path(shutil.copytree(finished.run, run)), "data", format=fmt)


@pytest.mark.parametrize("fmt", ["prompt_completion", "messages"])
def test_models_that_answer_need_public_prompts(finished: Place, tmp_path: Path, fmt: str) -> None:
    run = as_format(finished, tmp_path / "run", fmt)
    assert "Type --prompts FILE" in refused("synthesize", run, *FEW)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Anna bought\nWho came?\n")
    rows, record = made(run, tmp_path / "set", *FEW, "--prompts", prompts)
    assert [row["prompt"] for row in rows] == ["Anna bought", "Who came?"] * 4 + ["Anna bought"]
    assert all(list(row) == ["prompt", "completion"] for row in rows)
    assert (record["columns"], record["prompts"]) == (["prompt", "completion"], 2)


@pytest.mark.parametrize("how", ["link", "hard", "eval", "private", "copied", "edited", "lines"])
def test_private_data_of_the_run_are_no_prompts(
    finished: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Rows would publish them. Where one stands, where a copy lies and how the recipe named the data does not matter."""
    run = as_format(finished, tmp_path / "run", "prompt_completion")
    data = tmp_path / "data"
    for name in ("train", "eval"):
        rows = [{"prompt": f"Anna bought\nin {name}", "completion": "a hat"}, {"prompt": "Who?", "completion": name}]
        tiny.write_rows(data / f"{name}.jsonl", rows)
    edit_recipe(run, "data", train="data/t*.jsonl", eval="data/eval.jsonl", eval_public=False)
    (data / "link.jsonl").symlink_to(data / "train.jsonl")
    (data / "hard.jsonl").hardlink_to(data / "train.jsonl")
    tiny.write_rows(data / "edited.jsonl", [{"prompt": "Public"}, {"prompt": " anna  BOUGHT in train!"}])
    (data / "copied.txt").write_text((data / "train.jsonl").read_text())
    (data / "lines.txt").write_text("Public\n\nAnna bought\nin eval\n")
    private = Path(shutil.copy(data / "link.jsonl", run / "private"))
    prompts = private if how == "private" else next(data.glob(f"{how}.*"))
    rows = RunDir(run).rows
    rows.unlink()  # of the run that this one is a copy of
    assert "was removed" in refused("synthesize", run, *FEW, "--prompts", prompts, code=3)
    monkeypatch.chdir(tmp_path)
    recipe = RunDir(run).load_config().data
    keep_rows(
        rows, recipe, *(load_table(name, recipe, "train", tmp_path / "cache") for name in (recipe.train, recipe.eval))
    )
    monkeypatch.chdir("/")
    moved = run.rename(tmp_path / "moved")
    prompts = moved / "private" / private.name if how == "private" else prompts
    message = refused("synthesize", moved, *FEW, "--prompts", prompts, code=3)
    assert "private data of the run" in message
    assert "Anna" not in message
    assert how == "private" or " prompts, the first of them number " in message
    (tmp_path / "public.txt").write_text("Anna bought\nWho came?\n")
    made(moved, tmp_path / "set", *FEW, "--prompts", tmp_path / "public.txt")


def test_prompts_of_a_run_on_public_data_are_not_compared(finished: Place, tmp_path: Path) -> None:
    run = as_format(finished, tmp_path / "run", "prompt_completion")
    edit_recipe(run, "data", public=True)
    RunDir(run).rows.unlink()
    done("card", run)
    (tmp_path / "public.txt").write_text("Anna bought\n")
    made(run, tmp_path / "set", *FEW, "--prompts", tmp_path / "public.txt")


def test_a_run_keeps_digests_of_its_private_rows(finished: Place) -> None:
    rows = RunDir(finished.run).rows
    texts = [json.loads(line)["text"] for line in finished.train.read_text().splitlines()]
    assert private_among(rows, ["public", *texts]) == list(range(2, len(texts) + 2))
    assert json.loads(rows.read_text())["training"]["places"] == [str(finished.train)]
    assert json.loads(rows.read_text())["units"] == len(texts), "evaluation rows are declared public"


def test_prompts_are_for_models_that_answer(finished: Place, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Anna\n")
    assert "leave them out" in refused("synthesize", finished.run, *FEW, "--prompts", tmp_path / "prompts.txt")
    (tmp_path / "prompts.jsonl").write_text('"Anna"\n{"messages": [{"role": "user", "content": "Who?"}]}\n')
    run = as_format(finished, tmp_path / "run", "messages")
    assert "prompts have to be plain text" in refused("synthesize", run, *FEW, "--prompts", tmp_path / "prompts.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", 0), "are out of range"),
        (("--attempts", 0), "are out of range"),
        (("--seed", -1), "the seed is not negative"),
        (("--temperature", "1e-300"), "are out of range"),
        (("--max-new-tokens", 500), "exceed the 128"),
        (("--epsilon", 1), "has no effect with --by training"),
        (("--unit", "who"), "has no effect with --by training"),
        (("--dry-run",), "has no effect with --by training"),
        (("--prompts", "nowhere.txt"), "cannot be read"),
    ],
)
def test_mistakes_are_one_line_each_and_leave_nothing(
    finished: Place, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    assert message in refused("synthesize", finished.run, *FEW, *arguments, "--output", tmp_path / "set")
    assert [*tmp_path.iterdir()] == []
