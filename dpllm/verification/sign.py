"""OpenSSF model signatures: who vouches for an export.

Comes in: an export directory, and an elliptic-curve key as a PEM file. Goes out: ``model.sig`` over all other files, and what a
signature proves. The package model-signing (the extra ``sign``) does the cryptography, without network; an untrusted signature
is read with limits before that package sees it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpllm.errors import ConfigError
from dpllm.files import BLOCK, CARD, SIGNATURE, write_whole
from dpllm.verification.values import (
    BYTES_OF_VALUE,
    MOST_OTHER,
    Check,
    Wrong,
    asserted,
    listed,
    parsed,
    read_bytes,
    read_object,
    regular,
    tried,
    verified,
)

_INSTALL = "pip install 'dpllm[sign]'"
_NAME = "signature"
_AGAIN = "Take all files from where the model was published, or sign again: dpllm card RUN --sign KEY."
_FIELDS = {"mediaType", "verificationMaterial", "dsseEnvelope", "publicKey", "tlogEntries", "hint"}
_FIELDS |= {"payload", "payloadType", "signatures"}
"""All fields of a signature by model-signing: given a field under a second name, it could read another one than this module."""


def sign(directory: Path, key: Path) -> Path:
    """Signs every file of an export and returns the path of the signature, which replaces an older one.

    Args:
        directory: An export directory with a card.
        key: A private key on the curve P-256, P-384 or P-521, as PEM without a passphrase.

    Raises:
        ConfigError: There is no card, no such key, or model-signing is not installed.
    """
    if not (directory / BLOCK).is_file():
        raise ConfigError(f"{directory}: holds no privacy.json to sign. Type dpllm card RUN first.")
    signer = _with_key("--sign", key)
    with TemporaryDirectory() as folder:
        path = Path(folder) / SIGNATURE
        signer.sign(directory, path)
        write_whole(directory / SIGNATURE, path.read_bytes())
    return directory / SIGNATURE


def check(directory: Path, public_key: Path | None = None) -> Check:
    """Checks the signature of an export.

    Args:
        directory: An export directory.
        public_key: PEM file of a trusted author; None: nobody is trusted.

    Guarantee:
        ``verified`` is returned only if the holder of `public_key` signed every file that privacy.json lists, privacy.json and
        the card, and no other file. A signature of other files fails with or without a key.

    Raises:
        ConfigError: `public_key` is not such a key, or model-signing is not installed.
    """
    if public_key is None:
        return tried(_NAME, _check, directory, "", None)
    # Other files, such as those that a download adds, are not signed; the names are compared here.
    verifier = _with_key("--public-key", public_key).set_ignore_unsigned_files(True)
    return tried(_NAME, _check, directory, public_key.name, verifier)


def _check(directory: Path, name: str, verifier: Any) -> Check:
    """``verifier`` is None if no key is named."""
    path = directory / SIGNATURE
    if not os.path.lexists(path):
        if verifier is not None:
            raise Wrong("--public-key was given, but nothing is signed. Ask the author: dpllm card RUN --sign KEY.")
        return asserted(
            _NAME, "unsigned: integrity, not authenticity. Whoever made these files could have made others."
        )
    hint, signed = _read(path)
    present = {CARD: read_bytes(directory / CARD), BLOCK: read_bytes(directory / BLOCK)}
    expected = {file: hashlib.sha256(content).hexdigest() for file, content in present.items()}
    expected |= read_object(directory / BLOCK)["files"]
    if differing := sorted(file for file in expected.keys() | signed.keys() if expected.get(file) != signed.get(file)):
        raise Wrong(f"{SIGNATURE} is not of these files: {listed(differing)}. {_AGAIN}")
    if verifier is None:
        missing = "" if importlib.util.find_spec("model_signing") else f", after {_INSTALL}"
        return asserted(
            _NAME,
            f"there is one, which was not checked: {SIGNATURE} names these files and the key {hint}, as anybody could write. "
            f"Name the key of the author whom you trust: --public-key FILE{missing}.",
        )
    for file in signed:
        with regular(directory / file):
            pass
    try:
        verifier.verify(directory, path)
    except Exception as error:  # an untrusted signature may make the package raise anything
        raise Wrong(
            f"the key in {name} did not sign these files ({type(error).__name__}); {SIGNATURE} names the key {hint}. Do not "
            "trust them, or name the key of their author."
        ) from None
    return verified(_NAME, f"the key in {name} ({hint}) signed all {len(signed)} files, the card among them.")


def _read(path: Path) -> tuple[str, dict[str, str]]:
    """The unchecked content of a signature: the SHA-256 of the public key, and that of each file."""
    try:
        bundle = read_object(path)
        envelope, material = bundle["dsseEnvelope"], bundle["verificationMaterial"]
        names = {*bundle, *envelope, *material, *material["publicKey"]}
        payload = parsed(base64.b64decode(envelope["payload"], validate=True), MOST_OTHER // BYTES_OF_VALUE)
        resources = payload["predicate"]["resources"]
        if names != _FIELDS or {resource["algorithm"] for resource in resources} != {"sha256"}:
            raise ValueError("another format")
        return str(material["publicKey"]["hint"])[:64], {resource["name"]: resource["digest"] for resource in resources}
    except (LookupError, TypeError, ValueError):
        raise Wrong(
            f"{SIGNATURE} is no signature of a model by a key, as OpenSSF model signing writes it. {_AGAIN}"
        ) from None


def _with_key(option: str, key: Path) -> Any:
    """A signer or verifier with a key: one thread, all files except the signature, and no links."""
    if not key.is_file():
        raise ConfigError(f"{option} {key}: no such file, so nothing can be done with that key. Type its path.")
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise ConfigError(f"{option} {key}: needs {error.name}, which is not installed. Type {_INSTALL}.") from None
    files = hashing.Config().use_file_serialization(max_workers=1).set_ignored_paths(paths=[SIGNATURE])
    try:
        if option == "--sign":
            return signing.Config().set_hashing_config(files).use_elliptic_key_signer(private_key=key)
        return verifying.Config().set_hashing_config(files).use_elliptic_key_verifier(public_key=key)
    except Exception as error:  # the package promises no type of error
        kind = "private" if option == "--sign" else "public"
        raise ConfigError(
            f"{option} {key}: is no {kind} key on the curve P-256, P-384 or P-521, as PEM without a passphrase "
            f"({type(error).__name__}), so nothing can be done with it. Make a pair: openssl ecparam -name prime256v1 -genkey "
            "-noout -out KEY, and openssl ec -in KEY -pubout -out FILE."
        ) from None
