"""Tokenised units on disk: a corpus is tokenised once and may be larger than memory.

Comes in: rows by unit and a tokenizer, or a cache directory. Goes out: ``Unit`` values, which hold the learned tokens and the
denominator of their loss; a ``Sequence`` of them, each read when it is indexed. Must not know the model or the Plan. Errors name
units and never their text.

An entry of the cache is a directory, private/cache/tokens/KEY, with
    tokens.bin  for each sequence of each unit: two int32 (tokens, denominator), int32 ids, the loss mask
                in bits; integers in this machine's byte order
    index.npy   int64, one row per unit and a final row: first byte in tokens.bin, number of its first sequence
    sizes.npy   int32, the tokens of each sequence
    meta.json   the digest of all three, their numbers of bytes and units, and counts of long rows
It is written under another name and then renamed, so an entry is always complete.

Shape suffixes: U units, S sequences, T tokens.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dpllm.errors import DataError
from dpllm.files import locked, whole_directory
from dpllm.privacy.schedule import TokenSequence, Unit
from dpllm.progress import tell
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig
from dpllm.text.data import Groups, ReadWhenAsked, Table
from dpllm.text.layouts import Format, Row
from dpllm.text.owners import is_empty
from dpllm.text.rendering import Rendered, rendered

AT_ONCE = 2**18  # characters per call of the tokenizer
ENCODING = 6
"""Raise it when ``encode`` makes other tokens from the same row, or the layout of an entry changes."""
FOLDER = "tokens"
_PIECE = 2**22  # bytes that are hashed, or buffered for writing, at a time


@dataclass
class Lengths:
    """Counts of texts, see ``rendered``, and of units."""

    texts: int = 0
    lost: int = 0  # texts from which nothing is learned
    short: int = 0  # lost texts, and texts whose end was cut off
    full: int = 0  # units with a text that fills max_length, whether it was cut or not

    def add(self, texts: Collection[tuple[int, bool]], data: DataConfig) -> None:
        """Counts one unit: the number of tokens of each of its texts, and whether any token is learned."""
        cut = data.max_length if data.long_examples == "truncate" else float("inf")
        self.texts += len(texts)
        self.lost += sum(not learned for _, learned in texts)
        self.short += sum(tokens > cut or not learned for tokens, learned in texts)
        self.full += any(tokens >= data.max_length for tokens, _ in texts)

    def check(self, data: DataConfig) -> None:
        """Refuses, with a DataError, texts from which nothing is learned. Only the operator sees it: no record, no ledger."""
        if self.texts and self.lost == self.texts:
            raise DataError(f"data.train: a run would be charged for nothing, because {self.warning(data)}")

    def warning(self, data: DataConfig) -> str:
        """A warning, for the terminal only, if more than half of the texts are lost or cut; else empty."""
        if 2 * self.short <= self.texts:
            return ""
        how_many = "no row has" if self.lost == self.texts else "more than half of the rows have not"
        loss = (
            "a token left to learn" if 2 * self.lost > self.texts else "all their tokens, of which the ends are cut off"
        )
        return (
            f"{how_many} {loss}: a prompt alone fills data.max_length ({data.max_length} tokens), a row is longer, or no turn "
            "is the assistant's. Raise data.max_length, shorten the rows, or set data.long_examples: chunk."
        )


def encode_units(
    groups: Iterable[Sequence[Row]], fmt: Format, tokenizer: Any, data: DataConfig, *, name: str | None = None
) -> list[Unit]:
    """Tokenises every unit in memory; errors name ``name``, or else the training data.

    Raises:
        DataError: A row exceeds max_length under ``long_examples: refuse``, or the chat template rejects it.
    """
    return list(iter_units(groups, fmt, tokenizer, data, name=name))


def iter_units(
    groups: Iterable[Sequence[Row]],
    fmt: Format,
    tokenizer: Any,
    data: DataConfig,
    *,
    name: str | None = None,
    lengths: Lengths | None = None,
) -> Iterator[Unit]:
    """Yields the units of ``encode_units`` and counts each in ``lengths``; one call tokenises about ``AT_ONCE`` characters."""
    source = name or ", ".join(names.listed(data.train))

    def finished(waiting: dict[int, list[Rendered]]) -> Iterator[Unit]:
        encoded = iter(_tokenise([text for texts in waiting.values() for text in texts], tokenizer))
        for number, texts in waiting.items():
            sequences, sizes = list[TokenSequence](), list[tuple[int, bool]]()
            try:
                for text in texts:
                    ids, mask = next(encoded)
                    cut = _cut(ids, mask, data.max_length, data.long_examples)
                    sequences += cut or ([EMPTY] if text.keep_empty else [])
                    sizes.append((len(ids), bool(cut)))
                (lengths or Lengths()).add(sizes, data)
            except DataError as error:
                raise DataError(f"{source}: unit {number}: {error}") from None
            yield Unit(tuple(sequences))

    waiting, characters = dict[int, list[Rendered]](), 0
    for number, rows in enumerate(groups, start=1):
        try:
            nonempty = [row for row in rows if data.owners == "one" or not is_empty(row, fmt)]
            waiting[number] = [text for row in nonempty for text in rendered(row, fmt, tokenizer, data.template)]
        except DataError as error:
            yield from finished(waiting)  # errors in earlier units come first
            raise DataError(f"{source}: unit {number}: {error}") from None
        characters += sum(len(text.text) for text in waiting[number])
        if characters > AT_ONCE:
            yield from finished(waiting)
            waiting, characters = {}, 0
    yield from finished(waiting)


def encode(parts: dict[str, Any], fmt: Format, tokenizer: Any, data: DataConfig) -> list[TokenSequence]:
    """Tokenises one row, which holds one text, with the template, max_length and long_examples of ``data``.

    Returns:
        No sequence (nothing to predict), one, or several chunks of at most max_length tokens. Chunks overlap by one
        token, so every target is predicted exactly once.

    Raises:
        DataError: See ``encode_units``.
    """
    ((ids, mask),) = _tokenise(rendered(Row(parts), fmt, tokenizer, data.template), tokenizer)
    return _cut(ids, mask, data.max_length, data.long_examples)


def encode_prompt(prompt: str, tokenizer: Any, template: str | None) -> list[int]:
    """The tokens of ``encode`` before a completion that begins with a letter; none for an empty text.

    A prompt that is encoded alone may end differently: for GPT-2 two line ends are one token, but two tokens before a letter.
    """
    row = Row({"prompt": prompt, "completion": "A"})
    ((ids, mask),) = _tokenise(rendered(row, "prompt_completion", tokenizer, template), tokenizer)
    return ids[: mask.index(True)]


EMPTY = TokenSequence((0, 0), (False, False), 1)
"""Stands for an answer whose prompt alone exceeds max_length, to keep its place in the pair."""


def _tokenise(texts: Sequence[Rendered], tokenizer: Any) -> Iterator[tuple[list[int], list[bool]]]:
    """Yields the token ids and the loss mask of each text; all texts have one format.

    The end-of-text token is learned too; a chat template marks the ends of turns itself.
    """
    if not texts:
        return
    eos = tokenizer.eos_token_id
    encoding = tokenizer(
        [text.text for text in texts],
        add_special_tokens=not texts[0].template,
        return_offsets_mapping=True,
        verbose=False,
    )
    for text, ids, offsets in zip(texts, encoding["input_ids"], encoding["offset_mapping"], strict=True):
        offset_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        mask_T = np.zeros(len(ids), dtype=bool)
        for low, high in text.spans:
            mask_T |= (offset_T2[:, 0] < high) & (low < offset_T2[:, 1])
        first = int(begins_twice(ids, tokenizer))
        tokens, mask = list(ids)[first:], mask_T.tolist()[first:]
        if not text.template and eos is not None:
            if tokens[-1:] != [eos]:
                tokens, mask = [*tokens, eos], [*mask, True]
            mask[-1] = True
        yield tokens, mask


def begins_twice(ids: Sequence[int], tokenizer: Any) -> bool:
    """Whether ids begin with two beginning-of-text tokens, because a chat template added one to the text."""
    return tokenizer.bos_token_id is not None and list(ids[:2]) == [tokenizer.bos_token_id] * 2


def _cut(ids: list[int], mask: list[bool], max_length: int, long_examples: str) -> list[TokenSequence]:
    if len(ids) > max_length and long_examples == "refuse":
        raise DataError(
            f"a row is longer than data.max_length ({max_length} tokens) and data.long_examples is refuse. "
            "Raise data.max_length, or set data.long_examples to chunk or truncate."
        )
    if long_examples == "truncate":
        ids, mask = ids[:max_length], mask[:max_length]
    if mask:
        mask[0] = False  # it has no context to be predicted from
    total = sum(mask)  # targets of the whole text, in each chunk too: the chunks' losses add up to the mean of the text
    sequences = []
    for start in range(0, max(1, len(ids) - 1), max_length - 1):  # the last token of a chunk is the context of the next
        piece = tuple(ids[start : start + max_length])
        targets = (False, *mask[start + 1 : start + max_length])
        if any(targets):
            sequences.append(TokenSequence(piece, targets, total))
    return sequences


@dataclass(frozen=True, eq=False)
class Units(ReadWhenAsked[Unit | None]):
    """Tokenised units on disk, followed by slots in memory. Made by ``make_units``.

    Attributes:
        path: The entry of the cache.
        digest: Hash of all tokens, masks and denominators in order; equal in two processes that train on the same units.
            Private: a hash of a short text confirms a guess of that text.
        lengths: Counts of the texts on disk that data.max_length cut.
    """

    path: Path
    digest: str
    lengths: Lengths
    _index_U2: NDArray[np.int64]
    _size_S: NDArray[np.int32]
    _file: BinaryIO  # tokens.bin, closed by garbage collection
    _slots: tuple[Unit | None, ...] = ()

    @property
    def _on_disk(self) -> int:
        return len(self._index_U2) - 1

    def __len__(self) -> int:
        return self._on_disk + len(self._slots)

    def _read(self, number: int) -> Unit | None:
        if number >= self._on_disk:
            return self._slots[number - self._on_disk]
        (start, first), (end, last) = self._index_U2[number : number + 2].tolist()
        return _unpack(_bytes(self._file, start, end - start), last - first)

    def sizes(self, index: int) -> list[int]:
        """Numbers of tokens of a slot's sequences; empty for a slot without data. Reads no tokens."""
        number = range(len(self))[index]
        if number >= self._on_disk:
            return _sizes(self._slots[number - self._on_disk])
        first, last = self._index_U2[number : number + 2, 1].tolist()
        sizes: list[int] = self._size_S[first:last].tolist()
        return sizes

    def with_slots(self, slots: Sequence[Unit | None]) -> Units:
        """The same units followed by further slots, which stay in memory; None is a slot without data."""
        digest = hashlib.blake2b(self.digest.encode(), digest_size=32)
        for slot in slots:
            digest.update(b"none" if slot is None else b"unit" + _pack(slot))
        return replace(self, digest=digest.hexdigest(), _slots=(*self._slots, *slots))


