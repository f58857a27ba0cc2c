"""Reads and encodes prompts, cleans model text for a terminal, and recognises private texts.

Comes in: a path, a tokenizer, rows. Goes out: prompts, token ids, digests for private/ only. Errors never quote text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpllm.errors import ConfigError, DataError
from dpllm.files import read_json, write_json
from dpllm.recipe.config import DataConfig
from dpllm.text.data import Table, load_table, owner_names
from dpllm.text.layouts import COLUMNS, FIELDS, TEMPLATE_COLUMNS, Format, strings
from dpllm.text.sources import expand, is_here
from dpllm.text.tokens import begins_twice, encode_prompt

Side = Literal["training", "evaluation"]
Prompt = str | list[dict[str, Any]]
"""Text, or the messages of a conversation so far."""


@dataclass(frozen=True)
class Sample:
    """One text of the model: the number of its prompt from 0, the prompt (None: no prompt), and the text after it.

    Attributes:
        ended: Whether the model ended the text; False if the limit of tokens did.
    """

    number: int
    prompt: Prompt | None
    text: str
    ended: bool = True


def read_prompts(path: Path) -> list[Prompt]:
    """Reads one prompt per line; a line of a jsonl file holds a string, or an object with ``prompt`` or ``messages``.

    Raises:
        DataError: The file cannot be read or has no prompts, or a line is none of these.
    """
    prompts: list[Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a string may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({type(error).__name__}). Type a file with one prompt per line."
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix not in {".jsonl", ".ndjson", ".json"}:
            prompts.append(line.rstrip("\r"))
            continue
        row = None
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
        prompt = row.get("prompt", row.get("messages")) if isinstance(row, dict) else row
        if isinstance(row, dict) and any(row.get(column) for column in TEMPLATE_COLUMNS):
            raise DataError(
                f"{path}: line {number} has {' or '.join(TEMPLATE_COLUMNS)}, which prompts here do not pass on. Remove them."
            )
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt)):
            raise DataError(
                f'{path}: line {number} holds no prompt. Write {{"prompt": "..."}}, or {{"messages": [...]}} for a conversation.'
            )
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path}: holds no prompts. Write one per line.")
    return prompts


def encode(tokenizer: Any, prompt: Prompt | None, number: int, fmt: Format, template: str | None) -> list[int]:
    """Token ids of prompt ``number``, counted from 0; for None, the token that begins a text.

    These ids precede a completion in training on rows of format ``fmt`` with the recipe's data.template; under format messages,
    text is a user's turn.

    Raises:
        DataError: The chat template rejects the messages, or the prompt is not valid Unicode.
        ConfigError: The model has no token that begins a text.
    """
    try:
        json.dumps(prompt, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"prompt {number + 1}: is not valid UTF-8 (half of a character). Write UTF-8.") from None
    if isinstance(prompt, str) and fmt == "messages":
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list):
        try:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever a template raises
            raise DataError(
                f"prompt {number + 1}: the tokenizer's chat template rejects it ({type(error).__name__}). Each message needs "
                "role and content, and the tokenizer needs a chat template; or type --no-chat with plain-text prompts."
            ) from None
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if "prompt" in FIELDS[fmt]:
        ids = encode_prompt(prompt or "", tokenizer, template)
    else:
        ids = list(tokenizer(prompt or "")["input_ids"])
        ids = ids[1:] if begins_twice(ids, tokenizer) else ids
    while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # some tokenizers end every text
        ids.pop()
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not ids and start is None:
        raise ConfigError(
            "the model has no beginning-of-text token, so it cannot start without a prompt. Type --prompt TEXT."
        )
    return ids or [start]


def printable(text: str) -> str:
    """The text without control characters, which could control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


FEW, COMMON = 10, 0.01
"""Text of more than 10 units (or half of few) and more than 1% of all units is a template; see ``most_private``."""
LINE = 20
"""Minimum characters of a line that counts as a text by itself."""
_BYTES = 16


