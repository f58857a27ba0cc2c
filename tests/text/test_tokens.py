"""Units on disk are the units that memory would hold; they are tokenised once, whole or not at all, in little memory."""

import errno
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run_program
from text_tables import Json, refused, tokenizer
from text_tables import section as data_section

from dpllm.privacy.schedule import TokenSequence, Unit
from dpllm.recipe.config import DataConfig
from dpllm.text import data, tokens
from dpllm.text.data import StoredRows, Table, each_row, load_table, sampled_rows
from dpllm.text.layouts import Row
from dpllm.text.tokens import Units, iter_units, make_units

TEXTS = [{"text": tiny.sentence(number) * (1 + number % 3), "who": f"p{number % 5}"} for number in range(40)]
PROMPTED = [{"prompt": row["text"], "completion": row["text"][::-1], "who": row["who"]} for row in TEXTS]
ANSWER = {"role": "assistant", "content": "Yes."}
TALKS = [
    {"messages": [{"role": "user", "content": row["text"]}, *[ANSWER] * (number % 3)], "who": row["who"]}
    for number, row in enumerate(TEXTS)
]
ROWS = {"text": TEXTS, "prompt_completion": PROMPTED, "messages": TALKS}
BY_UNIT = {"unit": "who", "max_examples_per_unit": 3}
SEQUENCES = st.tuples(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=20), st.integers(1, 9999)
).map(lambda drawn: TokenSequence(tuple(i for i, _ in drawn[0]), tuple(m for _, m in drawn[0]), drawn[1]))


def section(**values: Any) -> DataConfig:
    return data_section(**{"max_length": 24, "long_examples": "chunk", **values})


def table_of(folder: Path, rows: list[Json], **values: Any) -> tuple[Table, DataConfig]:
    path = tiny.write_rows(folder / "rows.jsonl", rows)
    data = section(**{**values, "train": str(path)})
    return load_table(str(path), data, "train", folder / "cache"), data


def make(folder: Path, rows: list[Json] = TEXTS, tokenizer_: Any = None, **values: Any) -> Units:
    table, data = table_of(folder, rows, **values)
    return make_units(table, sampled_rows(table, data), tokenizer_ or tokenizer(), data, folder / "cache")


def in_memory(rows: list[Json], fmt: Any = "text", **values: Any) -> list[Unit]:
    groups = data.group_rows(Table("rows.jsonl", tiny.rows(rows, "who"), fmt), section(**values))
    return list(iter_units(list(groups), fmt, tokenizer(), section(**values)))


def test_files_are_closed_when_nobody_reads_them(tmp_path: Path) -> None:
    process = psutil.Process()
    before = process.num_fds()
    for _ in range(5):
        stored = StoredRows(tmp_path, 0)
        stored.append(Row({"text": "a"}))
        units = make(tmp_path).with_slots([None])
        assert units[0] is not None
    del stored, units
    assert process.num_fds() == before


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, data_section = table_of(tmp_path, TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(data, "BUFFER", 0)
        patch.setattr(tempfile.SpooledTemporaryFile, "write", full_disk)
        with refused(r"No space left.*--output_dir"):
            table_of(tmp_path, TEXTS)
    monkeypatch.setattr(np, "save", full_disk)
    with refused(r"No space left.*--output_dir"):
        make_units(table, sampled_rows(table, data_section), tokenizer(), data_section, tmp_path / "cache")
    assert entries(tmp_path) == []


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    fmt=st.sampled_from(sorted(ROWS)),
    picks=st.lists(st.integers(0, 39), min_size=1, max_size=12),
    max_length=st.sampled_from([2, 3, 8, 9, 24, 100]),
    long_examples=st.sampled_from(["chunk", "truncate"]),
    unit=st.sampled_from([{}, BY_UNIT]),
    at_once=st.sampled_from([0, 150, 2**18]),
)
def test_units_on_disk_are_those_of_memory(
    fmt: Any, picks: list[int], max_length: int, long_examples: str, unit: Json, at_once: int
) -> None:
    rows = [ROWS[fmt][pick] for pick in picks]
    values = {"max_length": max_length, "long_examples": long_examples, **unit}
    data_read, table = section(**values), Table("rows.jsonl", tiny.rows(rows, "who"), fmt)
    expected = []
    for group in data.group_rows(table, data_read):  # each row by itself
        encoded = [tokens.encode(row.parts, fmt, tokenizer(), data_read) for row in group]
        expected.append(Unit(tuple(sequence for sequences in encoded for sequence in sequences)))
    assert in_memory(rows, fmt, **values) == expected
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "AT_ONCE", at_once)
        first, reopened = (make(Path(folder), rows, **values) for _ in range(2))
    for units in (first, reopened):
        assert list(units) == expected == units[:]
        assert units.digest == first.digest
        sizes = [[len(sequence.input_ids) for sequence in unit.sequences] for unit in expected]
        assert [units.sizes(index) for index in range(len(units))] == sizes
    ids = [token for unit in first[:] if unit for sequence in unit.sequences for token in sequence.input_ids]
    assert all(type(token) is int for token in ids)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(SEQUENCES, max_size=3))
