"""Prompts: from a file or a recipe to tokens, and what a model wrote as a terminal may show it.

Comes in: a path, a tokenizer. Goes out: prompts, token ids. Errors name lines of a file of prompts and never their text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError, DataError

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
