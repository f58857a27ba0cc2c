"""Clusters and classifiers of private texts: what they cost, what nobody sees, bad input, and what they say of other rows."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import sentence_encoders
import tiny
from published import verify_without_torch
from released_folders import CLUSTERS, PREDICT, UNITS, Json, Say, entries, ledger, released, rows, verdicts, write

from dpllm.cli import main
from dpllm.ledger import Budget, RunRequest, budgets, open_ledger
from dpllm.ledger.budgets import reserve_all
from dpllm.model import loading
from dpllm.privacy import embedded
from dpllm.privacy.events import Gaussian, SelfComposed
from dpllm.recipe.config import ModelConfig
from dpllm.releases import embeddings
from dpllm.releases.embeddings import Encoder
from dpllm.statement.released import Statistics, page
from dpllm.text import builtin


@pytest.mark.parametrize(("options", "folder", "steps"), [(PREDICT, "classifier", 2), (CLUSTERS, "clusters", 5)])
def test_a_release_is_charged_round_by_round_and_verifies(
    say: Say, capsys: pytest.CaptureFixture[str], options: list[str], folder: str, steps: int
) -> None:
    code, printed, _ = say(*options, "--dry-run")
    assert (code, entries()) == (0, 0)
    assert "Nothing was spent" in printed
    code, printed, error = say(*options)
    assert code == 0, error
    assert "charged to the ledger; all of it is in" in printed
    statistics, book = released(folder), ledger()
    [release], [run] = statistics.releases, book.runs("notes")
    assert run.event == release.event == SelfComposed(steps, Gaussian(release.noise_multiplier))
    assert (run.state, run.steps, run.reservation.num_steps) == ("completed", steps, steps)
    assert run.reservation.entry == release.entry
    assert statistics.epsilon == pytest.approx(20.0, rel=1e-2)
    assert statistics.epsilon == book.spent("notes", statistics.delta)
    assert release.declared.units == UNITS
    counts = [count for _, count in release.counts()]
    assert sum(counts) == pytest.approx(UNITS, abs=4 * release.error_95)
    assert set(verdicts(capsys, folder, "--ledger", "l.sqlite").values()) == {"verified", "asserted"}
    assert "failed" not in verdicts(capsys, folder).values()
    text = "".join(path.read_text(errors="replace") for path in Path(folder).iterdir())
    assert "patient 1" not in text
    assert "employer" not in text
    code, _, error = say(*options)
    assert (code, len(ledger().runs("notes"))) == (2, 1)
    assert "holds an earlier release" in error


def test_a_crash_in_the_second_round_stays_charged(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    add_noise, steps_charged = embedded._noised, []

    def crash(sums: Any, scale: float) -> Any:
        [run] = ledger().runs("notes")
        steps_charged.append(run.steps)
        if len(steps_charged) == 2:
            raise RuntimeError("power cut")
        return add_noise(sums, scale)

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_noised", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            say(*CLUSTERS)
    assert steps_charged == [1, 2], "each round is charged before it is drawn"
    assert not Path("clusters").exists()
    [run] = ledger().runs("notes")
    assert (run.state, run.steps) == ("running", 2)
    spent = ledger().spent("notes", 1e-6)
    assert say(*CLUSTERS)[0] == 0
    assert len(ledger().runs("notes")) == 2
    assert ledger().spent("notes", 1e-6) > 1.3 * spent


@pytest.mark.parametrize("units", [40, 41, 5])
def test_how_many_clusters_are_borne_follows_from_the_public_number_of_units(say: Say, units: int) -> None:
    """A refusal by the private number of units told of one more or less."""
    write(rows(units))
    words = ["--clusters", "3", "--data.public_size", "100", "--dry-run"]
    code, _, error = say(*words, epsilon=1.0)
    assert (code, say(*words, epsilon=20.0)[0]) == (2, 0)
    assert "100 units are too few for 3 clusters at epsilon 1" in error
    assert entries() == 0


def test_values_that_are_not_listed_or_missing_are_other_and_never_refused(say: Say) -> None:
    odd: list[Any] = ["never listed", None, "", "YES", 7, ["yes"], {"yes": 1}, "other"]
    written = [{**row, "label": label} for row, label in zip(rows(4 * len(odd)), 8 * odd, strict=True)]
    del written[1]["label"]
    write(written)
    code, _, error = say(*PREDICT)
    assert code == 0, error
    counts = dict(released("classifier").releases[0].counts())
    assert counts["other"] == pytest.approx(32, abs=10)
    assert "never listed" not in (Path("classifier") / "describe.json").read_text()


def test_odd_texts_and_a_unit_of_a_thousand_rows_are_no_error(say: Say) -> None:
    odd = [{"text": "", "who": "p1", "label": "yes"}, {"text": " \u200b", "who": "p2", "label": "no"}]
    write([*rows(), *odd, *({"text": f"again {n} " * 40, "who": "p3", "label": "yes"} for n in range(1000))])
    assert say(*PREDICT)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--predict", "label", "--values", "yes"], "--values"),
        (["--predict", "label", "--values", "yes,other"], "--values"),
        (["--predict", "label"], "--values"),
        (["--predict", "diagnosis", "--values", "a,b"], "no row has a column 'diagnosis'"),
        ([*CLUSTERS, *PREDICT], "need separate folders"),
        ([*CLUSTERS, "--values", "a,b"], "need separate folders"),
        ([*CLUSTERS, "--epsilon", "0.002", "--data.public_size", "200000"], "takes noise of"),
        ([*CLUSTERS, "--units"], "another dpllm describe"),
        (["--clusters", "1"], "--clusters 1: is not from 2 to 99"),
        (["--clusters", "100"], "--clusters 100: is not from 2 to 99"),
        ([*CLUSTERS, "--model", "builtin:none"], "builtin"),
        ([*CLUSTERS, "--max-examples-per-unit", "10000"], "--max-examples-per-unit"),
        ([*CLUSTERS, "--data.public_size", "1"], "data.public_size 1 is wrong"),
        ([*CLUSTERS, "--delta", "0.5"], "delta"),
        ([*CLUSTERS, "--output", "/dev/null/x"], "cannot be written to"),
        ([*CLUSTERS, "--model.adapter", "somewhere"], "model.adapter"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_spent(say: Say, words: list[str], message: str) -> None:
    code, _, error = say(*words)
    assert code in (2, 3)
    [line] = error.splitlines()
    assert message in line
    assert entries() == 0


def test_texts_without_an_encoder_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "rows.jsonl", "--epsilon", "1", "--clusters", "2"]) == 2
    assert "--model MODEL" in capsys.readouterr().err


def test_an_encoder_that_couples_rows_or_learned_them_is_refused(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    load = loading.load_base

    def coupled(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        model.config.quantization_config = SimpleNamespace(load_in_8bit=True, llm_int8_threshold=6.0)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_base", coupled)
        code, _, error = say(*PREDICT)
    assert (code, ledger().runs("notes")) == (3, [])
    assert "outlier columns" in error
    tuned_on_notes = SimpleNamespace(models=[SimpleNamespace(dataset="notes")])
    monkeypatch.setattr("dpllm.releases.describe.of_base", lambda config: tuned_on_notes)
    code, _, error = say(*PREDICT)
    assert (code, ledger().runs("notes")) == (3, [])
    assert "was tuned on notes" in error


def test_a_budget_that_is_used_up_refuses_before_the_texts_are_read(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ledger("l.sqlite") as book:
        budgets.set_budget(book, "notes", Budget(2.0, 1e-6, "who", "zero_out", by="a", reason="b"))
    monkeypatch.setattr(embeddings, "Encoder", lambda *_: pytest.fail("the texts were read"))
    code, _, error = say(*PREDICT)
    assert code == 3
    assert "notes" in error


def name_code(encoder: Path) -> None:
    """Its class would come from elsewhere."""
    settings = json.loads((encoder / "config.json").read_text())
    settings |= {"auto_map": {"AutoModelForCausalLM": "code.Odd"}, "model_type": "odd"}
    (encoder / "config.json").write_text(json.dumps(settings))
    (encoder / "code.py").write_text("open('ran', 'w')\n")


def add_tokens(encoder: Path) -> None:
    """More than its model has: a mutant reads texts until one has such a token, and ends with an error that tells of it."""
    tokenizer = loading.load_tokenizer(ModelConfig(name_or_path=str(encoder)))
    tokenizer.add_tokens([f"zebra{number}" for number in range(1000)])
    tokenizer.save_pretrained(encoder)


def remove_tokenizer(encoder: Path) -> None:
    """transformers makes one of five tokens, by which texts of one length are the same."""
    shutil.rmtree(encoder)
    for file in sentence_encoders.save(encoder).glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize("change", [name_code, add_tokens, remove_tokenizer])
def test_a_folder_that_is_no_encoder_is_refused_and_nothing_is_spent(say: Say, change: Callable[[Path], None]) -> None:
    change(Path(shutil.copytree(builtin.path("builtin:tiny"), "encoder")))
    code, _, error = say(*CLUSTERS, "--model", "encoder")
    assert (code, error.count("\n"), entries(), Path("ran").exists()) == (2, 1, 0, False)


def test_declared_values_are_read_as_the_data_are(say: Say) -> None:
    write([{**row, "label": 1.0 if row["label"] == "yes" else 2.0} for row in rows()])
    assert say("--predict", "label", "--values", "1.0,2.0")[0] == 0
    value = released("classifier").releases[0].value or {}
    assert set(value) == {"1", "2", "other"}
    assert abs(value["other"]) < value["1"]


def test_a_classifier_tells_labels_of_a_file_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write([{"text": text} for text in ("pain in the chest, worse", "  ", "a letter is asked for", "")], "new.jsonl")
    assert main(["classify", "classifier", "new.jsonl"]) == 0
    classified = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert classified == [{"row": row, "label": label} for row, label in enumerate(("yes", None, "no", None), 1)]
    write([{"number": 1}], "bare.jsonl")
    code = main(["classify", "classifier", "bare.jsonl"])
    assert (code, capsys.readouterr().err.count("\n")) == (2, 1)


def test_a_sentence_encoder_releases_and_classifies(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    path = sentence_encoders.save(Path("sentences"), pooling="mean_tokens", normalize="")
    write([{**row, "text": row["text"].replace("a letter for", "visit, letter")} for row in rows()])
    code, _, error = say(*PREDICT, "--model", path)
    assert code == 0, error
    assert "failed" not in verdicts(capsys, "classifier", "--ledger", "l.sqlite").values()
    write([{"text": "pain, chest, worse, meals"}, {"text": "visit letter employer, asked"}, {"text": ""}], "new.jsonl")
    assert main(["classify", "classifier", "new.jsonl", "--model", str(path)]) == 0
    assert [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()] == ["yes", "no", None]
    assert "`dpllm classify FOLDER FILE --model DIR`" in Path("classifier/README.md").read_text("utf-8")
    path = path.rename("elsewhere")
    assert main(["classify", "classifier", "new.jsonl"]) == 2
    assert "type --model DIR" in capsys.readouterr().err
    (path / "modules.json").write_text((path / "modules.json").read_text().replace("1_Pooling", "2_Normalize"))
    assert main(["classify", "classifier", "new.jsonl", "--model", str(path)]) == 2


def test_clusters_are_named_by_the_vocabulary_and_assign_a_file(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(*CLUSTERS)[0] == 0
    names = sorted(released("clusters").releases[0].value or {})
    assert [name[:3] for name in names] == ["01 ", "02 "]
    common = Encoder(ModelConfig(name_or_path="builtin:tiny"), 16).words()
    assert all(len(name[3:].split(", ")) == 3 and {*name[3:].split(", ")} <= {*common} for name in names)
    write([*rows(2), {"text": ""}], "new.jsonl")
    capsys.readouterr()
    assert main(["classify", "clusters", "new.jsonl"]) == 0
    *labels, of_no_text = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    assert of_no_text is None
    assert labels[0] == labels[1] != labels[2] == labels[3]
    assert set(labels) == set(names)


def edited(folder: Path, **changes: Any) -> None:
    """describe.json of another release, with the page that it gives."""
    stated = json.loads((folder / "describe.json").read_text())
    of_release = {name: changes.pop(name) for name in list(changes) if name in stated["releases"][0]}
    stated = {**stated, **changes, "releases": [{**stated["releases"][0], **of_release}]}
    (folder / "describe.json").write_text(json.dumps(stated))
    (folder / "README.md").write_text(page(Statistics.pick(stated)))


def test_what_was_changed_afterwards_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the ledger knows, and what classifiers alone have; tests/verification/test_forged_releases.py has the rest."""
    statistics = released("classifier")
    [release] = statistics.releases
    declared, value = release.declared.to_json(), release.value or {}
    changes: list[Json] = [
        {"event": {"type": "self_composed", "count": 1, "event": {"type": "gaussian", "noise_multiplier": 9.0}}},
        {"value": {**value, "yes": 3.5}},
        {"value": {"yes": 3}},
        {"value": {**value, "yes": 1e300}},
        {"entry": "0" * 16},
        {"epsilon": statistics.epsilon * 0.9995},
        {"dataset": "other"},
        {"unit": "example"},
        {"declared": {**declared, "quantile": 0.5}},
        {"declared": {**declared, "values": ["yes"]}},
        {"declared": {**declared, "dimensions": 3}},
        {"declared": {**declared, "units": 200_000}},
    ]
    honest = {path.name: path.read_bytes() for path in folder.iterdir()}
    for change in changes:
        edited(folder, **change)
        assert "failed" in verdicts(capsys, "classifier", "--ledger", "l.sqlite").values(), change
        for name, content in honest.items():
            (folder / name).write_bytes(content)
    assert "failed" not in verdicts(capsys, "classifier", "--ledger", "l.sqlite").values()


