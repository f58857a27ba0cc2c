"""Rows as tokenised units on disk: a corpus larger than memory trains, and is tokenised once.

Comes in: rows by unit and a tokenizer, or a directory written before. Goes out: ``Unit`` values, which say which tokens are
learned and by what they are divided; a ``Sequence`` of them, each read when it is asked for. It must not know the model or the
Plan. Errors name units and never their text.

An entry of the cache is a directory, private/cache/tokens/KEY, with
    tokens.bin  unit after unit, sequence after sequence: two int32 (tokens, denominator), int32 ids, the loss mask
                in bits; integers in this machine's byte order
    index.npy   int64, one row a unit and one behind them: its first byte in tokens.bin, its first sequence among all
    sizes.npy   int32, the tokens of each sequence
    meta.json   the digest of all three, how many bytes and units they hold, and what became of long rows
It is written elsewhere and renamed, so that whatever has its name is whole.

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

AT_ONCE = 2**18  # characters that a tokenizer gets in one call
ENCODING = 6
"""To be raised when ``encode`` makes other tokens of the same row, or an entry is laid out otherwise."""
FOLDER = "tokens"
_PIECE = 2**22  # bytes that are hashed, or buffered before they are written, at a time


@dataclass
class Lengths:
    """Counts of texts, see ``rendered``, and of units."""

    texts: int = 0
    lost: int = 0  # of which nothing is learned
    short: int = 0  # these, and those that lost their end
    full: int = 0  # units with a text that fills max_length, cut or not

    def add(self, texts: Collection[tuple[int, bool]], data: DataConfig) -> None:
        """One unit more: the tokens of each of its texts, and whether any is learned."""
        cut = data.max_length if data.long_examples == "truncate" else float("inf")
        self.texts += len(texts)
        self.lost += sum(not learned for _, learned in texts)
        self.short += sum(tokens > cut or not learned for tokens, learned in texts)
        self.full += any(tokens >= data.max_length for tokens, _ in texts)

    def check(self, data: DataConfig) -> None:
        """Refuses, with a DataError, texts of which nothing is learned. The operator alone hears of it: no record, no ledger."""
        if self.texts and self.lost == self.texts:
            raise DataError(f"data.train: a run would be charged for nothing, because {self.warning(data)}")

    def warning(self, data: DataConfig) -> str:
        """A warning, for the terminal alone, where more than half of the texts are lost or cut; else empty."""
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
    """Tokenises every unit, in memory; errors name ``name``, or else the training data.

    Raises:
        DataError: ``long_examples: refuse`` and a longer row, or a row that the chat template does not take.
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
    """As ``encode_units``, one unit after the other, each counted in ``lengths``; ``AT_ONCE`` characters go into one call."""
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
            yield from finished(waiting)  # an error in a unit before it comes first
            raise DataError(f"{source}: unit {number}: {error}") from None
        characters += sum(len(text.text) for text in waiting[number])
        if characters > AT_ONCE:
            yield from finished(waiting)
            waiting, characters = {}, 0
    yield from finished(waiting)


def encode(parts: dict[str, Any], fmt: Format, tokenizer: Any, data: DataConfig) -> list[TokenSequence]:
    """Tokenises the parts of one row, which is one text, as ``data`` says: template, max_length, long_examples.

    Returns:
        No sequence (nothing to predict), one, or several chunks of at most max_length tokens. Chunks overlap by one
        token, so that every target is predicted exactly once.

    Raises:
        DataError: See ``encode_units``.
    """
    ((ids, mask),) = _tokenise(rendered(Row(parts), fmt, tokenizer, data.template), tokenizer)
    return _cut(ids, mask, data.max_length, data.long_examples)


def encode_prompt(prompt: str, tokenizer: Any, template: str | None) -> list[int]:
    """The tokens that stand before a completion that begins with a letter, as ``encode`` makes them; none of an empty text.

    Encoded alone, a prompt may end in other ones: two line ends are one token of GPT-2's, and two before a letter.
    """
    row = Row({"prompt": prompt, "completion": "A"})
    ((ids, mask),) = _tokenise(rendered(row, "prompt_completion", tokenizer, template), tokenizer)
    return ids[: mask.index(True)]


EMPTY = TokenSequence((0, 0), (False, False), 1)
"""A text whose prompt alone is longer than max_length, and that stands there because another one belongs to it."""


