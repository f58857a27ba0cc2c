"""A conversation becomes one text by a chat template, and the places in it where the assistant speaks.

Comes in: a row of messages, a tokenizer; or what data.chat_template names. Goes out: text and spans of characters; a template.
A template is a program that sees a whole row, so one row never decides how another one reads. Errors never name a text. It must
not know the recipe, nor what is done with spans.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError, DataError
from dpllm.files import read_json
from dpllm.text.layouts import KWARGS, TOOLS, learned

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]
_THIS, _LAST = "\ue0d1\ue0d2", "\ue0d3\ue0d4"  # for private use: stand in for what one message says, and the one before it
_MARKED = re.compile(r"\{%[-+]?\s*generation\b")
_LOST = (
    "the chat template does not show where a turn of the assistant begins and ends, so other people's words would be learned "
    "with it. Set data.chat_template to a template with {% generation %} marks, or use format prompt_completion."
)
_PARTS = (
    "the chat template does not read content that is written in parts (a list), as it stands in a row. Write each content as one "
    "text, or set data.chat_template to a template that reads parts."
)
_NULL = (
    "the chat template does not read a message without content (null), as it stands in a row. Write an empty text there, or set "
    "data.chat_template to a template that reads calls of tools."
)
_ROLE = (
    "the chat template refuses the roles of a row's messages, or their order; some know no system or tool, and some want user and "
    "assistant to alternate. Fix or drop the row, or set data.chat_template to a template that takes it."
)


def read_template(named: str | None) -> str | None:
    """The text of data.chat_template, which may be that text, the name of its file, or a folder with a tokenizer.

    Raises:
        ConfigError: There is no such file, or no single template in the folder.
    """
    if named is None or "{%" in named or "{{" in named:
        return named
    path = Path(named)
    beside, settings = path / "chat_template.jinja", path / "tokenizer_config.json"
    try:
        if settings.is_file() and not beside.is_file():
            found = read_json(settings).get("chat_template")
        else:
            found = (beside if path.is_dir() else path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template {named}: cannot be read ({type(error).__name__}). Name a file such as chat.jinja, or a folder with "
            "a tokenizer that has a chat template."
        ) from None
    if not isinstance(found, str) or not found.strip():
        raise ConfigError(f"data.chat_template {named}: holds no template. Name a file such as chat.jinja.")
    return found


def digest_of(template: str) -> str:
    """SHA-256 of a template's text."""
    return hashlib.sha256(template.encode()).hexdigest()


def render(row: Mapping[str, Any], tokenizer: Any) -> tuple[str, Spans]:
    """The text of a row's messages, and what the assistant says in it: all behind the prompt for its turn, with its end.

    Where the template has ``{% generation %}`` marks, they say it.

    Raises:
        DataError: There is no template, it refuses the row or does not read something in it, or the turns cannot be found.
    """
    messages, more = row["messages"], {TOOLS: row.get(TOOLS), **(row.get(KWARGS) or {})}
    template = _template(tokenizer, more)

    def shown(some: Sequence[Message], *, asked: bool = False) -> str:
        text = tokenizer.apply_chat_template(list(some), tokenize=False, add_generation_prompt=asked, **more)
        return str(text)

    try:
        text = shown(messages)
        if any(isinstance(one.get("content"), list) and str(one["content"]) in text for one in messages):
            raise DataError(_PARTS)  # printed as Python writes a list
        if _MARKED.search(template):
            return _by_marks(messages, template, tokenizer, more)
        wanted = [place for place, one in enumerate(messages) if learned(one)]
        spans = [_turn(text, messages, place, shown, tokenizer) for place in wanted]
    except DataError:
        raise
    except Exception as error:  # whatever a template raises
        raise DataError(_why(messages, shown, error)) from None
    return text, spans


def _template(tokenizer: Any, more: Mapping[str, Any]) -> str:
    """The template that a row is read by, which reads all that the row brings besides its messages."""
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, as most base models have none, so messages cannot be read. Set "
            "data.chat_template to a file, name a model with a chat template, or use prompt_completion."
        )
    template = str(tokenizer.get_chat_template(tools=more[TOOLS]))
    given = {name for name, value in more.items() if name != TOOLS or value}
    own = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {TOOLS} | {"messages"}
    if any(name in own or not re.search(rf"\b{re.escape(name)}\b", template) for name in given):
        column = TOOLS if TOOLS in given and not re.search(rf"\b{TOOLS}\b", template) else KWARGS
        raise DataError(
            f"column {column!r} of a row holds what the chat template does not read, so the model would not see it. Set "
            f"data.chat_template to a template that does, or type --data.columns '{{{column}: null}}' to ignore the column."
        )
    return template


