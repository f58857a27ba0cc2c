"""Tokenised units on disk: a corpus larger than memory trains, and is tokenised once.

Comes in: rows by unit and a tokenizer, or a directory written before. Goes out: a ``Sequence`` of units, each read when it
is asked for. It must not know the model or the Plan.

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

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.errors import DataError
from dpllm.files import locked, whole_directory
from dpllm.progress import tell
from dpllm.recipe.config import DataConfig
from dpllm.text.data import Table, TokenSequence, Unit, iter_units
from dpllm.text.lengths import Lengths
from dpllm.text.rows import Groups, OpenFile, ReadWhenAsked

ENCODING = 5
"""To be raised when ``data.encode`` makes other tokens of the same row, or an entry is laid out otherwise."""
FOLDER = "tokens"
_PIECE = 2**22  # bytes that are hashed, or buffered before they are written, at a time


class Units(ReadWhenAsked[Unit | None]):
    """Tokenised units: from disk, and slots behind them that are held in memory.

    Attributes:
        path: The entry of the cache.
        digest: Of all tokens, masks and denominators in their order; equal in two processes that train on the same units.
            Private: a hash of a short text tells whoever guesses it.
        lengths: What became of the rows on disk, at data.max_length.
    """

    def __init__(
        self,
        path: Path,
        digest: str,
        index_U2: NDArray[np.int64],
        size_S: NDArray[np.int32],
        file: OpenFile,
        lengths: Lengths,
        slots: Sequence[Unit | None] = (),
    ) -> None:
        """Made by ``make_units``; ``file`` is tokens.bin."""
        self.path, self.digest, self.lengths = path, digest, lengths
        self._index_U2, self._size_S, self._file, self._slots = index_U2, size_S, file, slots
        self._on_disk = len(index_U2) - 1

    def __len__(self) -> int:
        return self._on_disk + len(self._slots)

    def _read(self, number: int) -> Unit | None:
        if number >= self._on_disk:
            return self._slots[number - self._on_disk]
        (start, first), (end, last) = self._index_U2[number : number + 2].tolist()
        return _unpack(self._file.read(start, end - start), last - first)

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
        kept = (self._index_U2, self._size_S, self._file, self.lengths)
        return Units(self.path, digest.hexdigest(), *kept, (*self._slots, *slots))


def make_units(table: Table, groups: Groups, tokenizer: Any, data: DataConfig, cache_dir: Path) -> Units:
    """What ``data.encode_units`` gives, on disk; tokenised anew unless the cache holds it.

    Several processes may call this at once: one writes, the others wait for it. What killed processes left behind is
    removed. An entry that is damaged is made again.

    Args:
        table: Of ``data.load_table``.
        groups: The rows of each unit, of ``data.sampled_rows`` of the same table.
        tokenizer: A fast transformers tokenizer.
        data: template, max_length, long_examples.
        cache_dir: The run's private cache.

    Raises:
        DataError: See ``data.encode_units``; a disk that is full.
    """
    path = cache_dir / FOLDER / _key(table, groups, tokenizer, data)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.parent / ".lock"):
            if (found := _open(path)) is None:
                for left in path.parent.glob(".*.*"):  # of a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                with whole_directory(path, mode=0o700) as part:
                    lengths = Lengths()
                    made = iter_units(groups, table.format, tokenizer, data, name=table.name, lengths=lengths)
                    _write(part, _told(made, len(groups)), lengths)
                found = _open(path)
    except OSError as error:
        raise DataError(
            f"{path.parent}: cannot hold the tokens of {table.name} ({error.strerror}), which training reads from disk. Free "
            "some space, or type an --output_dir on another disk."
        ) from None
    if found is None:
        raise DataError(
            f"{path.parent}: tokens written there cannot be read back. Type an --output_dir on another disk."
        )
    return found


def _key(table: Table, groups: Groups, tokenizer: Any, data: DataConfig) -> str:
    """Under which the units are kept: everything that decides which tokens they hold, hashed."""
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
        "template": [tokenizer.chat_template if table.format in ("messages", "preference") else None, data.template],
        "max_length": data.max_length,
        "long_examples": data.long_examples,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _told(units: Iterable[Unit], total: int) -> Iterator[Unit]:
    for done, unit in enumerate(units):
        if done % 256 == 0:
            tell("Tokenising", done, total)
        yield unit


def _write(part: Path, units: Iterable[Unit], lengths: Lengths) -> None:
    index, sizes, position = array("q"), array("i"), 0
    digest = hashlib.blake2b(digest_size=32)
    with open(part / "tokens.bin", "wb", buffering=_PIECE) as file:
        for unit in units:
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
    """An entry, or None where it is missing or damaged; all of it is read."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        index_U2, size_S = (np.load(path / f"{name}.npy", allow_pickle=False) for name in ("index", "sizes"))
        file = OpenFile(os.open(path / "tokens.bin", os.O_RDONLY | os.O_CLOEXEC))
        size, digest = (path / "tokens.bin").stat().st_size, hashlib.blake2b(digest_size=32)
        for start in range(0, size, _PIECE):
            digest.update(file.read(start, min(_PIECE, size - start)))
        digest.update(index_U2.tobytes() + size_S.tobytes())
        fits = index_U2.shape == (meta["units"] + 1, 2) and index_U2[-1].tolist() == [size, len(size_S)]
        return (
            Units(path, digest.hexdigest(), index_U2, size_S, file, Lengths(**meta["lengths"]))
            if fits and size == meta["bytes"] and digest.hexdigest() == meta["digest"]
            else None
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


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
