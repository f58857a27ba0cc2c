"""One generator of forgeries: every leaf, line and file of a release, of any kind.

A forgery of one file alone has to fail. A forgery of the facts that is carried into all that follows from them has to fail, or to
be of a field that the kind's table calls asserted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from published import Json, Where, changed, containers, get, leaves, other, without

from dpllm.card.artifact import Artifact
from dpllm.verification import verify as verifying
from dpllm.verification.values import Published, Wrong, facts_of, guarded, read_facts, read_text

PAGE = ("front matter", "marked parts", "whole texts")
FACTS = ("record", "promise", "statistics", "lineage", "ledger", "audit", "labels")
"""Steps that look at the facts; others compare what follows from them, and pass where a forgery is carried into that."""
WORDS = {"optimizer": "sgd", "clipping": "automatic", "neighbouring_relation": "add_or_remove_one"}


@dataclass(frozen=True)
class Subject:
    """A release that verifies."""

    artifact: Artifact[Any]
    folder: Path
    ledger: str | None = None
    said: tuple[str, ...] = ()
    """Fields that a line of their own calls asserted: what a ledger says that is not here."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """Field -> relative distance that shall be seen, where rounding or the accountant's version allow less."""

    def values(self) -> list[Json]:
        """JSON of the sources."""
        return [json.loads((self.folder / name).read_text("utf-8")) for name in self.artifact.sources]

    def fails(self, release: Published[Any], steps: tuple[str, ...]) -> bool:
        """Whether one of these steps does, of those that such a release has."""
        steps_by_name = {**dict(verifying.COMMON), **dict(verifying.OWN[self.artifact.kind])}
        lines = (
            line for name in steps if name in steps_by_name for line in guarded(name, steps_by_name[name], release)
        )
        return any(line.status == "failed" for line in lines)

    def opened(self) -> Published[Any]:
        """As ``verify`` opens it; ``Wrong`` where it does not."""
        card = read_text(self.folder / "README.md") if (self.folder / "README.md").exists() else ""
        return Published(self.artifact, self.folder, read_facts(self.artifact, self.folder), card, ledger=self.ledger)

    def is_refused(self, steps: tuple[str, ...]) -> bool:
        """Whether the folder as it lies there fails one of these steps, or cannot be read."""
        try:
            return self.fails(self.opened(), steps)
        except Wrong:
            return True


def is_said(subject: Subject, where: str) -> bool:
    """Whether the table of the kind calls a field asserted."""
    fields = [name for names, _ in subject.artifact.asserted.values() for name in names.split()]
    where = re.sub(r"\b\d+\b", "*", where)
    return any(where == name or where.startswith(f"{name}.") for name in [*fields, *subject.said])


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """A file is as it was afterwards."""
    before = path.read_bytes()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(before)


# One file alone.