def test_an_entry_that_was_not_charged_pays_for_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statistics = released("classifier")
    event = statistics.releases[0].event
    request = RunRequest(event, statistics.delta, 2, statistics.unit, statistics.neighbouring_relation)
    [claim] = reserve_all(ledger(), "notes", [request])
    edited(folder, entry=claim.entry)
    assert verdicts(capsys, "classifier", "--ledger", "l.sqlite")["ledger"] == "failed"
    ledger().charge(claim.entry, 1)
    assert verdicts(capsys, "classifier", "--ledger", "l.sqlite")["ledger"] == "failed", "half of it is not all"


@pytest.mark.parametrize("odd", ["nan", "shape", "half", "pickle", "missing", "dry"])
def test_vectors_not_released_classify_nothing(folder: Path, capsys: pytest.CaptureFixture[str], odd: str) -> None:
    """No pickle is read, and shapes and numbers are looked at even where somebody made the hash fit."""
    path = folder / "vectors.safetensors"
    tensors = safetensors.numpy.load(path.read_bytes())
    if odd == "nan":
        tensors["vectors"][0, 0] = np.nan
    elif odd == "shape":
        tensors["vectors"] = tensors["vectors"][:, :1].copy()
    elif odd == "half":
        tensors["centre"] = tensors["centre"].astype(np.float16)
    elif odd == "missing":
        del tensors["centre"]
    content = pickle.dumps(tensors) if odd == "pickle" else safetensors.numpy.save(tensors)
    path.write_bytes(content)
    edited(folder, vectors=hashlib.sha256(content).hexdigest(), **({"value": None} if odd == "dry" else {}))
    assert main(["classify", "classifier", "rows.jsonl"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "vectors.safetensors" in error
    assert "failed" in verdicts(capsys, "classifier").values()


def test_verify_of_a_folder_loads_no_torch(folder: Path) -> None:
    verify_without_torch(folder)


def change_weights(encoder: Path) -> None:
    tensors = safetensors.numpy.load((encoder / "model.safetensors").read_bytes())
    next(tensor for tensor in tensors.values() if tensor.ndim == 1)[0] += 1e-3
    (encoder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))


def change_merges(encoder: Path) -> None:
    tokenizer = json.loads((encoder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (encoder / "tokenizer.json").write_text(json.dumps(tokenizer))


def configure(encoder: Path, **changes: Any) -> None:
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps({**config, **changes}))


CHANGES: dict[str, tuple[Callable[[Path], None], int]] = {
    "none": (lambda _: None, 0),
    "version of transformers": (partial(configure, transformers_version="1.0"), 0),
    "weights": (change_weights, 2),
    "vocabulary": (change_merges, 2),
    "a number of the configuration": (partial(configure, rms_norm_eps=0.5), 2),
    "activation": (partial(configure, hidden_act="relu"), 2),
    "size": (tiny.save_model, 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_the_encoder_of_the_release_classifies(folder: Path, change: str) -> None:
    apply, exit_code = CHANGES[change]
    apply(Path(shutil.copytree(builtin.path("builtin:tiny"), "encoder")))
    assert main(["classify", str(folder), "rows.jsonl", "--model", "encoder"]) == exit_code


def test_a_folder_whose_labels_were_edited_classifies_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((folder / "describe.json").read_text())
    record["releases"][0]["declared"]["values"] = ["no", "never"]
    (folder / "describe.json").write_text(json.dumps(record))
    assert main(["classify", str(folder), "rows.jsonl"]) == 2
    error = capsys.readouterr().err
    assert ("differs from what was released" in error, error.count("\n")) == (True, 1)


def test_precision_and_evaluation_rows_of_a_recipe_change_no_vector(say: Say) -> None:
    """Whoever classifies does not know the recipe; evaluation rows are not read."""
    assert say(*PREDICT, "--model.dtype", "bfloat16", "--data.eval", "nowhere.jsonl")[0] == 0
    assert main(["classify", "classifier", "rows.jsonl"]) == 0