def make_units(table: Table, groups: Groups, tokenizer: Any, data: DataConfig, cache_dir: Path) -> Units:
    """The units of ``encode_units`` on disk; tokenises them unless the cache holds them.

    Several processes may call this at once: one writes, and the others wait. Partial entries of killed processes are removed,
    and damaged entries are rewritten.

    Args:
        table: The result of ``data.load_table``.
        groups: The rows of each unit: ``data.sampled_rows`` of the same table.
        tokenizer: A fast transformers tokenizer.
        data: template, max_length, long_examples, owners.
        cache_dir: The run's private cache.

    Raises:
        DataError: See ``encode_units``; or the disk is full.
    """
    path = cache_dir / FOLDER / _key(table, groups, tokenizer, data)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.parent / ".lock"):
            if (units := _open(path)) is None:
                for partial in path.parent.glob(".*.*"):  # left by killed processes
                    shutil.rmtree(partial, ignore_errors=True)
                with whole_directory(path, mode=0o700) as part:
                    lengths = Lengths()
                    tokenised = iter_units(groups, table.format, tokenizer, data, name=table.name, lengths=lengths)
                    _write(part, tokenised, len(groups), lengths)
                units = _open(path)
        if units is None:
            raise OSError(errno.EIO, "the written tokens cannot be read back")
        return units
    except OSError as error:
        raise DataError(
            f"{path.parent}: cannot store the tokens of {table.name} ({error.strerror}), which training reads from disk. Free "
            "some space, or type an --output_dir on another disk."
        ) from None


