"""Prompts: from a file or a recipe to tokens, and what a model wrote as a terminal may show it; which texts are private.

Comes in: a path, a tokenizer, rows. Goes out: prompts, token ids, digests for private/ alone. Errors never name a text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError, DataError
from dpllm.files import read_json, write_json
from dpllm.recipe.config import DataConfig
from dpllm.text.data import Table
from dpllm.text.layouts import LAYOUTS, strings
from dpllm.text.sources import expand

Prompt = str | list[dict[str, Any]]
"""Text, or the messages of a conversation so far."""


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts from a file: each line is one, and of a jsonl file a string, or an object with ``prompt`` or ``messages``.

    Raises:
        DataError: It cannot be read, a line is none of these, or there is no line.
    """
    prompts: list[Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # other separators of lines may stand in a string
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({type(error).__name__}). Type a file with a prompt on each line."
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix not in {".jsonl", ".ndjson", ".json"}:
            prompts.append(line.rstrip("\r"))
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        found = row.get("prompt", row.get("messages")) if isinstance(row, dict) else row
        if not isinstance(found, str) and not (isinstance(found, list) and all(isinstance(m, dict) for m in found)):
            raise DataError(
                f'{path}: line {number} holds no prompt. Write {{"prompt": "..."}}, or {{"messages": [...]}} for a conversation.'
            )
        prompts.append(found)
    if not prompts:
        raise DataError(f"{path}: holds no prompts. Write one a line.")
    return prompts


def encode(tokenizer: Any, prompt: Prompt | None, number: int, *, chat: bool) -> list[int]:
    """Token ids of prompt ``number``, counted from 0; None: of nothing, from which a text begins.

    With ``chat``, text is a user's turn.

    Raises:
        DataError: The chat template does not take the messages, or the prompt is no text.
        ConfigError: The model has no token with which a text begins.
    """
    try:
        json.dumps(prompt, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"prompt {number + 1}: holds half of a character, which no tokenizer takes. Write UTF-8."
        ) from None
    if isinstance(prompt, str) and chat:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list):
        try:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever a template raises
            raise DataError(
                f"prompt {number + 1}: the tokenizer's chat template does not take it ({type(error).__name__}). Each message "
                "needs role and content, and the tokenizer a chat template; or type --no-chat and prompts of plain text."
            ) from None
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = list(tokenizer(prompt or "")["input_ids"])
    while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # of a tokenizer that ends every text
        ids.pop()
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not ids and start is None:
        raise ConfigError(
            "the model has no token with which a text begins, so it cannot begin alone. Type --prompt TEXT."
        )
    return ids or [start]


def printable(text: str) -> str:
    """Without control characters: what a model writes must not steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


FEW, COMMON = 3, 0.01
"""What more than so many rows, and a larger share of them, have in common is a template's, and nobody's."""
_BYTES = 16


def keep_rows(path: Path, data: DataConfig, train: Table, held_out: Table | None) -> None:
    """Writes, unless it is there, where the training data lie, and a digest of each text of rows that are not declared public."""
    private = [one for one, public in ((train, data.public), (held_out, data.eval_public)) if one and not public]
    columns, digests = dict.fromkeys(column for layout in LAYOUTS for column in layout.columns()), bytearray()
    for table in private if not path.exists() else ():
        for row in table.rows:
            texts = list(strings([row[column] for column in columns if column in row]))
            digests += b"".join(set(map(_digest, [*texts, "".join(texts)])))
    if digests:
        places = [str(Path(name).absolute()) if Path(name).exists() else name for name in expand(data.train)]
        total = sum(len(table.rows) for table in private)
        write_json(path, {"train": places, "rows": total, "digests": digests.hex()}, mode=0o600)


def private_among(path: Path, texts: list[str], lines: int = 1) -> list[int]:
    """Numbers, from 1, of what is a text of a row that ``keep_rows`` read: alone, as JSON, or with so many ``lines`` after it."""
    kept, asked = read_json(path), list[set[bytes]]()
    for number, text in enumerate(texts):
        found = ["".join(texts[number : number + several]) for several in range(1, lines + 1)]
        with contextlib.suppress(ValueError, RecursionError):
            found += strings(json.loads(text))
        asked.append(set(map(_digest, found)))
    among, digests = set[bytes]().union(*asked), bytes.fromhex(kept["digests"])
    pieces = (digests[start : start + _BYTES] for start in range(0, len(digests), _BYTES))
    held, most = Counter(one for one in pieces if one in among), max(FEW, int(COMMON * kept["rows"]))
    return [number for number, own in enumerate(asked, start=1) if any(0 < held[one] <= most for one in own)]


def _digest(text: str) -> bytes:
    """Of letters and digits, so that other spaces, marks, case or composition make no other text; empty where there is none."""
    letters = "".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())) or text.strip()
    return hashlib.blake2b(letters.encode(errors="surrogatepass"), digest_size=_BYTES).digest() if letters else b""