def unseen_values(subject: Subject) -> Iterator[str]:
    """Values that are changed, added or removed in the record alone, and that no text gives away."""
    path, value = subject.folder / subject.artifact.sources[0], subject.values()[0]
    forgeries: dict[str, Json] = {}
    for where in leaves(value):
        forgeries[f"{where} is another"] = changed(value, where, other)
        if get(value, where):
            forgeries[f"{where} is null"] = changed(value, where, lambda _: None)
    for where in containers(value):
        inner = get(value, where)
        forgeries[f"{where}: one more"] = changed(value, where, other)
        for key in inner if isinstance(inner, dict) else range(len(inner)):
            forgeries[f"{where}: without {key}"] = changed(value, where, lambda part, k=key: without(part, k))
    with kept(path):
        for name, forged in forgeries.items():
            path.write_text(json.dumps(forged, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            if not subject.is_refused(PAGE[:1]):
                yield name
    assert len(forgeries) > len(list(leaves(value)))


def unseen_lines(subject: Subject) -> Iterator[str]:
    """Lines of what follows from the facts that are changed or removed, and that nobody sees."""
    release, looked = subject.opened(), 0
    texts = dict(subject.artifact.whole(release.record))
    for name in {"README.md", *texts}:
        path, lines, inside = (
            subject.folder / name,
            read_text(subject.folder / name).splitlines(keepends=True),
            name in texts,
        )
        with kept(path):
            for number, line in enumerate(lines):
                inside |= line.startswith("<!-- dpllm:")
                ends = line.startswith("<!-- /dpllm:")  # what stands behind it is the author's
                for forged in ("", line.rstrip("\n") + " \n")[: 1 if ends else 2] if inside and line.strip() else ():
                    looked += 1
                    text = "".join([*lines[:number], forged, *lines[number + 1 :]])
                    path.write_text(text, encoding="utf-8")
                    card = text if name == "README.md" else release.card
                    if not subject.fails(replace(release, card=card), PAGE):
                        yield f"{name}, line {number + 1}: {line.strip()}"
                inside &= not ends
    assert looked > 20


def unseen_files(
    subject: Subject, steps: tuple[str, ...] = ("files", "vectors", "rows", "kinds of files")
) -> Iterator[str]:
    """Files that are removed, longer, a link, a pipe, or more than there should be, and that nobody sees."""

    def pipe(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    def link(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")

    changes: dict[str, Callable[[Path], object]] = {
        "removed": Path.unlink,
        "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
        "empty": lambda path: path.write_bytes(b""),
        "a pipe": pipe,
        "a link": link,
    }
    assert subject.artifact.files is not None
    listed = subject.artifact.files(subject.opened().record)
    for name in listed:
        for how, change in changes.items():
            with kept(subject.folder / name):
                change(subject.folder / name)
                if not subject.is_refused(steps):
                    yield f"{name} is {how}"
            (subject.folder / name).with_name("elsewhere").unlink(missing_ok=True)
    strange = ["notes.txt", "data/test.jsonl", ".env", "privacy.json.bak", "privacy.json.sig", "model.bin"]
    strange += [] if subject.artifact.due is None else ["model.sig"]  # which is looked at by itself
    for more in strange:
        path = subject.folder / more
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}\n", encoding="utf-8")
        if not subject.is_refused(steps):
            yield f"{more} is there"
        path.unlink()
    assert listed


# The facts, carried into all that follows from them.


def others(where: Where, value: object, steps: Mapping[str, float]) -> list[object]:
    """Other values for a field: of its kind and, for words, that the schema allows; as little apart as shall be seen."""
    path = [str(key) for key in where if key != "plan"]
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int):
        return [value + 1, float(value)]
    if isinstance(value, float):
        # What reads deltas in the tail rounds by the processor: three times what may differ; a part in 1e8 of the rest.
        step = 3e-5 if path[0] in ("curve", "limits") and where[-1] != 0 else 1e-8
        step = steps.get(".".join(path), 3e-3 if path == ["limits", "gdp_mu"] else step)
        return [value * (1 + step), value * (1 - step), value + max(1.0, abs(value))] if value else [1e-9]
    if isinstance(value, str):
        turned = value[:-1] + ("1" if value[-1:] == "0" else "0")
        return [f"{value}x", turned, WORDS.get(".".join(path), "")]
    return ["x"] if value is None else [other(value)]


def is_seen(subject: Subject, release: Published[Any], forged: Json) -> bool:
    """Whether facts that are carried into all texts and hashes are refused."""
    try:
        record = facts_of(subject.artifact, [forged, *subject.values()[1:]])
    except Wrong:
        return True
    return subject.fails(replace(release, record=record, hashes=dict(release.hashes)), FACTS)


def survivors(subject: Subject, release: Published[Any], under: str = "") -> set[str]:
    """Fields of the record, or of one that it has, of which some other value is not seen."""
    honest = subject.values()[0]
    assert not is_seen(subject, release, honest)
    return {
        ".".join(str(key) for key in where if key != "plan")
        for where in leaves(honest)
        if where[0] != "files"  # of one file each, see ``unseen_files``
        and where[0] in (under or where[0])
        and not all(
            is_seen(subject, release, changed(honest, where, lambda _, new=value: new))
            for value in others(where, get(honest, where), subject.steps)
        )
    }
