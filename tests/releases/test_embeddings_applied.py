"""Folders of clusters and classifiers: what they say of other rows, and what verification and classification refuse."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import sentence_encoders
import tiny
from released_folders import CLUSTERS, PREDICT, Json, Say, entries, ledger, released, rows, verdicts, write

from dpllm.cli import main
from dpllm.ledger import RunRequest
from dpllm.ledger.budgets import reserve_all
from dpllm.recipe.config import ModelConfig
from dpllm.releases.embeddings import Encoder
from dpllm.statement.released import Statistics
from dpllm.text import builtin


def test_a_classifier_tells_labels_apart_and_classifies_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        [{"text": "pain in the chest, worse"}, {"text": "  "}, {"text": "a letter is asked for"}, {"text": ""}],
        "new.jsonl",
    )
    assert main(["classify", "classifier", "new.jsonl"]) == 0
    record = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert record == [{"row": n, "label": one} for n, one in enumerate(("yes", None, "no", None), 1)]
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


def test_clusters_are_named_by_words_of_the_vocabulary_and_assign_a_file(
    say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(*CLUSTERS)[0] == 0
    names = sorted(released("clusters").releases[0].value or {})
    assert [name[:3] for name in names] == ["01 ", "02 "]
    common = Encoder(ModelConfig(name_or_path="builtin:tiny"), 16).words()
    assert all(len(name[3:].split(", ")) == 3 and {*name[3:].split(", ")} <= {*common} for name in names)
    write([*rows(2), {"text": ""}], "new.jsonl")
    capsys.readouterr()
    assert main(["classify", "clusters", "new.jsonl"]) == 0
    record = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    assert record[-1] is None
    assert record[0] == record[1] != record[2] == record[3]
    assert set(record[:-1]) == set(names)


def edited(folder: Path, **changes: Any) -> None:
    """describe.json of another release, with the page that it gives."""
    from dpllm.statement.released import page

    stated = json.loads((folder / "describe.json").read_text())
    of_release = {name: changes.pop(name) for name in list(changes) if name in stated["releases"][0]}
    stated = {**stated, **changes, "releases": [{**stated["releases"][0], **of_release}]}
    (folder / "describe.json").write_text(json.dumps(stated))
    (folder / "README.md").write_text(page(Statistics.pick(stated)))


def test_what_was_changed_afterwards_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = released("classifier").releases[0]
    event = {"type": "self_composed", "count": 2, "event": {"type": "gaussian", "noise_multiplier": 9.0}}
    changes: list[Json] = [
        {"epsilon": 1.0},
        {"delta": 0.5},
        {"event": event},
        {"event": {**event, "count": 1}},
        {"event": {"type": "pure_dp", "epsilon": 1.0}},
        {"error_95": 0.1},
        {"epsilon": released("classifier").epsilon * 0.9995},
        {"statistic": "exact sizes"},
        {"declared": {**one.declared.to_json(), "quantile": 0.5}},
        {"mechanism": "none"},
        {"value": {**(one.value or {}), "yes": 3.5}},
        {"value": {"yes": 3}},
        {"value": {**(one.value or {}), "yes": 1e300}},
        {"vectors": "0" * 64},
        {"encoder": None},
        {"entry": "0" * 16},
        {"dataset": "other"},
        {"unit": "example"},
        {"neighbouring_relation": "add_or_remove_one"},
        {"declared": {**one.declared.to_json(), "units": 200_000}},
        {"declared": {**one.declared.to_json(), "values": ["yes"]}},
        {"declared": {**one.declared.to_json(), "dimensions": 3}},
    ]
    keep = {path.name: path.read_bytes() for path in folder.iterdir()}
    for change in changes:
        edited(folder, **change)
        assert "failed" in verdicts(capsys, "classifier", "--ledger", "l.sqlite").values(), change
        for name, content in keep.items():
            (folder / name).write_bytes(content)
    for name, content in {
        "README.md": b"# safe",
        "more.txt": b"",
        "vectors.safetensors": b"odd",
        "describe.json": b"{}",
    }.items():
        (folder / name).write_bytes(content)
        assert "failed" in verdicts(capsys, "classifier").values(), name
        (folder / name).unlink()
        for kept, old in keep.items():
            (folder / kept).write_bytes(old)
    assert "failed" not in verdicts(capsys, "classifier", "--ledger", "l.sqlite").values()


def test_an_entry_that_was_reserved_and_not_charged_pays_for_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = released("classifier")
    request = RunRequest(one.releases[0].event, one.delta, 2, one.unit, one.neighbouring_relation)
    [claim] = reserve_all(ledger(), "notes", [request])
    edited(folder, entry=claim.entry)
    checks = verdicts(capsys, "classifier", "--ledger", "l.sqlite")
    assert checks["ledger"] == "failed"
    ledger().charge(claim.entry, 1)
    assert verdicts(capsys, "classifier", "--ledger", "l.sqlite")["ledger"] == "failed", "half of it is not all"


@pytest.mark.parametrize("odd", ["nan", "shape", "half", "pickle", "missing", "dry"])
def test_a_file_that_is_not_what_was_released_classifies_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], odd: str
) -> None:
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
    program = "import sys; from dpllm.cli import main; code = main(['verify', 'classifier']); print(code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


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
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_the_encoder_of_the_release_classifies(folder: Path, change: str) -> None:
    apply, exit_code = CHANGES[change]
    apply(Path(shutil.copytree(builtin.path("builtin:tiny"), "encoder")))
    assert main(["classify", str(folder), "rows.jsonl", "--model", "encoder"]) == exit_code


def test_an_encoder_of_another_size_classifies_nothing(folder: Path, tmp_path: Path) -> None:
    assert main(["classify", str(folder), "rows.jsonl", "--model", str(tiny.save_model(tmp_path / "tiny"))]) == 2


def test_a_folder_whose_labels_were_edited_is_applied_to_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_an_encoder_without_its_tokenizer_is_refused_before_anything_is_paid(say: Say, tmp_path: Path) -> None:
    """transformers makes one of five tokens, by which texts of one length are the same."""
    path = sentence_encoders.save(tmp_path / "m")
    for file in path.glob("tokenizer*"):
        file.unlink()
    code, _, error = say(*PREDICT, "--model", path)
    assert (code, error.count("\n")) == (2, 1)
    assert entries() == 0
