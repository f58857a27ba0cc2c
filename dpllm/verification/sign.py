"""OpenSSH signatures over privacy.json: who vouches for a card.

Comes in: an export directory, and a key or a list of allowed signers. Goes out: ``privacy.json.sig``, and what such a
signature proves. ssh-keygen does the cryptography; it is never given a terminal, so that it cannot wait for a passphrase.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from dpllm.errors import ConfigError
from dpllm.files import BLOCK, SIGNATURE, write_whole
from dpllm.verification.values import Check, Wrong, asserted, failed, plain, read_bytes, tried, verified

NAMESPACE = "dpllm-card"
"""A signature made for another purpose with the same key does not count here."""
_NAME = "signature"
_SECONDS = 60.0  # a key on a token waits for a touch


def sign(directory: Path, key: Path) -> Path:
    """Signs privacy.json.

    Args:
        directory: An export directory with a card.
        key: A private key, or the public part of one that ssh-agent holds.

    Returns:
        The path of the signature, which replaces an older one.

    Raises:
        ConfigError: There is no card, no such key, the key asks for a passphrase, or ssh-keygen is not installed.
    """
    signed = directory / BLOCK
    if not signed.is_file():
        raise ConfigError(f"{directory}: holds no privacy.json to sign. Type dpllm card RUN first.")
    if not key.is_file():
        raise ConfigError(f"--sign {key}: no such key. Make one with ssh-keygen -t ed25519, or type its path.")
    if shutil.which("ssh-keygen") is None:
        raise ConfigError("ssh-keygen, which signs cards, is not installed. Install OpenSSH 8.2 or newer.")
    answer = _keygen("-Y", "sign", "-f", key, "-n", NAMESPACE, read=signed.read_bytes())
    if answer.returncode != 0 or b"BEGIN SSH SIGNATURE" not in answer.stdout:
        said = plain(answer.stderr.decode(errors="replace"))
        raise ConfigError(
            f"--sign {key}: ssh-keygen could not sign ({said}). A key with a passphrase is used through ssh-agent: type "
            "ssh-add KEY first. A public key alone does not sign."
        )
    write_whole(directory / SIGNATURE, answer.stdout)
    return directory / SIGNATURE


def check(directory: Path, signers: Path | None = None) -> Check:
    """What the signature of an export proves.

    Args:
        directory: An export directory.
        signers: Allowed signers, one "IDENTITY KEYTYPE KEY" a line (ssh-keygen(1), ALLOWED SIGNERS); None: nobody is known.

    Guarantee:
        ``verified`` is said only if a key that `signers` allows signed these very bytes of privacy.json for this purpose.
    """
    return tried(_NAME, _check, directory, signers)


def _check(directory: Path, signers: Path | None) -> Check:
    path = directory / SIGNATURE
    if not os.path.lexists(path):
        if signers is not None:
            raise Wrong("--signers was given, but the card is unsigned. Ask its author: dpllm card RUN --sign KEY.")
        return asserted(
            _NAME, "unsigned: integrity, not authenticity. Whoever made these files could have made others."
        )
    read_bytes(path)
    signed = read_bytes(directory / BLOCK)
    if signers is not None and not signers.is_file():
        raise Wrong(f"--signers {signers}: no such file. Name a file of allowed signers.")
    if shutil.which("ssh-keygen") is None:
        said = "the card is signed, but ssh-keygen, which checks signatures, is not installed. Install OpenSSH 8.2 or newer."
        return failed(_NAME, said) if signers is not None else asserted(_NAME, said)
    of_this = ("-n", NAMESPACE, "-s", path)
    answer = _keygen("-Y", "check-novalidate", *of_this, read=signed)
    if answer.returncode != 0:
        raise Wrong(
            "privacy.json.sig is no valid signature of this privacy.json. Take both files from where the model was published, "
            "or sign again: dpllm card RUN --sign KEY."
        )
    key = plain(answer.stdout.decode(errors="replace")).partition(" with ")[2] or "a key"
    if signers is None:
        said = f"signed with {key}; whose key that is, is asserted. Name those whom you trust with --signers FILE."
        return asserted(_NAME, said)
    known = _keygen("-Y", "find-principals", "-s", path, "-f", signers)
    for identity in known.stdout.decode(errors="replace").replace(",", "\n").splitlines():
        if identity and not identity.startswith("!"):
            answer = _keygen("-Y", "verify", "-f", signers, "-I", identity, *of_this, read=signed)
            if answer.returncode == 0:
                return verified(_NAME, f"{identity} signed it with {key}; text outside the marked parts is not signed.")
    raise Wrong(f"signed with {key}, which {signers.name} does not allow. Do not trust it, or add the key.")


def _keygen(*arguments: str | Path, read: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """ssh-keygen without a terminal, in which a passphrase could be asked for."""
    command = ["ssh-keygen", *map(str, arguments)]
    env = {**os.environ, "SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}
    try:
        return subprocess.run(
            command, input=read, capture_output=True, timeout=_SECONDS, env=env, start_new_session=True, check=False
        )
    except (subprocess.TimeoutExpired, OSError):
        return subprocess.CompletedProcess(command, 1, b"", b"it did not answer")