def test_any_sequence_is_packed_without_loss(sequences: list[TokenSequence]) -> None:
    unit = Unit(tuple(sequences))
    assert tokens._unpack(tokens._pack(unit), len(unit.sequences)) == unit


def test_slots_stand_behind_the_units_and_other_units_have_another_digest(tmp_path: Path) -> None:
    units = make(tmp_path)
    slots = [None, in_memory(TEXTS[:1])[0], Unit(())]
    extended = units.with_slots(slots)
    assert (len(extended), extended[len(units) :]) == (len(units) + 3, slots)
    assert extended[: len(units)] == units[:]
    assert [extended.sizes(len(units) + index) for index in range(3)] == [[], units.sizes(0), []]
    assert extended.sizes(-1) == []
    digests = {units.digest, extended.digest, units.with_slots(slots[::-1]).digest, units.with_slots([None]).digest}
    assert len(digests) == 4
    assert units.with_slots(slots).digest == extended.digest
    assert make(tmp_path / "b").digest == units.digest
    changed = make(tmp_path / "c", TEXTS[::-1]), make(tmp_path / "d", max_length=23), make(tmp_path / "e", TEXTS[:-1])
    assert units.digest not in {other.digest for other in changed}


def entries(folder: Path) -> list[str]:
    cache = folder / "cache" / tokens.FOLDER
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that a corpus is tokenised."""
    calls: list[int] = []

    def count(*arguments: Any, **options: Any) -> Iterator[Unit]:
        calls.append(1)
        return iter_units(*arguments, **options)

    monkeypatch.setattr(tokens, "iter_units", count)
    return calls


def test_a_corpus_is_tokenised_once(tmp_path: Path, counted: list[int]) -> None:
    first, reopened = make(tmp_path), make(tmp_path)
    assert (len(counted), reopened.digest, reopened.path.name) == (1, first.digest, first.path.name)
    assert list(reopened) == list(first)
    assert entries(tmp_path) == [first.path.name]
    for path in (first.path, first.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_whatever_changes_the_tokens_is_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_unit = [{**BY_UNIT, **extended} for extended in ({}, {"max_examples_per_unit": 2}, {"sampling": "example"})]
    values: list[Json] = [{}, {"max_length": 23}, {"long_examples": "truncate"}, *of_unit]
    keys = [make(tmp_path, TALKS, **settings).path.name for settings in values]
    tokenizers = [tiny.tokenizer(chat_template="!" + tiny.CHAT), *(tiny.tokenizer() for _ in range(3))]
    tokenizers[1].eos_token = "<pad>"
    tokenizers[2].add_tokens(["plums"])
    tokenizers[3].split_special_tokens = True
    keys += [make(tmp_path, TALKS, tokenizer_).path.name for tokenizer_ in tokenizers]
    keys += [make(tmp_path, TALKS[::-1]).path.name, make(tmp_path, TALKS[1:]).path.name]
    ambiguous = [{"text": "a", "prompt": "b", "completion": "c", "who": "p"}]
    keys += [make(tmp_path, ambiguous, format=fmt).path.name for fmt in ("prompt_completion", "text")]
    keys += [make(tmp_path, [{"prompt": p, "completion": c}]).path.name for p, c in (("a", "bc"), ("ab", "c"))]
    keys.append(make(tmp_path, [{"prompt": "a", "completion": "bc"}], template="{prompt}{completion}").path.name)
    monkeypatch.setattr(tokens, "ENCODING", tokens.ENCODING + 1)
    keys.append(make(tmp_path, TALKS).path.name)
    assert len(set(keys)) == len(keys)


def test_unread_columns_and_truncation_make_no_other_entry(tmp_path: Path, counted: list[int]) -> None:
    cutting = tiny.tokenizer()
    cutting.backend_tokenizer.enable_truncation(4)
    unread = [{**row, "remark": number} for number, row in enumerate(TEXTS)]
    assert list(make(tmp_path, unread, cutting)) == list(make(tmp_path)) == in_memory(TEXTS)
    assert len(counted) == 1


def test_a_table_without_a_digest_has_no_key(tmp_path: Path) -> None:
    table = Table("rows.jsonl", tiny.rows(TEXTS), "text")
    with pytest.raises(ValueError, match="digest"):
        make_units(table, each_row(tiny.rows(TEXTS)), tokenizer(), section(), tmp_path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def flip(path: Path, offset: int | None = None, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + (path.suffix == ".json") if offset is None else offset] ^= bits
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [cut, flip, partial(flip, offset=-1, bits=255), Path.unlink, partial(Path.write_bytes, data=b"")]
)
@pytest.mark.parametrize("name", ["tokens.bin", "index.npy", "sizes.npy", "meta.json"])
def test_a_damaged_entry_is_remade(tmp_path: Path, counted: list[int], name: str, damage: Any) -> None:
    first = make(tmp_path)
    expected, key = list(first), first.path.name
    damage(first.path / name)
    remade = make(tmp_path)
    assert (list(remade), remade.path.name, remade.digest) == (expected, key, first.digest)
    assert len(counted) == 2
    assert entries(tmp_path) == [key]


def test_units_that_are_open_lose_their_name_without_harm_and_their_bytes_with_an_error(tmp_path: Path) -> None:
    units = make(tmp_path)
    os.rename(tmp_path / "cache", tmp_path / "elsewhere")
    assert list(units) == in_memory(TEXTS)
    os.truncate(tmp_path / "elsewhere" / tokens.FOLDER / units.path.name / "tokens.bin", 100)
    with refused("truncated"):
        list(units)


DIES = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_tokens
from dpllm.text import data, tokens

whole = tokens.iter_units
def dies(*arguments, **named):
    for number, unit in enumerate(whole(*arguments, **named)):
        if number == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        yield unit
tokens.iter_units, tokens._PIECE = dies, 1
test_tokens.make(Path(sys.argv[2]))
"""


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, counted: list[int]) -> None:
    with pytest.raises(AssertionError):
        run_program("-c", DIES, Path(__file__).parent, tmp_path)
    assert [name[0] for name in entries(tmp_path)] == [".", "."]  # a lock, and what is half written
    units = make(tmp_path)
    assert list(units) == in_memory(TEXTS)
    assert (entries(tmp_path), len(counted)) == ([units.path.name], 1)


