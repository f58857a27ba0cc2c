"""Verification of a real run: its files, private text, the run directory, the ledger, signatures and hostile files."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import published
import pytest
import yaml
from published import carry, changed, failing, make_key, read, rehash, write
from running import Place, done, dpllm_, edit_json, refused
from safetensors import numpy as safetensors

from dpllm.files import sha256
from dpllm.ledger import Ledger
from dpllm.publish import push
from dpllm.releases import leaks
from dpllm.run.directory import RunDir
from dpllm.verification.verify import verify

# Files.


ZIP = b"PK\x03\x04" + bytes(60)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", b"hello"),
        ("notes.txt", pickle.dumps(["hello"], protocol=0)),
        ("optimizer.pt", ZIP),
        ("extra.safetensors", b"\x80\x04."),
        ("modeling.py", b"import os\n"),
        (".env", b"x"),
        ("audit/rng_state.json", b"{}"),
        ("audit/notes.md", b"SQLite format 3\x00"),
    ],
)
def test_a_file_that_is_not_known_is_refused(run: Path, name: str, content: bytes) -> None:
    path = run / "export" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert "kinds of files" in failing(run)
    answer = dpllm_("card", run)
    assert answer.code in (2, 3)
    assert "does not verify" in answer.err or f"export/{name} is not what the run wrote" in answer.err
    # Listed and hashed by somebody who writes all files anew, it is refused all the same.
    rehash(run / "export", name)
    assert "kinds of files" in failing(run / "export")


def _tensor(kind: str, shape: list[Any], *offsets: Any) -> published.Json:
    return {"dtype": kind, "shape": shape, "data_offsets": list(offsets)}


def _headed(header: published.Json) -> bytes:
    """A safetensors file of 16 bytes of numbers."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


def _with_an_optimizer(old: bytes) -> bytes:
    tensors = safetensors.load(old)
    return safetensors.save({**tensors, "exp_avg": next(iter(tensors.values())).copy()}, {"format": "pt"})


WEIGHTS = "adapter_model.safetensors"
WRONG_HEADERS = {
    "other bytes than its shape": {"a": _tensor("F32", [3], 0, 16)},
    "a type of another size": {"a": _tensor("F16", [4], 0, 16)},
    "an unknown type": {"a": _tensor("F31", [4], 0, 16)},
    "a gap": {"a": _tensor("F32", [1], 0, 4), "b": _tensor("F32", [2], 8, 16)},
    "one over another": {"a": _tensor("F32", [4], 0, 16), "b": _tensor("F32", [2], 8, 16)},
    "not from the beginning": {"a": _tensor("F32", [3], 4, 16)},
    "a negative length": {"a": _tensor("F32", [-2, -2], 0, 16)},
    "half a number": {"a": _tensor("F32", [0.5, 8], 0, 16)},
    "true for one": {"a": _tensor("F32", [True, 4], 0, 16)},
    "axes without end": {"a": _tensor("F32", [4, *[1] * 100_000], 0, 16)},
    "no offsets": {"a": {"dtype": "F32", "shape": [4]}},
    "no tensors": {},
    "a text": {"__metadata__": {"format": "pt", "of": "Ann"}, "a": _tensor("F32", [2, 2], 0, 16)},
}
FORGED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a pickle for a tokenizer": ("tokenizer.json", lambda _: pickle.dumps(["hello"], protocol=0)),
    "more behind a tokenizer": ("tokenizer.json", lambda old: old + b"{}"),
    "a pickle for a template": ("chat_template.jinja", lambda _: pickle.dumps(["hello"], protocol=2)),
    "a pickle for weights": (WEIGHTS, lambda _: pickle.dumps(["hello"], protocol=2)),
    "no weights": (WEIGHTS, lambda _: b""),
    "a byte of weights less": (WEIGHTS, lambda old: old[:-1]),
    "a byte of weights more": (WEIGHTS, lambda old: old + b"\0"),
    "half a header": (WEIGHTS, lambda old: old[:100]),
    "half a length": (WEIGHTS, lambda old: old[:7]),
    "an empty header": (WEIGHTS, lambda _: bytes(8)),
    "a header of brackets": (WEIGHTS, lambda _: struct.pack("<Q", 9000) + b"[" * 9000),
    "a header without end": (WEIGHTS, lambda _: struct.pack("<Q", 2**60)),
    "tensors of the optimizer": (WEIGHTS, _with_an_optimizer),
    **{
        f"weights: {name}": (WEIGHTS, lambda _, header=header: _headed(header))
        for name, header in WRONG_HEADERS.items()
    },
}


