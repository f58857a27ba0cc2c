"""Searches published files for private text, from canaries or rows; counts what a synthetic data set repeats.

Comes in: a run directory, and the names of files in its export/ or another folder. Goes out: messages about what could not be
searched, or a refusal, which names files and row numbers and quotes nothing. Must not change files. It reads the training rows
for ``publish``, which reads none.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpllm.canaries import canaries
from dpllm.errors import DpllmError, Refused
from dpllm.run.directory import RunDir
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.text.layouts import FIELDS, Format, strings
from dpllm.text.prompts import most_private, owners, private_among, read_again

MOST_ROWS = 20_000
"""Maximum number of training rows to search for; more would take seconds."""
WORDS = 8
"""Eight consecutive words of a row count as its text; a shorter row counts if it has four words and 20 letters."""
_TENSORS = ".safetensors"
_WORD = re.compile(r"\w+")
_ALONE = r"(?<!\w)(?<!\d\.){}(?!\w|\.\d)"  # six digits can be a part of a longer number or a hash by chance
_SHORT = 20
_SURE = 10  # letters or digits of a secret that is never a part of other text by chance
_SMALL, _LARGE, _LARGEST = 2**20, 2**22, 2**26  # bytes

Words = tuple[str, ...]


def search(run: RunDir, names: Sequence[str], folder: Path) -> list[str]:
    """Searches files for texts of canaries and training data, if these are available.

    Args:
        run: The run whose canaries (in private/) and training data are searched for.
        names: Regular files in the folder.
        folder: The folder to search.

    Returns:
        Sentences about what could not be searched, or not be searched for.

    Raises:
        Refused: A file holds such text.
        OSError: A file cannot be read.
    """
    # All files are searched, whatever their names; of safetensors only the header, as the tensors are hashed elsewhere.
    large = [name for name in names if (folder / name).stat().st_size > _LARGE and Path(name).suffix != _TENSORS]
    texts = {name: _text(folder / name) for name in names if name not in large}
    missed = [f"large files: {', '.join(large)}: too large to be searched for text, and most likely the tokenizer's."]
    return [*(missed if large else []), *_canaries(run, texts, folder), *_rows(run, texts, folder)]


def in_rows(run: RunDir, path: Path, statement: PrivacyRecord) -> Iterator[str]:
    """Searches a data set for private text, and refuses text that no guarantee covers; see docs/decisions.md."""
    if path.stat().st_size > _LARGEST:
        yield "private text in the rows: they are too large to be searched."
        return
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    text = "\n".join(strings(rows))
    drawn = canaries.load(run.canaries).canaries if run.canaries.exists() else ()
    inserted = [canary.inserted for canary in drawn if any(answer.secret.strip() in text for answer in canary.answers)]
    planted = sum(canary.inserted for canary in drawn)
    left_out = f"{inserted.count(False)} of {len(drawn) - planted} left out"
    yield f"canary secrets in the rows: {inserted.count(True)} of {planted} planted and {left_out}."
    if not statement.guarantee:
        yield from _rows(run, {path.name: text}, path.parent)
    columns = rows[0] if run.rows.exists() and rows else ()
    hits = {name: len(private_among(run.rows, [row[name] for row in rows])) for name in columns}
    counts = ", ".join(f"{count} of {len(rows)} in {name}" for name, count in hits.items())
    if hits.get("prompt") or 2 * max(hits.values(), default=0) > len(rows):
        raise Refused(
            f"{path}: private text, word for word: {counts}. The guarantee does not cover that: run dpllm synthesize again."
        )
    yield f"private text in the rows, word for word: {counts or f'{run.rows} is not here, so none was searched for'}."


def _text(path: Path) -> str:
    """All text in a file: the strings of JSON, and its bytes without zeros, so that UTF-16 is read too."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        # From safetensors only the header, with names and metadata.
        header_size = min(int.from_bytes(file.read(8), "little"), _LARGE) if path.suffix == _TENSORS else -1
        raw = file.read(header_size)
    text = raw.replace(b"\0", b"").decode("utf-8", errors="replace")
    try:
        return "\n".join([*strings(json.loads(text)), text]) if path.suffix in (".json", _TENSORS) else text
    except (ValueError, RecursionError):
        return text


