"""Signatures of cards: made by a key that is at hand, checked against those who are trusted, and never a question to answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from dpllm.errors import ConfigError
from dpllm.verification import sign

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def make_key(path: Path, passphrase: str = "") -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return path


def allowed(path: Path, key: Path, identity: str = "alice@example.org", options: str = "") -> Path:
    kind, public, *_ = key.with_suffix(".pub").read_text("utf-8").split()
    path.write_text(f"{identity} {options} {kind} {public}\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("keys") / "key")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    directory = tmp_path / "export"
    directory.mkdir()
    (directory / "privacy.json").write_text('{"guarantee": true}\n', encoding="utf-8")
    return directory


def test_a_signature_of_somebody_trusted_is_verified(export: Path, key: Path, tmp_path: Path) -> None:
    assert sign.sign(export, key) == export / "privacy.json.sig"
    found = sign.check(export, allowed(tmp_path / "signers", key))
    assert found.status == "verified"
    assert "alice@example.org" in found.detail
    assert "SHA256:" in found.detail


def test_without_a_list_it_is_asserted_whose_key_it_is(export: Path, key: Path) -> None:
    sign.sign(export, key)
    found = sign.check(export)
    assert found.status == "asserted"
    assert "SHA256:" in found.detail


def test_an_unsigned_card_is_called_so(export: Path, key: Path, tmp_path: Path) -> None:
    found = sign.check(export)
    assert found.status == "asserted"
    assert "integrity, not authenticity" in found.detail
    assert sign.check(export, allowed(tmp_path / "signers", key)).status == "failed"


def test_one_changed_byte_breaks_it(export: Path, key: Path, tmp_path: Path) -> None:
    sign.sign(export, key)
    signers = allowed(tmp_path / "signers", key)
    (export / "privacy.json").write_text('{"guarantee": true} \n', encoding="utf-8")
    assert {sign.check(export).status, sign.check(export, signers).status} == {"failed"}


def test_a_stranger_is_not_trusted(export: Path, key: Path, tmp_path: Path) -> None:
    sign.sign(export, make_key(tmp_path / "other"))
    signers = allowed(tmp_path / "signers", key)
    assert sign.check(export).status == "asserted"
    assert sign.check(export, signers).status == "failed"
    # Nor is a trusted person for whom the key is allowed for another purpose, or no longer.
    sign.sign(export, key)
    for options in ('namespaces="git"', 'valid-before="20200101"'):
        assert sign.check(export, allowed(tmp_path / "signers", key, options=options)).status == "failed", options


def test_a_signature_for_another_purpose_does_not_count(export: Path, key: Path, tmp_path: Path) -> None:
    command = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", "git", str(export / "privacy.json")]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert sign.check(export).status == "failed"
    assert sign.check(export, allowed(tmp_path / "signers", key)).status == "failed"


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"-----BEGIN SSH SIGNATURE-----\nAAAA\n", b"x" * 3_000_000])
def test_a_broken_signature_is_one_line(export: Path, key: Path, tmp_path: Path, content: bytes) -> None:
    (export / "privacy.json.sig").write_bytes(content)
    for signers in (None, allowed(tmp_path / "signers", key)):
        found = sign.check(export, signers)
        assert found.status == "failed"
        assert "\n" not in found.detail


def test_a_link_is_no_signature(export: Path, key: Path, tmp_path: Path) -> None:
    sign.sign(export, key)
    (export / "privacy.json.sig").rename(tmp_path / "elsewhere")
    (export / "privacy.json.sig").symlink_to(tmp_path / "elsewhere")
    assert sign.check(export).status == "failed"


def test_a_key_with_a_passphrase_is_refused_and_nothing_waits(export: Path, tmp_path: Path) -> None:
    locked = make_key(tmp_path / "locked", "secret words")
    started = time.monotonic()
    with pytest.raises(ConfigError, match="ssh-add"):
        sign.sign(export, locked)
    assert time.monotonic() - started < 20
    assert not (export / "privacy.json.sig").exists()


def test_an_agent_opens_such_a_key(export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public part names the key that the agent holds."""
    if shutil.which("ssh-agent") is None or shutil.which("ssh-add") is None:
        pytest.skip("no ssh-agent")
    plain = make_key(tmp_path / "key")
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            if socket.exists():
                break
            time.sleep(0.05)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        subprocess.run(["ssh-add", "-q", str(plain)], check=True, env={**os.environ}, capture_output=True)
        plain.unlink()
        sign.sign(export, tmp_path / "key.pub")
    finally:
        agent.terminate()
        agent.wait()
    assert sign.check(export).status == "asserted"


def test_what_is_missing_is_said(export: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such key"):
        sign.sign(export, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="dpllm card"):
        sign.sign(tmp_path, key)
    sign.sign(export, key)
    assert sign.check(export, tmp_path / "nothing").status == "failed"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="not installed"):
        sign.sign(export, key)
    assert sign.check(export).status == "asserted"
    assert sign.check(export, allowed(tmp_path / "signers", key)).status == "failed"
