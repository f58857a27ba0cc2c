"""Signatures of exports, in the format of OpenSSF model signing: made by a key at hand, checked by the key of whom one trusts."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from published import make_key

from dpllm.errors import ConfigError
from dpllm.files import hashes
from dpllm.verification import sign

with_the_extra = pytest.mark.skipif(find_spec("model_signing") is None, reason="needs the extra sign")
FILES = {"README.md": "# A card\n", "adapter_model.safetensors": "weights", "audit/audit.json": "{}"}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("keys") / "alice")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    directory = tmp_path / "export"
    for name, text in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    state(directory)
    return directory


def state(directory: Path) -> None:
    """Writes a privacy.json that lists what lies there."""
    files = hashes(directory, {"README.md", "privacy.json", "model.sig"})
    (directory / "privacy.json").write_text(json.dumps({"files": files}), encoding="utf-8")


def public(key: Path) -> Path:
    return key.with_suffix(".pub")


def payload_of(directory: Path) -> dict[str, Any]:
    """What a signature of a folder says, as the specification has it."""
    files = hashes(directory, {"model.sig"})
    digests = b"".join(bytes.fromhex(digest) for digest in files.values())
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": directory.name, "digest": {"sha256": hashlib.sha256(digests).hexdigest()}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False},
            "resources": [{"name": name, "algorithm": "sha256", "digest": digest} for name, digest in files.items()],
        },
    }


def write(directory: Path, payload: dict[str, Any], signature: bytes = b"none", hint: str = "0" * 64) -> dict[str, Any]:
    """model.sig around a payload."""
    text = base64.b64encode(json.dumps(payload).encode()).decode()
    signed = {"sig": base64.b64encode(signature).decode(), "keyid": ""}
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": {"payload": text, "payloadType": "application/vnd.in-toto+json", "signatures": [signed]},
    }
    (directory / "model.sig").write_text(json.dumps(bundle), encoding="utf-8")
    return bundle


# With the extra.


@with_the_extra
def test_a_signature_of_somebody_trusted_is_verified(export: Path, key: Path) -> None:
    assert sign.sign(export, key) == export / "model.sig"
    assert sign.check(export, public(key)).status == "verified"
    assert sign.check(export).status == "asserted"
    # Again over itself: a signature that lies there is no file that is signed.
    sign.sign(export, key)
    assert sign.check(export, public(key)).status == "verified"


@with_the_extra
@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()])
def test_other_curves_sign_too(export: Path, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    key = make_key(tmp_path / "key", private=ec.generate_private_key(curve))
    sign.sign(export, key)
    assert sign.check(export, public(key)).status == "verified"


@with_the_extra
def test_the_command_of_the_package_reads_ours_and_we_read_its(export: Path, key: Path) -> None:
    def command(verb: str, *options: object) -> int:
        words = (
            sys.executable,
            "-m",
            "model_signing",
            verb,
            "key",
            export,
            "--signature",
            export / "model.sig",
            *options,
        )
        return subprocess.run([str(word) for word in words], capture_output=True, check=False).returncode

    sign.sign(export, key)
    assert command("verify", "--public_key", public(key)) == 0
    (export / "model.sig").unlink()
    assert command("sign", "--private_key", key) == 0
    assert sign.check(export, public(key)).status == "verified"


@with_the_extra
@pytest.mark.parametrize("name", [*FILES, "privacy.json"])
def test_an_edited_file_breaks_it(export: Path, key: Path, name: str) -> None:
    """Of a file beside card and statement by its hash on the disk, which without a key is the check of the files."""
    sign.sign(export, key)
    with open(export / name, "a", encoding="utf-8") as file:
        file.write(" ")
    assert sign.check(export, public(key)).status == "failed"
    if name in ("README.md", "privacy.json"):
        assert sign.check(export).status == "failed"


@with_the_extra
def test_a_stranger_is_not_trusted(export: Path, key: Path, tmp_path: Path) -> None:
    sign.sign(export, make_key(tmp_path / "mallory"))
    assert sign.check(export).status == "asserted"
    assert sign.check(export, public(key)).status == "failed"
    # Nor one who writes the name of a trusted key beside it.
    bundle = json.loads((export / "model.sig").read_text("utf-8"))
    bundle["verificationMaterial"]["publicKey"]["hint"] = hashlib.sha256(public(key).read_bytes()).hexdigest()
    (export / "model.sig").write_text(json.dumps(bundle), encoding="utf-8")
    assert sign.check(export, public(key)).status == "failed"


@with_the_extra
def test_an_old_signature_does_not_pass_for_new_files(export: Path, key: Path) -> None:
    """Neither with its names changed, nor beside names of these files under a second spelling of the field."""
    sign.sign(export, key)
    old = json.loads((export / "model.sig").read_text("utf-8"))
    (export / "adapter_model.safetensors").write_text("other weights", encoding="utf-8")
    state(export)
    assert sign.check(export, public(key)).status == "failed"
    signature = base64.b64decode(old["dsseEnvelope"]["signatures"][0]["sig"])
    hint = old["verificationMaterial"]["publicKey"]["hint"]
    new = write(export, payload_of(export), signature, hint)
    assert sign.check(export, public(key)).status == "failed"
    (export / "model.sig").write_text(json.dumps({**new, "dsse_envelope": old["dsseEnvelope"]}), encoding="utf-8")
    assert sign.check(export, public(key)).status == "failed"
    assert sign.check(export).status == "failed"


@with_the_extra
def test_a_signature_that_leaves_files_out_is_none_of_these(export: Path, key: Path) -> None:
    from model_signing import hashing, signing

    kept = hashing.Config().set_ignored_paths(paths=["model.sig", "adapter_model.safetensors"])
    config = signing.Config().set_hashing_config(kept).use_elliptic_key_signer(private_key=key)
    config.sign(export, export / "model.sig")
    assert sign.check(export, public(key)).status == "failed"
    assert sign.check(export).status == "failed"


@with_the_extra
def test_no_link_and_no_pipe_is_read(export: Path, key: Path, tmp_path: Path) -> None:
    sign.sign(export, key)
    (export / "model.sig").rename(tmp_path / "elsewhere")
    (export / "model.sig").symlink_to(tmp_path / "elsewhere")
    assert {sign.check(export).status, sign.check(export, public(key)).status} == {"failed"}
    (tmp_path / "elsewhere").rename(tmp_path / "export" / "sig")
    (export / "model.sig").unlink()
    (export / "sig").rename(export / "model.sig")
    assert sign.check(export, public(key)).status == "verified"
    weights = export / "adapter_model.safetensors"
    weights.rename(tmp_path / "weights")
    weights.symlink_to(tmp_path / "weights")
    assert sign.check(export, public(key)).status == "failed"
    weights.unlink()
    os.mkfifo(weights)
    assert sign.check(export, public(key)).status == "failed"


@with_the_extra
def test_a_file_of_holes_is_not_read(export: Path, key: Path) -> None:
    with open(export / "adapter_model.safetensors", "wb") as file:
        file.truncate(2**30)
    files = {"adapter_model.safetensors": "0" * 64}
    (export / "privacy.json").write_text(json.dumps({"files": files}), encoding="utf-8")
    shutil.rmtree(export / "audit")
    payload = payload_of(export)
    for resource in payload["predicate"]["resources"]:
        resource["digest"] = files.get(resource["name"], resource["digest"])
    write(export, payload)
    check = sign.check(export, public(key))
    assert (check.status, "never written" in check.detail) == ("failed", True)


@with_the_extra
def test_what_is_no_key_is_refused_and_nothing_is_written(export: Path, key: Path, tmp_path: Path) -> None:
    for wrong in (
        make_key(tmp_path / "locked", b"secret words"),
        make_key(tmp_path / "other", private=ed25519.Ed25519PrivateKey.generate()),
        make_key(tmp_path / "k1", private=ec.generate_private_key(ec.SECP256K1())),
        public(key),
    ):
        with pytest.raises(ConfigError, match="--sign"):
            sign.sign(export, wrong)
    assert not (export / "model.sig").exists()
    sign.sign(export, key)
    for wrong in (key, public(tmp_path / "other"), export / "README.md"):
        with pytest.raises(ConfigError, match="--public-key"):
            sign.check(export, wrong)


# Without it.


def test_an_unsigned_export_is_called_so(export: Path) -> None:
    check = sign.check(export)
    assert (check.status, "integrity, not authenticity" in check.detail) == ("asserted", True)


def test_a_signature_without_a_key_is_never_verified(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(export, payload_of(export))
    check = sign.check(export)
    assert (check.status, "not checked" in check.detail) == ("asserted", True)
    monkeypatch.setitem(sys.modules, "model_signing", None)
    check = sign.check(export)
    assert (check.status, "pip install 'dpllm[sign]'" in check.detail) == ("asserted", True)


def test_without_the_package_nothing_is_signed_and_no_key_is_taken(
    export: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(export, payload_of(export))
    monkeypatch.setitem(sys.modules, "model_signing", None)
    for call, of_key in ((sign.check, public(key)), (sign.sign, key)):
        with pytest.raises(ConfigError, match=r"dpllm\[sign\]"):
            call(export, of_key)


def test_what_is_missing_is_said(export: Path, key: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        sign.sign(export, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no such file"):
        sign.check(export, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="dpllm card"):
        sign.sign(tmp_path, key)


def test_a_signature_of_other_files_fails_whoever_asks(export: Path) -> None:
    payload = payload_of(export)
    resources = payload["predicate"]["resources"]
    write(export, payload)
    assert sign.check(export).status == "asserted"
    changed = [{**resources[0], "digest": "0" * 64}, *resources[1:]]
    for others in (resources[1:], [*resources, {**resources[0], "name": "evil.py"}], changed):
        write(export, {**payload, "predicate": {**payload["predicate"], "resources": others}})
        assert sign.check(export).status == "failed"
    with open(export / "README.md", "a", encoding="utf-8") as file:
        file.write("one more line")
    write(export, payload)
    assert sign.check(export).status == "failed"


DEEP = base64.b64encode(b"[" * 10_000).decode()


BUNDLE = b'{"dsseEnvelope": {"payload": "%b"}, "verificationMaterial": {"publicKey": {"hint": ""}}}'


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 100, b"[]", b'{"dsseEnvelope": 3}', b"x" * 3_000_000, b"[" * 100_000, b'{"a": 1, "a": 2}',
     BUNDLE % DEEP.encode(), BUNDLE % b"!!"],
)  # fmt: skip
def test_a_broken_signature_is_one_line(export: Path, content: bytes) -> None:
    (export / "model.sig").write_bytes(content)
    check = sign.check(export)
    assert (check.status, "\n" in check.detail) == ("failed", False)


def test_a_hint_of_control_characters_is_shown_as_text(export: Path) -> None:
    write(export, payload_of(export), hint="\x1b[31m" * 1000)
    check = sign.check(export)
    assert (check.status, check.detail.isprintable()) == ("asserted", True)