def _key(table: Table, groups: Groups, tokenizer: Any, data: DataConfig) -> str:
    import transformers

    if table.digest is None:
        raise ValueError("only tables of load_table have a digest, which identifies a cached corpus")
    tokenizer(["a"])  # resets truncation and padding from a file or an earlier call, as encoding does
    parts = {
        "encoding": ENCODING,
        "transformers": transformers.__version__,
        "rows": table.digest,
        "groups": groups.digest(),
        "format": table.format,
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "eos": tokenizer.eos_token_id,
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "template": [tokenizer.chat_template, data.template],
        "max_length": data.max_length,
        "long_examples": data.long_examples,
        "owners": data.owners,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _write(part: Path, units: Iterable[Unit], total: int, lengths: Lengths) -> None:
    index, sizes, position = array("q"), array("i"), 0
    digest = hashlib.blake2b(digest_size=32)
    with open(part / "tokens.bin", "wb", buffering=_PIECE) as file:
        for done, unit in enumerate(units):
            if done % 256 == 0:
                tell("Tokenising", done, total)
            packed = _pack(unit)
            index.extend((position, len(sizes)))
            sizes.extend(_sizes(unit))
            digest.update(packed)
            file.write(packed)
            position += len(packed)
    index.extend((position, len(sizes)))
    index_U2, size_S = np.array(index, np.int64).reshape(-1, 2), np.array(sizes, np.int32)
    for name, values in (("index", index_U2), ("sizes", size_S)):
        np.save(part / f"{name}.npy", values)
        digest.update(values.tobytes())
    meta = {"digest": digest.hexdigest(), "bytes": position, "units": len(index_U2) - 1, "lengths": asdict(lengths)}
    (part / "meta.json").write_text(json.dumps(meta, sort_keys=True), encoding="utf-8")


def _open(path: Path) -> Units | None:
    """Opens an entry after checking all its bytes; None if it is missing or damaged."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        index_U2, size_S = (np.load(path / f"{name}.npy", allow_pickle=False) for name in ("index", "sizes"))
        file = open(path / "tokens.bin", "rb", buffering=0)  # noqa: SIM115
        size, digest = (path / "tokens.bin").stat().st_size, hashlib.blake2b(digest_size=32)
        for start in range(0, size, _PIECE):
            digest.update(_bytes(file, start, min(_PIECE, size - start)))
        digest.update(index_U2.tobytes() + size_S.tobytes())
        fits = index_U2.shape == (meta["units"] + 1, 2) and index_U2[-1].tolist() == [size, len(size_S)]
        return (
            Units(path, digest.hexdigest(), Lengths(**meta["lengths"]), index_U2, size_S, file)
            if fits and size == meta["bytes"] and digest.hexdigest() == meta["digest"]
            else None
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _bytes(file: BinaryIO, start: int, size: int) -> bytes:
    """Reads fewer than 2^31 bytes without moving the file position, so threads can share the file; mmap would use memory."""
    content = os.pread(file.fileno(), size, start)
    if len(content) < size:
        raise DataError("the copy of the data in the run's cache was truncated while it was read. Start again.")
    return content


def _sizes(unit: Unit | None) -> list[int]:
    return [len(sequence.input_ids) for sequence in unit.sequences] if unit is not None else []


def _pack(unit: Unit) -> bytes:
    parts = []
    for sequence in unit.sequences:
        # array and bytes, because numpy is slow on tuples of Python numbers
        ids = array("i", (len(sequence.input_ids), sequence.denominator, *sequence.input_ids))
        parts += [ids.tobytes(), np.packbits(np.frombuffer(bytes(sequence.loss_mask), np.uint8)).tobytes()]
    return b"".join(parts)


def _unpack(packed: bytes, num_sequences: int) -> Unit:
    sequences, start = [], 0
    for _ in range(num_sequences):
        tokens, denominator = np.frombuffer(packed, np.int32, 2, start).tolist()
        start += 8
        ids_T = np.frombuffer(packed, np.int32, tokens, start)
        start += 4 * tokens
        bits = np.frombuffer(packed, np.uint8, (tokens + 7) // 8, start)
        start += len(bits)
        mask_T = np.unpackbits(bits, count=tokens).astype(bool)
        sequences.append(TokenSequence(tuple(ids_T.tolist()), tuple(mask_T.tolist()), denominator))
    return Unit(tuple(sequences))