@pytest.mark.parametrize("how", FORGED)
def test_a_known_file_is_what_its_name_says(export: Path, how: str) -> None:
    """Weights describe every byte once."""
    name, forge = FORGED[how]
    path = export / name
    path.write_bytes(forge(path.read_bytes()))
    rehash(export, name)
    assert "kinds of files" in failing(export)


def test_a_header_that_describes_every_byte_once_is_none_of_these(export: Path) -> None:
    (export / WEIGHTS).write_bytes(_headed({"a": _tensor("F32", [2, 2], 0, 16)}))
    rehash(export, WEIGHTS)
    assert "kinds of files" not in failing(export)


def forge(export: Path, name: str) -> None:
    """Gives block and audit the hash of a changed file, as somebody would who writes all files anew."""
    path = export / "audit" / "audit.json"
    report = json.loads(path.read_text("utf-8"))
    if name in report["weights"]:
        report["weights"][name] = sha256(export / name)
        path.write_text(json.dumps(report), encoding="utf-8")
        write(export, changed(read(export), ("audit", "weights"), lambda _: report["weights"]))
    rehash(export, name, "audit/audit.json")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adapter_config.json", {"auto_map": {"AutoModel": "alice/code--modeling.Model"}}),
        ("adapter_config.json", {"auto_mapping": {"base_model_class": "Model", "parent_library": "evil"}}),
        ("adapter_config.json", {"unknown": "evil"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["alice/code--tokenization.Tokenizer", None]}}),
        ("tokenizer_config.json", {"tokenizer_file": "/home/alice/tokenizer.json"}),
        ("config.json", {"auto_map": {"AutoConfig": "configuration.Config"}}),
        ("config.json", {"custom_pipelines": {"a": {"impl": "pipeline.Pipeline"}}}),
        ("config.json", {"text_config": {"layers": [{"impl": "alice--code.Model"}]}}),
        ("config.json", {"attn_implementation": "alice/kernel"}),
        ("generation_config.json", {"custom_generate": "alice/code"}),
        ("config.json", {"_name_or_path": "/home/alice/model"}),
    ],
    ids=str,
)
def test_settings_that_lead_to_code_elsewhere_are_refused(export: Path, name: str, settings: published.Json) -> None:
    path = export / name
    plain = json.loads(path.read_text("utf-8")) if path.exists() else {"model_type": "llama", "dtype": "float32"}
    path.write_text(json.dumps(plain), encoding="utf-8")
    forge(export, name)
    assert not failing(export)
    path.write_text(json.dumps({**plain, **settings}), encoding="utf-8")
    forge(export, name)
    assert failing(export) == {"kinds of files"}


def detail_of(export: Path, name: str) -> str:
    return next(check.detail for check in verify(export).checks if check.name == name)