def text_of(row: Mapping[str, Any], fmt: Format) -> str:
    """All text of a row, in the columns of its format."""
    return "\n".join(strings([row[field] for field in FIELDS[fmt]]))


def spread(total: int, limit: int) -> Sequence[int]:
    """All row numbers, or ``limit`` evenly spread ones if there are more."""
    return [n * total // limit for n in range(limit)] if total > limit else range(total)


def _canaries(run: RunDir, texts: dict[str, str], folder: Path) -> Iterator[str]:
    if not run.canaries.exists():
        yield "canary texts: none were planted, or private/ is not here."
        return
    plan = canaries.load(run.canaries)
    planted = [answer for canary in (*plan.canaries, *plan.references) for answer in canary.answers]
    secrets = {secret for canary in planted if len(secret := canary.secret.strip()) >= 6}
    hits = {*_matches([(n, "", f"{canary.carrier} {canary.secret}") for n, canary in enumerate(planted)], texts)}
    for file, text in texts.items():
        if len(text) > _SMALL:  # such as a vocabulary: searching megabytes for thousands of secrets takes too long
            hit = bool(secrets & set(_WORD.findall(text)))
        else:
            present = [secret for secret in secrets if secret in text]
            hit = any(len(secret) >= _SURE or re.search(_ALONE.format(re.escape(secret)), text) for secret in present)
        hits |= {file} if hit else set()
    if hits:
        raise Refused(
            f"{folder}: canary texts: {', '.join(sorted(hits))} contains text of a canary. Delete it, and find out how it got "
            "there."
        )


def _rows(run: RunDir, texts: dict[str, str], folder: Path) -> Iterator[str]:
    config = run.load_config()
    if config.data.public:
        yield "training text: not searched for, because the recipe declares the data public."
        return
    try:
        table, unchanged = read_again(run.rows, config.data, "training", run.private / "cache")
    except DpllmError as error:
        yield f"training text: not searched for ({error})."
        return
    if not unchanged:
        yield "training text: the rows that are there now are searched for, which are not known to be those that the run read."
    total, owner_of = len(table.rows), list(owners(table, config.data))
    numbers = spread(total, MOST_ROWS)
    rows = [(n + 1, owner_of[n], text_of(table.rows[n].parts, table.format)) for n in numbers]
    hits = _matches(rows, texts, limit=most_private(len({owner for _, owner, _ in rows})))
    if hits:
        files = [f"{file} (row {number})" for file, number in sorted(hits.items())]
        raise Refused(
            f"{folder}: training text: text of the training data is in {', '.join(files)}. Remove it, and write the card again."
        )
    if len(rows) < total:
        yield f"training text: only {len(rows)} of {total} rows, evenly spread, were searched for."


def _matches(rows: Iterable[tuple[int, str, str]], texts: dict[str, str], limit: float = math.inf) -> dict[str, int]:
    """File -> number of a row of which it holds consecutive words.

    Args:
        rows: Number, owner and text of each row.
        texts: File -> text.
        limit: Words that more owners than this share are not private.
    """
    long = [
        (number, owner, sequence)
        for number, owner, row in rows
        if len(sequence := words(row)) >= WORDS or (len(sequence) >= WORDS // 2 and sum(map(len, sequence)) >= _SHORT)
    ]
    file_words = {file: words(text) for file, text in texts.items()}
    index: dict[Words, str] = {}
    for length in {min(len(sequence), WORDS) for _, _, sequence in long}:
        for file, sequence in file_words.items():
            if length == WORDS or len(texts[file]) <= _SMALL:  # a vocabulary holds many shorter runs by chance
                index |= dict.fromkeys(grams(sequence, length), file)
    matches: dict[Words, dict[int, str]] = defaultdict(dict)
    for number, owner, sequence in long:
        for gram in grams(sequence, min(len(sequence), WORDS)) & index.keys():
            matches[gram][number] = owner
    hits: dict[str, int] = {}
    for gram, holders in matches.items():
        if len({*holders.values()}) <= limit:
            hits.setdefault(index[gram], min(holders))
    return hits


def words(text: str) -> Words:
    """The words of a text, in lower case and without punctuation."""
    return tuple(_WORD.findall(text.lower()))


def grams(text: Words, length: int) -> set[Words]:
    """Every run of ``length`` consecutive words."""
    return {text[start : start + length] for start in range(len(text) - length + 1)}