def _by_marks(messages: Sequence[Message], template: str, tokenizer: Any, more: Mapping[str, Any]) -> tuple[str, Spans]:
    """By the template's own marks, as ``return_assistant_tokens_mask`` of transformers reads them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [{key: value for key, value in one.items() if value is not None} for one in messages]
    (text,), (spans,) = render_jinja_template(
        [plain], chat_template=template, return_assistant_tokens_mask=True, **{**tokenizer.special_tokens_map, **more}
    )
    turns = [learned(one) for one in messages if one["role"] == "assistant"]
    if not all(turns):
        if len(spans) != len(turns):
            raise DataError(
                "the chat template marks parts of turns, so that a turn with weight 0 (such as one of a pair's prompt) could not be "
                "left out. Set data.chat_template to a template with one {% generation %} mark for each turn."
            )
        spans = [span for span, wanted in zip(spans, turns, strict=True) if wanted]
    return text, [(low, high) for low, high in spans if low < high]


def _turn(
    text: str, messages: Sequence[Message], place: int, shown: Callable[..., str], tokenizer: Any
) -> tuple[int, int]:
    """Where the assistant's turn at ``place`` begins, behind what asks for it, and where it ends, its end token included.

    A template may write a turn otherwise once others follow it: Qwen3 takes the thoughts out, Phi-3 moves the end of the text. So
    two messages are replaced by signs, which show what stands around them in the whole row and in the row that ends there.
    """
    if not place:
        raise DataError("a row begins with the assistant, where no prompt asks for its turn. Put a user's turn before it.")
    before, after = shown(messages[:place], asked=True), shown(messages[: place + 1])
    if text.startswith(before) and text.startswith(after):
        return len(before), len(after)
    this, last = _replaced(messages, place, _THIS), _replaced(messages, place - 1, _LAST)
    both = _replaced(this, place - 1, _LAST)
    whole = shown(this).partition(_THIS)[0]
    head, rest = _around(shown(both))
    asks, silent = (shown(last[:place], asked=asked).rpartition(_LAST)[2] for asked in (True, False))
    early, end = _around(shown(both[: place + 1]))
    ended = _around(shown(both[: place + 1], asked=True))[1]
    prompt = asks[_shared(asks, silent, tokenizer) :]  # what asks for a turn
    begins = _shared(head, asks, tokenizer)
    brought = head[begins:]  # by the template, between that and what the message says
    low = len(whole) - len(brought)
    fits = whole.endswith(head) and text.startswith(whole[:low]) and text.endswith(rest) and _THIS not in text
    if not fits or (brought and brought != early[_shared(early, asks, tokenizer) :]):
        raise DataError(_LOST)
    most = len(rest)
    if place < len(messages) - 1:
        most = max(_shared(rest, one, tokenizer) for one in (ended.removesuffix(prompt), end))
    return low, len(text) - len(rest) + most


def _replaced(messages: Sequence[Message], place: int, sign: str) -> list[Message]:
    """The same, but for what one message says; of one that calls tools, for the name of the first."""
    one = dict(messages[place])
    if calls := one.get("tool_calls"):
        called = {**calls[0]["function"], "name": sign} if "function" in calls[0] else None
        one["tool_calls"] = [{**calls[0], **({"function": called} if called else {"name": sign})}, *calls[1:]]
    else:
        one["content"] = [{"type": "text", "text": sign}] if isinstance(one.get("content"), list) else sign
    return [*messages[:place], one, *messages[place + 1 :]]


def _around(text: str) -> tuple[str, str]:
    """What stands between the two signs, and behind the second."""
    front, found, rest = text.rpartition(_THIS)
    _, also, head = front.partition(_THIS)[0].rpartition(_LAST)
    if not found or not also:
        raise DataError(_LOST)
    return head, rest


def _shared(one: str, other: str, tokenizer: Any) -> int:
    """How far two texts are the same: up to the end of one, or of the last space or special token before they differ.

    Not up to a letter: "<|end|>" and "<|user|>" begin alike.
    """
    same = len(os.path.commonprefix([one, other]))
    if same in (len(one), len(other)):
        return same
    special = set(tokenizer.get_added_vocab().values())
    encoded = tokenizer(one, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pieces = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ends = [high for token, (_, high) in pieces if token in special and high <= same]
    return max(*ends, *(found.end() for found in re.finditer(r"\s", one[:same])), 0, 0)


def _why(messages: Sequence[Message], shown: Callable[..., str], error: Exception) -> str:
    """What of a row a template fails on: found by taking it away."""
    from jinja2 import TemplateError

    def works(some: Sequence[Message]) -> bool:
        try:
            return bool(some) and len(shown(some)) > 0
        except Exception:  # whatever a template raises
            return False

    for kind, why in ((list, _PARTS), (type(None), _NULL)):
        if works([{**one, "content": "a"} if isinstance(one.get("content"), kind) else one for one in messages]):
            return why
    usual = [one for one in messages if one.get("role") in ("user", "assistant")]
    if type(error) is TemplateError or works(usual):  # which raise_exception of a template raises
        return _ROLE
    return (
        f"the chat template fails on a row's messages ({type(error).__name__}). Check that each message has role and content, and "
        "the template; or use prompt_completion."
    )