def test_links_and_special_files_are_seen_and_not_followed(export: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x", encoding="utf-8")
    (export / "link.json").symlink_to(secret)
    (export / "folder").symlink_to(tmp_path)
    os.mkfifo(export / "pipe")
    assert all(name in detail_of(export, "kinds of files") for name in ("link.json", "folder", "pipe"))
    (export / "privacy.json").unlink()
    (export / "privacy.json").symlink_to(secret)
    assert "card" in failing(export)


def test_what_the_hub_adds_is_no_part_of_an_export(run: Path) -> None:
    (run / "export" / ".gitattributes").write_text("*.safetensors filter=lfs\n", encoding="utf-8")
    assert not failing(run / "export")
    assert "kinds of files" in failing(run)


@pytest.mark.parametrize(
    "settings", [{"base_model_name_or_path": "evil/base"}, {"base_model_name_or_path": None}, {"revision": "other"}]
)
def test_the_base_model_that_the_adapter_names_is_that_of_the_card(export: Path, settings: published.Json) -> None:
    edit_json(export / "adapter_config.json", **settings)
    rehash(export, "adapter_config.json")
    assert "does not name tiny-base" in detail_of(export, "kinds of files")


def test_a_picture_is_said_to_be_the_author_s_word(export: Path) -> None:
    (export / "audit" / "roc.png").write_bytes(b"\x89PNG")
    rehash(export, "audit/roc.png")
    (asserted,) = (check for check in verify(export).checks if check.name == "pictures")
    assert asserted.status == "asserted"
    assert "audit/roc.png" in asserted.detail


# Private text.


@pytest.mark.parametrize("source", ["row", "canary"])
def test_private_text_in_the_card_is_not_pushed_and_not_quoted(run: Path, finished: Place, source: str) -> None:
    if source == "row":
        text = json.loads(finished.train.read_text("utf-8").splitlines()[6])["text"]
        words, private = "training text: text of the training data is in README.md (row 7)", (text, "Forsberg")
    else:
        canary = json.loads((run / "private" / "canaries.json").read_text("utf-8"))["canaries"][5]
        text = canary["secret"]
        words, private = "canary texts: README.md contains text of a canary", (text, canary["carrier"])
    page = run / "export" / "README.md"
    page.write_text(f"{page.read_text('utf-8')}\nFor example: {text}.\n", encoding="utf-8")
    message = refused("push", run, "alice/notes", "--dry-run", code=3)
    assert words in message
    assert not any(secret in message for secret in private)


def test_what_cannot_be_searched_is_said(run: Path, finished: Place) -> None:
    published.edit(run / "config.yaml", str(finished.train), f"/nowhere/{finished.train.name}")
    assert not list(leaks.search(RunDir(run), ["README.md"], run / "export")), "they are found where they were"
    RunDir(run).rows.unlink()
    (missed,) = leaks.search(RunDir(run), ["README.md"], run / "export")
    assert missed.startswith("training text: ")
    assert push.push(run, "alice/notes", dry_run=True).unsearched[-1] == missed


# The run directory and the ledger.


def test_coins_that_were_not_committed_to_are_seen(run: Path) -> None:
    path = run / "private" / "canaries.json"
    plan = json.loads(path.read_text("utf-8"))
    plan["canaries"][0]["inserted"] = not plan["canaries"][0]["inserted"]
    path.write_text(json.dumps(plan), encoding="utf-8")
    assert "audit: canaries" in failing(run)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("plan.json", "noise_multiplier", 9.0), ("plan.json", "epsilon", 1.0), ("run.json", "steps_taken", 3)],
)
def test_an_edited_plan_or_record_is_seen(run: Path, name: str, key: str, value: float) -> None:
    edit_json(run / name, **{key: value})
    assert "run" in failing(run)


def test_a_ledger_and_its_export_confirm_the_entry(run: Path, finished: Place, tmp_path: Path) -> None:
    before = finished.ledger.read_bytes()
    chain = tmp_path / "chain.json"
    done("ledger", "export", "--ledger", finished.ledger, "--output", chain)
    for ledger in (finished.ledger, chain):
        verification = verify(run / "export", ledger=str(ledger))
        assert not verification.failed
        assert "ledger" in {check.name for check in verification.checks if check.status == "verified"}
    assert finished.ledger.read_bytes() == before


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("composed", "entry"), "0" * 16),
        (("composed", "head"), "0" * 64),
        (("composed", "entries"), 2),
        (("composed", "spent_epsilon"), 9.5),
        (("composed", "dataset"), "others"),
        (("composed", "imported"), 1),
        (("plan", "unit"), "author"),
    ],
    ids=str,
)
def test_what_the_card_says_of_the_ledger_is_compared_with_it(
    export: Path, finished: Place, where: published.Where, value: object
) -> None:
    carry(export, changed(read(export), where, lambda _: value))
    assert failing(export, ledger=str(finished.ledger)) & {"ledger"}


def test_another_event_than_the_ledger_has_is_seen(export: Path, finished: Place) -> None:
    carry(export, published.replanned(read(export), noise_multiplier=0.43))
    assert failing(export, ledger=str(finished.ledger)) & {"ledger"}


def test_a_cut_or_edited_chain_is_seen(export: Path, finished: Place, tmp_path: Path) -> None:
    chain = tmp_path / "chain.json"
    dpllm_("ledger", "export", "--ledger", finished.ledger, "--output", chain)
    value = json.loads(chain.read_text("utf-8"))
    cut = {**value, "entries": value["entries"][:-1]}
    cut["head"] = {"count": len(cut["entries"]), "hash": cut["entries"][-1]["hash"]}
    edited = json.loads(json.dumps(value).replace("notes", "other"))
    for forged in (cut, edited, {**value, "progress": {}}):
        chain.write_text(json.dumps(forged), encoding="utf-8")
        assert "ledger" in failing(export, ledger=str(chain))


