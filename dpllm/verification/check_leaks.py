"""Nothing private in export/ before it is published: no canary's text, no text of a row.

Comes in: a run directory, and the names of the files in its export/. Goes out: checks, which name files and row numbers and
quote nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpllm.canaries import canaries
from dpllm.errors import DpllmError
from dpllm.recipe import names
from dpllm.run.directory import RunDir
from dpllm.verification.reading import read_bytes
from dpllm.verification.values import Check, asserted, failed, listed, verified

MOST_ROWS = 20_000
"""Of the training data that are searched for; more take seconds."""
WORDS = 8
"""A run of so many words of a row is its text; a shorter row counts if it has half as many and 20 letters."""
COMMON = 0.01
"""Words that more than three rows and a larger share of them have in common are a template's."""
_FEW = 3
_TENSORS = ".safetensors"
_WORD = re.compile(r"\w+")
_ALONE = r"(?<!\w)(?<!\d\.){}(?!\w|\.\d)"  # six digits stand in some longer number of a table, or in a hash, by chance
_SHORT = 20
_SURE = 10
"""Letters or digits of a secret that nothing holds by chance, alone or within a longer word."""
_SMALL, _LARGE = 2**20, 2**22

Words = tuple[str, ...]


def search(run: RunDir, names: Sequence[str]) -> Iterator[Check]:
    """Looks for texts of canaries and of the training data, as far as they are at hand.

    Args:
        run: Whose export/ is searched, for texts from its private/ and its training data.
        names: Files in export/, regular ones.
    """
    # A name says nothing of what a file holds; of safetensors the header is text, and its tensors are hashed elsewhere.
    large = [name for name in names if (run.export / name).stat().st_size > _LARGE and Path(name).suffix != _TENSORS]
    if large:
        yield asserted(
            "large files", f"{listed(large)}: too large to be searched for text, and most likely the tokenizer's."
        )
    texts = {name: _text(run.export / name) for name in names if name not in large}
    yield from _canaries(run, texts)
    yield from _rows(run, texts)


def _text(path: Path) -> str:
    """Whatever text a file holds: its strings, where it is JSON, and its bytes, with or without a zero beside each."""
    raw = (_header(path) if path.suffix == _TENSORS else read_bytes(path)).replace(b"\0", b"")
    text = raw.decode("utf-8", errors="replace")
    try:
        return "\n".join([*_strings(json.loads(text)), text]) if path.suffix in (".json", _TENSORS) else text
    except (ValueError, RecursionError):
        return text


def _header(path: Path) -> bytes:
    """Names and description of a safetensors file, without its tensors."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read(min(int.from_bytes(file.read(8), "little"), _LARGE))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _canaries(run: RunDir, texts: dict[str, str]) -> Iterator[Check]:
    name = "canary texts"
    if not run.canaries.exists():
        yield asserted(name, "none were planted, or private/ is not here.")
        return
    plan = canaries.load(run.canaries)
    planted = [*plan.canaries, *plan.references]
    # The tokenizer's vocabulary is searched by whole words: thousands of secrets in megabytes take too long.
    small = {file: text for file, text in texts.items() if len(text) <= _SMALL}
    secrets = {secret for canary in planted if len(secret := canary.secret.strip()) >= 6}
    hits = sorted(
        {
            file
            for file, text in small.items()
            for secret in secrets
            if secret in text and (len(secret) >= _SURE or re.search(_ALONE.format(re.escape(secret)), text))
        }
        | {file for file, text in texts.items() if file not in small and secrets & set(_WORD.findall(text))}
        | set(_matches([(None, f"{canary.carrier} {canary.secret}") for canary in planted], texts))
    )
    if hits:
        yield failed(name, f"{listed(hits)} holds text of a canary. Delete it, and find out how it came there.")
    else:
        yield verified(name, f"none of {len(planted)} stands in the {len(texts)} files of text.")


def _rows(run: RunDir, texts: dict[str, str]) -> Iterator[Check]:
    from dpllm.text.data import FIELDS, load_table

    name, config = "training text", run.load_config()
    if config.data.public:
        yield asserted(name, "the recipe declares the data public, so they were not searched for.")
        return
    source = config.data.train
    if not (names.is_builtin(source) or Path(source).is_file()):
        yield asserted(name, "the training data are not here, so they could not be searched for.")
        return
    try:
        table = load_table(source, config.data, config.data.train_split, run.private / "cache")
    except DpllmError:
        yield asserted(name, "the training data could not be read, so they were not searched for.")
        return
    rows = [
        (number, "\n".join(_strings([row[field] for field in FIELDS[table.format]])))
        for number, row in enumerate(table.rows[:MOST_ROWS], start=1)
    ]
    hits = _matches(rows, texts, most=max(_FEW, int(COMMON * len(rows))))
    if hits:
        where = [f"{file} (row {number})" for file, number in sorted(hits.items())]
        yield failed(
            name, f"text of the training data stands in {listed(where)}. Take it out, and write the card again."
        )
        return
    all_of = "all" if len(rows) == len(table.rows) else "the first"
    yield verified(
        name, f"no {WORDS} words in a row of {all_of} {len(rows):,} rows stand in the {len(texts)} files of text."
    )


def _matches(
    rows: Iterable[tuple[int | None, str]], texts: dict[str, str], most: int | None = None
) -> dict[str, int | None]:
    """File -> a row of which it holds words in their order; words of more than ``most`` rows are nobody's."""
    words = {file: _words(text) for file, text in texts.items()}
    indexes: dict[int, dict[Words, str]] = {}

    def index(length: int) -> dict[Words, str]:
        if length not in indexes:
            # Of shorter runs a vocabulary holds many by chance.
            among = {file: own for file, own in words.items() if length == WORDS or len(texts[file]) <= _SMALL}
            indexes[length] = {gram: file for file, own in among.items() for gram in _grams(own, length)}
        return indexes[length]

    seen: dict[Words, set[int | None]] = defaultdict(set)
    for number, row in rows:
        own = _words(row)
        length = min(len(own), WORDS)
        if length == WORDS or (length >= WORDS // 2 and sum(map(len, own)) >= _SHORT):
            for gram in _grams(own, length) & index(length).keys():
                seen[gram].add(number)
    found: dict[str, int | None] = {}
    for gram, numbers in seen.items():
        if most is None or len(numbers) <= most:
            found.setdefault(index(len(gram))[gram], min((n for n in numbers if n is not None), default=None))
    return found


def _words(text: str) -> Words:
    return tuple(_WORD.findall(text.lower()))


def _grams(words: Words, length: int) -> set[Words]:
    return {words[start : start + length] for start in range(len(words) - length + 1)}