def test_of_several_threads_one_tokenises(tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    table, data_section = table_of(tmp_path, TEXTS)
    units_made: list[Units] = []
    quick = tokens.iter_units

    def slow(*arguments: Any, **options: Any) -> Iterator[Unit]:
        time.sleep(0.5)  # so that the others come meanwhile
        return quick(*arguments, **options)

    monkeypatch.setattr(tokens, "iter_units", slow)

    def run(tokenizer: Any) -> None:
        rows = sampled_rows(table, data_section)
        units_made.append(make_units(table, rows, tokenizer, data_section, tmp_path / "cache"))

    threads = [threading.Thread(target=run, args=(tiny.tokenizer(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(counted), len(units_made)) == (1, 4)
    assert {units.digest for units in units_made} == {make(tmp_path).digest}


GROWS = """
import json, os, sys
from pathlib import Path
import psutil, tiny, transformers, tokenizers, numpy, pyarrow
from tokenizers import Tokenizer, models, pre_tokenizers
from dpllm.text import data, tokens
from dpllm.recipe.config import DataConfig

folder, megabytes, in_memory = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "in memory"
words = [f"word{number:07}" for number in range(1000)]
backend = Tokenizer(models.WordLevel({"</s>": 0, **{word: place + 1 for place, word in enumerate(words)}}, unk_token="</s>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
path, number = folder / "rows.jsonl", 0
with open(path, "w") as file:
    while file.tell() < megabytes * 2**20:
        text = " ".join(words[(number * 7 + place * place) % 1000] for place in range(300))
        file.write(json.dumps({"who": number % 4999, "text": text}) + "\\n")
        number += 1
wanted = DataConfig(train=str(path), max_length=256, long_examples="chunk", unit="who", max_examples_per_unit=10**6)
tokens.encode({"text": "word"}, "text", tokenizer, wanted)
if megabytes < 100:  # so that few rows are many
    tokens.AT_ONCE, data.BUFFER = 2**15, 2**20
before = psutil.Process().memory_info().rss
most = [0]
def look():
    most[0] = max(most[0], psutil.Process().memory_info().rss - before)
table = data.load_table(str(path), wanted, "train", folder / "cache")
look()
groups = data.sampled_rows(table, wanted)
look()
if in_memory:
    units = tokens.encode_units(groups, "text", tokenizer, wanted)
else:
    units = tokens.make_units(table, groups, tokenizer, wanted, folder / "cache")
look()
seen = 0
for count, unit in enumerate(units):
    seen += sum(len(sequence.input_ids) for sequence in unit.sequences)
    if count % 500 == 0:
        look()
look()
assert seen > 300 * number
print(most[0] / 2**20)
"""


def growth(folder: Path, megabytes: int, how: str) -> float:
    return float(run_program("-c", GROWS, folder, megabytes, how))


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    assert growth(tmp_path, 4, "on disk") < 20


@pytest.mark.full
def test_a_corpus_is_trained_on_in_less_memory_than_it_takes(tmp_path: Path) -> None:
    assert growth(tmp_path, 12, "in memory") > 30  # what is measured can be seen
    assert growth(tmp_path, 300, "on disk") < 120