def keep_rows(path: Path, data: DataConfig, train: Table, held_out: Table | None) -> None:
    """Writes the paths and digest of the data, and digests of the texts of private rows, unless ``path`` exists."""
    import numpy as np

    if path.exists():
        return
    private = [table for table, public in ((train, data.public), (held_out, data.eval_public)) if table and not public]
    owned_digests = bytearray()
    for table in private:
        for owner, row in zip(owners(table, data), table.rows, strict=True):
            texts = list(strings([row.parts[column] for column in COLUMNS if column in row.parts]))
            lines = [line for text in texts for line in text.splitlines() if len(line) >= LINE]
            owned_digests += b"".join(
                _digest(owner) + digest for digest in set(map(_digest, [*texts, *lines, "".join(texts)])) if digest
            )
    # A text counts once per unit, however many of its rows hold it, so one unit cannot make it a template.
    unit_K2 = np.unique(np.frombuffer(bytes(owned_digests), f"S{2 * _BYTES}")).view(f"S{_BYTES}").reshape(-1, 2)
    record: dict[str, Any] = {"units": len(np.unique(unit_K2[:, 0])), "digests": unit_K2[:, 1].tobytes().hex()}
    for side, source, loaded in (("training", data.train, train), ("evaluation", data.eval, held_out)):
        if source is not None and loaded is not None:
            places = [str(Path(name).absolute()) if Path(name).exists() else name for name in expand(source)]
            record[side] = {"places": places, "digest": loaded.digest}
    write_json(path, record, mode=0o600)


def read_again(record: Path, data: DataConfig, side: Side, cache_dir: Path) -> tuple[Table, bool]:
    """Reads a run's rows from the paths of ``keep_rows`` or else of the recipe; returns whether they are known to be unchanged.

    Raises:
        DataError: They are not on this machine, or cannot be read.
    """
    recorded = read_json(record).get(side) if record.exists() else None
    configured, split = (data.train, data.train_split) if side == "training" else (data.eval, data.eval_split)
    source = recorded["places"] if recorded else configured
    if not source or not is_here(source):
        raise DataError(f"the {side} data are not where the run read them, so they cannot be read again. Restore them.")
    table = load_table(source, data, split, cache_dir)
    return table, recorded is not None and table.digest == recorded["digest"]


def read_same(record: Path, data: DataConfig, side: Side, cache_dir: Path) -> Table:
    """Reads the same rows as the run; changed rows, for which nothing was declared, are a DataError."""
    table, unchanged = read_again(record, data, side, cache_dir)
    if not unchanged:
        raise DataError(
            f"the {side} data are not those that the run read, so figures would describe other rows. Restore them."
        )
    return table


def private_among(path: Path, texts: list[str], lines: int = 1) -> list[int]:
    """Numbers, from 1, of texts that are in rows of ``keep_rows``: alone, as JSON, or joined with up to ``lines`` - 1 more."""
    record, digests_of_texts = read_json(path), list[set[bytes]]()
    for number, text in enumerate(texts):
        candidates = ["".join(texts[number : number + several]) for several in range(1, lines + 1)]
        with contextlib.suppress(ValueError, RecursionError):
            candidates += strings(json.loads(text))
        digests_of_texts.append(set(map(_digest, candidates)))
    candidate_digests, stored = set[bytes]().union(*digests_of_texts), bytes.fromhex(record["digests"])
    pieces = (stored[start : start + _BYTES] for start in range(0, len(stored), _BYTES))
    counts, limit = Counter(digest for digest in pieces if digest in candidate_digests), most_private(record["units"])
    private = {digest for digest, count in counts.items() if count <= limit}
    return [number for number, digests in enumerate(digests_of_texts, start=1) if digests & private]


def owners(table: Table, data: DataConfig) -> Iterator[str]:
    """The owner of each row, see ``owner_names``; the row's location if it names nobody.

    With several owners, it is the one with the most rows: one person's text to many people is not a template.
    """
    several = table.rows if data.owners == "several" else ()
    rows_of = Counter(name for row in several for name in owner_names(row.unit, data))
    for number, row in enumerate(table.rows, start=1):
        names = owner_names(row.unit, data) or [f"nobody named: {table.location(number)}"]
        yield max(names, key=lambda name: rows_of[name])


def most_private(units: int) -> int:
    """The largest number of units that may share a private text; a text of more units is a template."""
    return max(3, min(FEW, units // 2), int(COMMON * units))


def _digest(text: str) -> bytes:
    """A hash of letters and digits that ignores spaces, marks, case and composition; empty for a blank text."""
    letters = "".join(re.findall(r"[^\W_]+", unicodedata.normalize("NFKD", text).casefold())) or text.strip()
    return hashlib.blake2b(letters.encode(errors="surrogatepass"), digest_size=_BYTES).digest() if letters else b""
