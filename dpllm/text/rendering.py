"""Renders a row as text with the spans that are learned; conversations use a chat template.

Comes in: a row and a tokenizer; or the value of data.chat_template. Goes out: text and spans of characters; a template; examples
of rows. Must not know the recipe or the use of spans. Errors never quote text.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from dpllm.errors import ConfigError, DataError
from dpllm.files import read_json
from dpllm.text import layouts
from dpllm.text.layouts import FIELDS, KWARGS, TOOLS, Format, Row, learned, texts_of

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]
Show = Callable[..., str]
_PLACEHOLDER = "\ue0d1\ue0d2"  # private-use characters that replace the content of a message
_FAILS: dict[type, str] = {
    list: "does not read content that is written in parts (a list); write it as one text",
    type(None): "does not read a message without content (null), as many tool calls are; write an empty text there",
}
_SHOWN = 400
"""Maximum characters of each part of a public example."""
_LOST = "does not show where a turn of the assistant begins and ends, so words of others would be learned with it"


def read_template(value: str | None) -> str | None:
    """The template of data.chat_template, which may be a template, the name of a file, or a folder with a tokenizer.

    Raises:
        ConfigError: The file does not exist, or the folder holds no template.
    """
    if value is None or "{%" in value or "{{" in value:
        return value
    path, template = Path(value), None
    jinja_file = path / "chat_template.jinja"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.is_dir() and not jinja_file.exists():
            template = read_json(path / "tokenizer_config.json").get("chat_template")
        else:
            template = (jinja_file if path.is_dir() else path).read_text("utf-8")
    if not isinstance(template, str) or not template.strip():
        raise ConfigError(
            f"data.chat_template {value}: is neither a template nor a file or tokenizer's folder with one, so messages cannot "
            "be read. Name a file such as chat.jinja."
        )
    return template


class Rendered(NamedTuple):
    """One text of a row."""

    text: str
    spans: Spans  # learned characters
    template: bool  # whether a chat template made it
    keep_empty: bool = False  # keep it even if nothing is learned, because it is one answer of a pair


def rendered(row: Row, fmt: Format, tokenizer: Any, template: str | None) -> list[Rendered]:
    """The texts of a row, see ``layouts.texts_of``; ``template`` is the recipe's data.template.

    Raises:
        DataError: See ``render_chat``.
    """
    texts = texts_of(row, fmt)
    return [_rendered(answer, inner, tokenizer, template, keep_empty=len(texts) > 1) for _, inner, answer in texts]


def _rendered(row: Row, fmt: Format, tokenizer: Any, template: str | None, *, keep_empty: bool) -> Rendered:
    if fmt == "text":
        text = row.line + row.parts["text"]
        return Rendered(text, [(len(row.line), len(text))], False, keep_empty)
    if fmt == "prompt_completion":
        masked, after = joined(row.line + row.parts["prompt"], row.parts["completion"], template)
        return Rendered(masked + after, [(len(masked), len(masked + after))], False, keep_empty)
    text, spans = render_chat(row.parts, tokenizer)
    if any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
        raise DataError("the chat template produces overlapping turns. Use format prompt_completion.")
    return Rendered(text, spans, True, keep_empty)


def joined(prompt: str, completion: str, template: str | None) -> tuple[str, str]:
    """The masked part and the learned part of the text of a prompt and its completion.

    ``template`` is the recipe's data.template; it is split at its two fields, so text in the data is never taken for a field. A
    space before the completion is learned with it, because tokenizers join it to the next word.
    """
    before, between = "", "" if not prompt or prompt[-1].isspace() or completion[:1].isspace() else " "
    if template is not None:
        before, _, after = template.partition("{prompt}")
        between = after.removesuffix("{completion}")
    masked = before + prompt + between
    return masked.removesuffix(" "), " " * masked.endswith(" ") + completion


def shape(fmt: Format, codes: Sequence[str], template: str | None) -> str:
    """The shape of rows, with placeholders for their texts; ``codes`` and ``template`` are data.control and data.template."""
    texts: dict[str, Any] = {field: f"<{field}>" for fields in FIELDS.values() for field in fields}
    turns = [{"role": role, "content": f"<{role}>"} for role in ("user", "assistant")]
    line = layouts.code_line(codes, ["..."] * len(codes)) if codes else ""
    return example(Row({**texts, "messages": turns}, line=line), fmt, template)


def example(row: Row, fmt: Format, template: str | None) -> str:
    """A public row as the model sees it, with each part marked as learned or masked."""
    texts = texts_of(row, fmt)
    if len(texts) > 1:
        return "\n".join(f"{name}:\n{example(answer, inner, template)}" for name, inner, answer in texts)
    if fmt == "text":
        parts = [("masked", row.line.rstrip("\n"))] if row.line else []
        parts.append(("learned", row.parts["text"] + "<eos>"))
    elif fmt == "prompt_completion":
        masked, after = joined(row.line + row.parts["prompt"], row.parts["completion"], template)
        parts = [("masked", masked), ("learned", after + "<eos>")]
    else:
        parts = [
            (f"{turn['role']}, {'learned' if learned(turn) else 'masked'}", str(turn.get("content")))
            for turn in row.parts["messages"]
        ]
    return "\n".join(f"{name}: {text[:_SHOWN]}{' ...' if len(text) > _SHOWN else ''}" for name, text in parts)


def render_chat(row: Mapping[str, Any], tokenizer: Any) -> tuple[str, Spans]:
    """The text of a row's messages, and the spans of the assistant's turns, from after their prompt through their end token.

    If the template has ``{% generation %}`` marks, these mark the spans.

    Raises:
        DataError: There is no template, it rejects the row or ignores a part of it, or the turns cannot be found.
    """
    messages, columns = row["messages"], {TOOLS: row.get(TOOLS), **(row.get(KWARGS) or {})}

    def shown(chat: Sequence[Message], *, add_prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_prompt, **columns))

    try:
        template, text = _template(tokenizer, messages, columns), shown(messages)
        if any(isinstance(turn.get("content"), list) and str(turn["content"]) in text for turn in messages):
            raise _refusal(_FAILS[list])  # the template printed the list as Python does
        if re.search(r"\{%[-+]?\s*generation\b", template):
            rendered_chat = _by_marks(messages, template, {**tokenizer.special_tokens_map, **columns})
        else:
            turns = (index for index, message in enumerate(messages) if learned(message))
            rendered_chat = text, [_turn(text, messages, index, shown, tokenizer) for index in turns]
        with_content = [turn for turn in messages if turn["role"] != "system" and turn.get("content")]
        if shown([_with_placeholder(turn) for turn in messages]).count(_PLACEHOLDER) < len(with_content):
            raise _refusal("leaves out what a message says, so nothing of it would be read or learned")
        return rendered_chat
    except DataError:
        raise
    except Exception as error:  # whatever a template raises
        raise _refusal(_cause(messages, shown, error)) from None


def _refusal(reason: str) -> DataError:
    fix = "Fix or drop the row, set data.chat_template to a template that takes it, or use prompt_completion."
    return DataError(f"the chat template {reason}. {fix}")


def _template(tokenizer: Any, messages: Sequence[Message], columns: Mapping[str, Any]) -> str:
    """The template for a row; refuses a template that ignores a column of the row besides its messages."""
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template (most base models have none), so messages cannot be read. Set "
            "data.chat_template to a file, name a model with a chat template, or use prompt_completion."
        )
    template = str(tokenizer.get_chat_template(tools=columns[TOOLS]))
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {TOOLS} | {"messages"}
    calls = ["tool_calls"] if any(turn.get("tool_calls") for turn in messages) else []
    for name in [*calls, *(name for name in columns if name != TOOLS or columns[TOOLS])]:
        if name in reserved or not re.search(rf"\b{re.escape(name)}\b", template):
            column = name if name in (TOOLS, *calls) else KWARGS
            fix = "drop the row" if name in calls else f"type --data.columns '{{{column}: null}}' to ignore them"
            raise DataError(
                f"the chat template does not read {column} as a row has them, so the model would not see them. Set "
                f"data.chat_template to a template that does, or {fix}."
            )
    return template


def _by_marks(messages: Sequence[Message], template: str, columns: Mapping[str, Any]) -> tuple[str, Spans]:
    """Text and learned spans by the template's own marks, with transformers' ``return_assistant_tokens_mask``."""
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    (text,), (spans,) = render_jinja_template(
        [plain], chat_template=template, return_assistant_tokens_mask=True, **columns
    )
    turns = [learned(message) for message in messages if message["role"] == "assistant"]
    if not all(turns) and _marks(plain, template, columns) != list(range(1, len(turns) + 1)):  # some have weight 0
        raise _refusal("marks parts of turns, so a turn that is not to be learned cannot be left out")
    learned_spans = (span for index, span in enumerate(spans) if all(turns) or turns[index])
    return text, [(low, high) for low, high in learned_spans if low < high]


def _marks(plain: Sequence[Message], template: str, columns: Mapping[str, Any]) -> list[int]:
    from transformers.utils.chat_template_utils import render_jinja_template

    ends = [index + 1 for index, message in enumerate(plain) if message["role"] == "assistant"]
    chats = [plain[:end] for end in ends]
    return list(
        map(len, render_jinja_template(chats, chat_template=template, return_assistant_tokens_mask=True, **columns)[1])
    )


def _turn(text: str, messages: Sequence[Message], index: int, shown: Show, tokenizer: Any) -> tuple[int, int]:
    """The span of the assistant's turn ``index``, from after its prompt through its end token.

    A template may render a turn differently if others follow it: Qwen3 drops the thoughts, Phi-3 moves the end of the text. So a
    placeholder replaces the content and shows the text around it, in the whole row and in the row that ends with this turn.
    """
    if not index:
        raise DataError("a row begins with the assistant, so its turn has no prompt. Put a user's turn before it.")
    before, after = shown(messages[:index], add_prompt=True), shown(messages[: index + 1])
    if text.startswith(before) and text.startswith(after):
        return len(before), len(after)
    marked = [*messages[:index], _with_placeholder(messages[index]), *messages[index + 1 :]]
    head, placeholder, tail = shown(marked).partition(_PLACEHOLDER)
    early, _, end = shown(marked[: index + 1]).partition(_PLACEHOLDER)
    ended = shown(marked[: index + 1], add_prompt=True).partition(_PLACEHOLDER)[2]
    silent = _shared(before, shown(messages[:index]), tokenizer)
    prompted = _shared(early, before, tokenizer)
    start, same_length = _find_turn(head, early[silent:], tokenizer)
    low = start + min(same_length, prompted - silent)
    fits = placeholder and 0 < silent <= prompted and text.startswith(head[:low]) and text.endswith(tail)
    if not fits or start < 0:
        raise _refusal(_LOST)
    length = len(tail)
    if index < len(messages) - 1:
        length = max(_shared(tail, other, tokenizer) for other in (ended.removesuffix(before[silent:]), end))
    return low, len(text) - len(tail) + length


def _find_turn(head: str, turn: str, tokenizer: Any) -> tuple[int, int]:
    """Start of the turn that ends ``head``, which may lack a piece of it, and length of their common prefix; -1: not found.

    A common token outranks common letters: the end of the previous turn has the same first letters ("<|") as this turn.
    """
    first = -1, 0
    for skipped in range(len(turn) or 1):
        start = len(head) - len(turn) + skipped
        shared = _common_prefix(head[start:], turn)
        if start >= 0 and (shared or not turn) and head[start + shared :] == turn[shared + skipped :]:
            if not turn or _shared(head[start:], turn, tokenizer):
                return start, shared
            if first[0] < 0:
                first = start, shared
    return first


def _with_placeholder(message: Message) -> Message:
    """The message with the placeholder as its content, or as the name of the first tool that it calls."""
    if calls := message.get("tool_calls"):
        first = {**calls[0].get("function", calls[0]), "name": _PLACEHOLDER}
        first = {**calls[0], "function": first} if "function" in calls[0] else first
        return {**message, "tool_calls": [first, *calls[1:]]}
    parts = [{"type": "text", "text": _PLACEHOLDER}]
    return {**message, "content": parts if isinstance(message.get("content"), list) else _PLACEHOLDER}


def _shared(left: str, right: str, tokenizer: Any) -> int:
    """Length of the common prefix, up to the end of one text or the last space or special token before they differ.

    It does not end between letters: "<|end|>" and "<|user|>" have the same first letters.
    """
    length = _common_prefix(left, right)
    if length in (len(left), len(right)):
        return length
    special = set(tokenizer.get_added_vocab().values())
    encoded = tokenizer(left, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pieces = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ends = [high for token, (_, high) in pieces if token in special and high <= length]
    return max([0, *map(int, ends), *(space.end() for space in re.finditer(r"\s", left[:length]))])


def _common_prefix(left: str, right: str) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def _cause(messages: Sequence[Message], shown: Show, error: Exception) -> str:
    """The reason why a template fails on a row, found by replacing contents."""
    from jinja2 import TemplateError

    for kind, reason in _FAILS.items():
        with contextlib.suppress(Exception):  # whatever a template raises
            shown([{**turn, "content": "a"} if isinstance(turn.get("content"), kind) else turn for turn in messages])
            return reason
    if type(error) is TemplateError:  # from raise_exception in a template
        return "refuses a role in a row's messages, or their order: some take no system, some want user and assistant in turn"
    return f"fails on a row's messages ({type(error).__name__}); each needs role and content"
