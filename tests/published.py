"""How tests forge a published run: one file after the other, or everything consistently, as somebody with a motive would."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec

from dpllm.card import card
from dpllm.card.artifact import MODEL
from dpllm.privacy.plan import Mechanism, steps_event
from dpllm.statement import privacy_record, tradeoff_figure
from dpllm.verification.values import Published
from dpllm.verification.verify import Verification, verify

Json = dict[str, Any]
Where = tuple[str | int, ...]


def copy(export: Path, to: Path) -> Path:
    shutil.copytree(export, to)
    return to


def make_endless(path: Path, kind: str, most: int) -> None:
    """What never ends to be read: a pipe, a link to a device, or a file of so many bytes."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, most)


def make_key(path: Path, passphrase: bytes | None = None, private: Any = None) -> Path:
    """A private key; its public part lies beside it, as .pub."""
    private = private or ec.generate_private_key(ec.SECP256R1())
    lock = pem.BestAvailableEncryption(passphrase) if passphrase else pem.NoEncryption()
    path.write_bytes(private.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, lock))
    public = private.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)
    return path


def edit(path: Path, old: str, new: str) -> None:
    """Other words in a file that has these."""
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def endless_is_found_soon(folder: Path, name: str, kind: str, most: int) -> None:
    """A file of a data set that never ends is a failed check, within seconds."""
    (folder / name).unlink()
    make_endless(folder / name, kind, most + 1)
    started = time.monotonic()
    assert failing(folder) & {"card", "files"}
    assert time.monotonic() - started < 10


def verify_without_torch(*folders: Path) -> None:
    """In a new process, which loads none of the heavy packages."""
    program = (
        "import sys; from pathlib import Path; from dpllm.verification.verify import verify; "
        "assert not any(verify(Path(folder)).failed for folder in sys.argv[1:]); "
        "print(*{'torch', 'datasets', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *folders], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == []


def replanned(block: Json, **numbers: Any) -> Json:
    """A statement with other numbers of the mechanism, and the event that follows from them; what accountants say stays."""
    plan = {**block["plan"], **numbers}
    run = Mechanism.pick(plan)
    event = steps_event(run.noise_multiplier, run.schedule, run.group_size, run.bands).to_json()
    plan |= {"event": event, "sampling_rate": run.schedule.sampling_rate}
    plan["mechanism"] = "dp-bandmf" if run.coefficients else "dp-sgd"
    steps = dict.fromkeys(("planned", "taken"), run.num_steps)
    return {**block, "plan": plan, "steps": steps if "num_steps" in numbers else block["steps"]}


def opened(directory: Path, block: Json | None = None, **others: Any) -> Published[Any]:
    """A model as ``verify`` opens it, perhaps of another statement."""
    record = privacy_record.read(read(directory) if block is None else block)
    return Published(MODEL, directory, record, **others)


def read(export: Path) -> Json:
    return dict(json.loads((export / "privacy.json").read_text("utf-8")))


def write(export: Path, block: Json) -> None:
    """privacy.json alone."""
    (export / "privacy.json").write_text(json.dumps(block, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def carry(export: Path, block: Json) -> None:
    """A changed block into every file that follows from it: privacy.json, the front matter, both parts, the figure."""
    record = privacy_record.read(block)
    if record.guarantee:
        figure = tradeoff_figure.figure(record.plan)
        (export / tradeoff_figure.FILE).write_text(figure, encoding="utf-8")
        if tradeoff_figure.FILE in block["files"]:
            block["files"][tradeoff_figure.FILE] = hashlib.sha256(figure.encode()).hexdigest()
            record = privacy_record.read(block)
    write(export, block)
    page = export / "README.md"
    matter, body = page.read_text("utf-8").removeprefix("---\n").split("---\n", 1)
    top = {**yaml.safe_load(matter), "privacy": card.matter(record)}
    for name, part in card.render(record).items():
        start, end = f"<!-- dpllm:{name} -->", f"<!-- /dpllm:{name} -->"
        prefix, after = body.split(start, 1)
        body = f"{prefix}{start}\n{part}\n{end}{after.split(end, 1)[1]}"
    page.write_text(f"---\n{yaml.safe_dump(top, sort_keys=False)}---\n{body}", encoding="utf-8")


def rehash(export: Path, *names: str) -> None:
    """Gives the block the hashes of changed files, and carries it on."""
    block = read(export)
    for name in names:
        block["files"][name] = hashlib.sha256((export / name).read_bytes()).hexdigest()
    carry(export, block)


def failures(verification: Verification) -> set[str]:
    return {check.name for check in verification.checks if check.status == "failed"}


def failing(path: Path, **options: Any) -> set[str]:
    return failures(verify(path, **options))


def leaves(value: Any, where: Where = ()) -> Iterator[Where]:
    """Where every value of a JSON object stands; an empty list or object is a value."""
    if isinstance(value, dict | list) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*where, key))
    else:
        yield where


def containers(value: Any, where: Where = ()) -> Iterator[Where]:
    if isinstance(value, dict | list):
        yield where
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from containers(inner, (*where, key))


def get(block: Any, where: Where) -> Any:
    for key in where:
        block = block[key]
    return block


def changed(block: Json, where: Where, change: Callable[[Any], Any]) -> Json:
    """A copy in which one value is another."""
    new: Any = json.loads(json.dumps({"": block}))
    *path, last = ("", *where)
    container = new
    for key in path:
        container = container[key]
    container[last] = change(container[last])
    return dict(new[""])


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.25
    if isinstance(value, str):
        return f"{value}x"
    return 1 if value is None else [*value, "x"] if isinstance(value, list) else {**value, "x": 1}


def without(value: Any, key: object) -> Any:
    """A JSON object or list without one of its parts."""
    if isinstance(value, dict):
        return {name: inner for name, inner in value.items() if name != key}
    return [inner for number, inner in enumerate(value) if number != key]