def _tokenise(texts: Sequence[Rendered], tokenizer: Any) -> Iterator[tuple[list[int], list[bool]]]:
    """Token ids of each text, and which of them are learned, of texts of one format.

    The end of the text is learned too; a chat template says itself where turns end.
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
    """Whether a text, rendered by a chat template before, brought a second beginning-of-text token."""
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
        mask[0] = False  # nothing stands before it, from which it could be predicted
    total = sum(mask)  # of the whole text, also in each of its chunks: their losses add up to its mean
    sequences = []
    for start in range(0, max(1, len(ids) - 1), max_length - 1):  # the last token of a chunk is the context of the next
        piece = tuple(ids[start : start + max_length])
        targets = (False, *mask[start + 1 : start + max_length])
        if any(targets):
            sequences.append(TokenSequence(piece, targets, total))
    return sequences


@dataclass(frozen=True, eq=False)
class Units(ReadWhenAsked[Unit | None]):
    """Tokenised units: from disk, and slots behind them that are held in memory. Made by ``make_units``.

    Attributes:
        path: The entry of the cache.
        digest: Of all tokens, masks and denominators in their order; equal in two processes that train on the same units.
            Private: a hash of a short text tells whoever guesses it.
        lengths: What became of the rows on disk, at data.max_length.
    """

    path: Path
    digest: str
    lengths: Lengths
    _index_U2: NDArray[np.int64]
    _size_S: NDArray[np.int32]
    _file: BinaryIO  # tokens.bin, closed when nobody holds it any more
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
        """Tokens of each sequence of a slot; none where there is nothing. No token is read."""
        number = range(len(self))[index]
        if number >= self._on_disk:
            return _sizes(self._slots[number - self._on_disk])
        first, last = self._index_U2[number : number + 2, 1].tolist()
        sizes: list[int] = self._size_S[first:last].tolist()
        return sizes

    def with_slots(self, slots: Sequence[Unit | None]) -> Units:
        """The same units and further slots behind them, which stay in memory; None for a slot without data."""
        digest = hashlib.blake2b(self.digest.encode(), digest_size=32)
        for slot in slots:
            digest.update(b"none" if slot is None else b"unit" + _pack(slot))
        return replace(self, digest=digest.hexdigest(), _slots=(*self._slots, *slots))


def make_units(table: Table, groups: Groups, tokenizer: Any, data: DataConfig, cache_dir: Path) -> Units:
    """The units of ``encode_units``, on disk; tokenised unless the cache holds them.

    Several processes may call this at once: one writes, the others wait for it. What killed processes left behind is
    removed. An entry that is damaged is made again.

    Args:
        table: Of ``data.load_table``.
        groups: The rows of each unit, of ``data.sampled_rows`` of the same table.
        tokenizer: A fast transformers tokenizer.
        data: template, max_length, long_examples, owners.
        cache_dir: The run's private cache.

    Raises:
        DataError: See ``encode_units``; a disk that is full.
    """
    path = cache_dir / FOLDER / _key(table, groups, tokenizer, data)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.parent / ".lock"):
            if (units := _open(path)) is None:
                for partial in path.parent.glob(".*.*"):  # of a process that was killed
                    shutil.rmtree(partial, ignore_errors=True)
                with whole_directory(path, mode=0o700) as part:
                    lengths = Lengths()
                    tokenised = iter_units(groups, table.format, tokenizer, data, name=table.name, lengths=lengths)
                    _write(part, tokenised, len(groups), lengths)
                units = _open(path)
        if units is None:
            raise OSError(errno.EIO, "what was written there cannot be read back")
        return units
    except OSError as error:
        raise DataError(
            f"{path.parent}: cannot hold the tokens of {table.name} ({error.strerror}), which training reads from disk. Free "
            "some space, or type an --output_dir on another disk."
        ) from None


def _key(table: Table, groups: Groups, tokenizer: Any, data: DataConfig) -> str:
    import transformers

    if table.digest is None:
        raise ValueError("only rows of load_table have a digest, which is needed to recognise a cached corpus")
    tokenizer(["a"])  # takes off what a file or an earlier call left of truncation and padding, as encoding does
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
    """An entry, read completely, or None where it is missing or damaged."""
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
    """Fewer than 2^31, read without a position, so that threads may share the file; mapped, they would count as memory."""
    content = os.pread(file.fileno(), size, start)
    if len(content) < size:
        raise DataError("the copy of the data in the run's cache was truncated while it was read. Start again.")
    return content


def _sizes(unit: Unit | None) -> list[int]:
    return [len(sequence.input_ids) for sequence in unit.sequences] if unit is not None else []


def _pack(unit: Unit) -> bytes:
    parts = []
    for sequence in unit.sequences:
        # array and bytes: numpy is slow over tuples of Python numbers
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