def test_a_ledger_that_is_missing_or_none_or_knows_nothing_of_the_run_is_one_line(export: Path, tmp_path: Path) -> None:
    assert failing(export, ledger=str(tmp_path / "missing")) == {"ledger"}
    for content in (b"", b"{}", b"SQLite format 3\x00 and more", b"[" * 100_000):
        (tmp_path / "ledger").write_bytes(content)
        assert failing(export, ledger=str(tmp_path / "ledger")) == {"ledger"}
    Ledger(tmp_path / "empty.sqlite").close()
    assert "ledger" in failing(export, ledger=str(tmp_path / "empty.sqlite"))


# Signatures.


@pytest.mark.skipif(find_spec("model_signing") is None, reason="needs the extra sign")
def test_a_card_is_signed_and_loses_a_signature_that_no_longer_fits(run: Path, tmp_path: Path) -> None:
    key = make_key(tmp_path / "alice")
    public = key.with_suffix(".pub")
    assert dpllm_("card", run, "--sign", key).code == 0
    assert "verified  signature: the key in alice.pub" in done("verify", run, "--public-key", public).out
    assert "model.sig" in done("push", run, "alice/notes", "--dry-run", "--json").out
    carry(run / "export", {**read(run / "export"), "contact": "mallory@example.org"})
    assert "signature" in failing(run / "export")
    assert "signature" in failing(run / "export", public_key=public)
    published.edit(run / "config.yaml", "contact: null", "contact: bob@example.org")
    done("card", run)
    assert not (run / "export" / "model.sig").exists()
    assert dpllm_("verify", run, "--public-key", public).code == 4
    assert dpllm_("card", run, "--sign", tmp_path / "nothing").code == 2


def test_a_deployment_is_asserted_and_can_be_written_for_the_registry(run: Path) -> None:
    published.edit(run / "config.yaml", "curator: null", "curator: Ward 7")
    assert done("card", run, "--registry").out.splitlines()[1:] == [str(run / "registry.yaml")]
    assert read(run / "export")["deployment"] == {"curator": "Ward 7"}
    registry = yaml.safe_load((run / "registry.yaml").read_text("utf-8"))
    assert registry["deployment"]["basic"]["data_curators"] == ["Ward 7"]
    assert "asserted  deployment: deployment: the author's word" in done("verify", run).out
    # The recipe of the run contradicts who writes another name.
    carry(run / "export", {**read(run / "export"), "deployment": {"curator": "Ward 8"}})
    assert failing(run) == {"run"}
    assert not failing(run / "export")


# Hostile files.


MALFORMED = [b"", b"\x00\xff\xfe" * 100, b"[" * 200_000, b"\x1b[2J\x1b]0;owned\x07"]
NO_JSON = [
    b"[]", b'"x"', b'{"a":' * 200_000, b'{"schema_version": NaN}', b'{"guarantee": true, "guarantee": true}',
    b'{"epsilon": 1e999}', b'{"epsilon": ' + b"9" * 5000 + b"}",
]  # fmt: skip
NO_YAML = [b"---\na: &x [1]\nprivacy: *x\n---\n", b"---\n? [1]\n: 2\n---\n", b"---\nprivacy: 2020-99-99\n---\n"]
CONTENTS = {
    "privacy.json": [*MALFORMED, *NO_JSON],
    "README.md": [*MALFORMED, *NO_YAML],
    **dict.fromkeys(("audit/audit.json", "audit/tokens.parquet"), MALFORMED),
}


@pytest.mark.parametrize(
    ("name", "content"),
    [(name, content) for name, contents in CONTENTS.items() for content in contents],
    ids=lambda value: repr(value[:16]),
)
def test_a_malformed_file_is_a_failed_check(export: Path, name: str, content: bytes) -> None:
    (export / name).write_bytes(content)
    verification = verify(export)
    assert verification.failed
    assert all(check.detail.isprintable() and len(check.detail) <= 400 for check in verification.checks)


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, True, 1e308, "9" * 400], ids=repr)
def test_a_value_of_any_kind_in_any_field_is_a_failed_check(export: Path, value: object) -> None:
    block = read(export)
    for key in [*block, "attempted"]:
        if key not in block or block[key] != value:
            write(export, {**block, key: value})
            assert failing(export), key


def test_a_path_that_holds_nothing_is_a_wrong_command(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        refused("verify", path)


def test_a_run_without_a_card_is_a_wrong_command(run: Path) -> None:
    for name in ("README.md", "privacy.json"):
        (run / "export" / name).unlink()
    assert "dpllm card" in refused("verify", run)
