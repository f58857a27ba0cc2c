"""A row becomes one text, and the places in it that are learned; a conversation by a chat template.

Comes in: a row, a tokenizer; or what data.chat_template names. Goes out: text and spans of characters; a template; how rows look.
It must not know the recipe, nor what is done with spans. Errors never name a text.
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
_SIGN = "\ue0d1\ue0d2"  # for private use: stands in for what a message says
_FAILS: dict[type, str] = {
    list: "does not read content that is written in parts (a list); write it as one text",
    type(None): "does not read a message without content (null), as many calls of tools are; write an empty text there",
}
_SHOWN = 400
"""Characters of each part of a public example."""
_LOST = "does not show where a turn of the assistant begins and ends, so words of others would be learned with it"


def read_template(named: str | None) -> str | None:
    """The text of data.chat_template, which may be that text, the name of its file, or a folder with a tokenizer.

    Raises:
        ConfigError: There is no such file, or no template in the folder.
    """
    if named is None or "{%" in named or "{{" in named:
        return named
    path, template = Path(named), None
    beside = path / "chat_template.jinja"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.is_dir() and not beside.exists():
            template = read_json(path / "tokenizer_config.json").get("chat_template")
        else:
            template = (beside if path.is_dir() else path).read_text("utf-8")
    if not isinstance(template, str) or not template.strip():
        raise ConfigError(
            f"data.chat_template {named}: is no template, nor a file or a tokenizer's folder that holds one, so messages cannot "
            "be read. Name a file such as chat.jinja."
        )
    return template


class Rendered(NamedTuple):
    """One text of a row."""

    text: str
    spans: Spans  # of characters that are learned
    template: bool  # a chat template made it
    kept: bool = False  # also where nothing of it is learned, since another text belongs to it


def rendered(row: Row, fmt: Format, tokenizer: Any, template: str | None) -> list[Rendered]:
    """The texts of a row, see ``layouts.texts_of``; ``template`` is the recipe's data.template.

    Raises:
        DataError: See ``render_chat``.
    """
    texts = texts_of(row, fmt)
    return [_rendered(one, inner, tokenizer, template, kept=len(texts) > 1) for _, inner, one in texts]


def _rendered(row: Row, fmt: Format, tokenizer: Any, template: str | None, *, kept: bool) -> Rendered:
    if fmt == "text":
        text = row.line + row.parts["text"]
        return Rendered(text, [(len(row.line), len(text))], False, kept)
    if fmt == "prompt_completion":
        masked, after = joined(row.line + row.parts["prompt"], row.parts["completion"], template)
        return Rendered(masked + after, [(len(masked), len(masked + after))], False, kept)
    text, spans = render_chat(row.parts, tokenizer)
    if any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
        raise DataError("the chat template produces overlapping turns. Use format prompt_completion.")
    return Rendered(text, spans, True, kept)


def joined(prompt: str, completion: str, template: str | None) -> tuple[str, str]:
    """The text of a prompt and its completion: what is masked of it, and what is learned.

    ``template`` is the recipe's data.template, which is cut at its two fields: what stands in the data never is one. A space
    before the completion is learned with it, because tokenizers make it a part of the word behind it.
    """
    before, between = "", "" if not prompt or prompt[-1].isspace() or completion[:1].isspace() else " "
    if template is not None:
        before, _, rest = template.partition("{prompt}")
        between = rest.removesuffix("{completion}")
    masked = before + prompt + between
    return masked.removesuffix(" "), " " * masked.endswith(" ") + completion


def shape(fmt: Format, codes: Sequence[str], template: str | None) -> str:
    """How rows look, without a word of any; ``codes`` and ``template`` are the recipe's data.control and data.template."""
    texts: dict[str, Any] = {field: f"<{field}>" for fields in FIELDS.values() for field in fields}
    turns = [{"role": role, "content": f"<{role}>"} for role in ("user", "assistant")]
    line = layouts.code_line(codes, ["..."] * len(codes)) if codes else ""
    return example(Row({**texts, "messages": turns}, line=line), fmt, template)


def example(row: Row, fmt: Format, template: str | None) -> str:
    """A row of public data as the model will see it: which parts are learned and which are masked."""
    texts = texts_of(row, fmt)
    if len(texts) > 1:
        return "\n".join(f"{name}:\n{example(one, inner, template)}" for name, inner, one in texts)
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
    """The text of a row's messages, and what the assistant says in it: all behind the prompt for its turn, with its end.

    Where the template has ``{% generation %}`` marks, they say it.

    Raises:
        DataError: There is no template, it refuses the row or does not read something in it, or the turns cannot be found.
    """
    messages, more = row["messages"], {TOOLS: row.get(TOOLS), **(row.get(KWARGS) or {})}

    def shown(some: Sequence[Message], *, asked: bool = False) -> str:
        return str(tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=asked, **more))

    try:
        template, text = _template(tokenizer, messages, more), shown(messages)
        if any(isinstance(one.get("content"), list) and str(one["content"]) in text for one in messages):
            raise _refusal(_FAILS[list])  # printed as Python writes a list
        if re.search(r"\{%[-+]?\s*generation\b", template):
            made = _by_marks(messages, template, {**tokenizer.special_tokens_map, **more})
        else:
            turns = (place for place, message in enumerate(messages) if learned(message))
            made = text, [_turn(text, messages, place, shown, tokenizer) for place in turns]
        said = [one for one in messages if one["role"] != "system" and one.get("content")]
        if shown([_signed(one) for one in messages]).count(_SIGN) < len(said):
            raise _refusal("leaves out what a message says, so nothing of it would be read or learned")
        return made
    except DataError:
        raise
    except Exception as error:  # whatever a template raises
        raise _refusal(_why(messages, shown, error)) from None


def _refusal(why: str) -> DataError:
    fix = "Fix or drop the row, set data.chat_template to a template that takes it, or use prompt_completion."
    return DataError(f"the chat template {why}. {fix}")


def _template(tokenizer: Any, messages: Sequence[Message], more: Mapping[str, Any]) -> str:
    """The template that a row is read by, which reads all that the row brings besides its messages."""
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, as most base models have none, so messages cannot be read. Set "
            "data.chat_template to a file, name a model with a chat template, or use prompt_completion."
        )
    template = str(tokenizer.get_chat_template(tools=more[TOOLS]))
    own = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {TOOLS} | {"messages"}
    calls = ["tool_calls"] if any(one.get("tool_calls") for one in messages) else []
    for name in [*calls, *(name for name in more if name != TOOLS or more[TOOLS])]:
        if name in own or not re.search(rf"\b{re.escape(name)}\b", template):
            what = name if name in (TOOLS, *calls) else KWARGS
            fix = "drop the row" if name in calls else f"type --data.columns '{{{what}: null}}' to ignore them"
            raise DataError(
                f"the chat template does not read {what} as a row has them, so the model would not see them. Set "
                f"data.chat_template to a template that does, or {fix}."
            )
    return template


def _by_marks(messages: Sequence[Message], template: str, more: Mapping[str, Any]) -> tuple[str, Spans]:
    """By the template's own marks, as ``return_assistant_tokens_mask`` of transformers reads them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [{key: value for key, value in one.items() if value is not None} for one in messages]
    (text,), (spans,) = render_jinja_template(
        [plain], chat_template=template, return_assistant_tokens_mask=True, **more
    )
    turns = [learned(one) for one in messages if one["role"] == "assistant"]
    if not all(turns) and _marks(plain, template, more) != list(range(1, len(turns) + 1)):  # some have weight 0
        raise _refusal("marks parts of turns, so that one that is not to be learned cannot be left out")
    wanted = (span for place, span in enumerate(spans) if all(turns) or turns[place])
    return text, [(low, high) for low, high in wanted if low < high]


def _marks(plain: Sequence[Message], template: str, more: Mapping[str, Any]) -> list[int]:
    """How many marks there are up to the end of each turn of the assistant."""
    from transformers.utils.chat_template_utils import render_jinja_template

    ends = [place + 1 for place, one in enumerate(plain) if one["role"] == "assistant"]
    chats = [plain[:end] for end in ends]
    return list(
        map(len, render_jinja_template(chats, chat_template=template, return_assistant_tokens_mask=True, **more)[1])
    )


def _turn(text: str, messages: Sequence[Message], place: int, shown: Show, tokenizer: Any) -> tuple[int, int]:
    """Where the assistant's turn at ``place`` begins, behind what asks for it, and where it ends, its end token included.

    A template may write a turn otherwise once others follow it: Qwen3 takes the thoughts out, Phi-3 moves the end of the text.
    So a sign replaces what the turn says, and shows what stands around it: in the whole row, and in the row that ends there.
    """
    if not place:
        raise DataError(
            "a row begins with the assistant, and no prompt asks for its turn. Put a user's turn before it."
        )
    before, after = shown(messages[:place], asked=True), shown(messages[: place + 1])
    if text.startswith(before) and text.startswith(after):
        return len(before), len(after)
    signed = [*messages[:place], _signed(messages[place]), *messages[place + 1 :]]
    head, found, rest = shown(signed).partition(_SIGN)
    early, _, end = shown(signed[: place + 1]).partition(_SIGN)
    ended = shown(signed[: place + 1], asked=True).partition(_SIGN)[2]
    silent = _shared(before, shown(messages[:place]), tokenizer)
    asked = _shared(early, before, tokenizer)
    begun, kept = _begun(head, early[silent:], tokenizer)
    low = begun + min(kept, asked - silent)
    fits = found and 0 < silent <= asked and text.startswith(head[:low]) and text.endswith(rest)
    if not fits or begun < 0:
        raise _refusal(_LOST)
    most = len(rest)
    if place < len(messages) - 1:
        most = max(_shared(rest, one, tokenizer) for one in (ended.removesuffix(before[silent:]), end))
    return low, len(text) - len(rest) + most


def _begun(head: str, turn: str, tokenizer: Any) -> tuple[int, int]:
    """Where ``head`` ends with the beginning of a turn, of which a piece may be left out, and how far it is the same; or -1.

    A whole token that is the same counts before letters that are: the end of the turn before begins as this one does ("<|").
    """
    first = -1, 0
    for gone in range(len(turn) or 1):
        start = len(head) - len(turn) + gone
        same = _alike(head[start:], turn)
        if start >= 0 and (same or not turn) and head[start + same :] == turn[same + gone :]:
            if not turn or _shared(head[start:], turn, tokenizer):
                return start, same
            if first[0] < 0:
                first = start, same
    return first


def _signed(one: Message) -> Message:
    """The same message with the sign for what it says; if it calls tools, for the name of the first."""
    if calls := one.get("tool_calls"):
        named = {**calls[0].get("function", calls[0]), "name": _SIGN}
        return {**one, "tool_calls": [{**calls[0], "function": named} if "function" in calls[0] else named, *calls[1:]]}
    return {**one, "content": [{"type": "text", "text": _SIGN}] if isinstance(one.get("content"), list) else _SIGN}


def _shared(one: str, other: str, tokenizer: Any) -> int:
    """How far two texts are the same: up to the end of one, or of the last space or special token before they differ.

    Not up to a letter: "<|end|>" and "<|user|>" begin alike.
    """
    same = _alike(one, other)
    if same in (len(one), len(other)):
        return same
    special = set(tokenizer.get_added_vocab().values())
    encoded = tokenizer(one, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pieces = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ends = [high for token, (_, high) in pieces if token in special and high <= same]
    return max([0, *map(int, ends), *(space.end() for space in re.finditer(r"\s", one[:same]))])


def _alike(one: str, other: str) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _why(messages: Sequence[Message], shown: Show, error: Exception) -> str:
    """What of a row a template fails on, found by writing something else."""
    from jinja2 import TemplateError

    for kind, why in _FAILS.items():
        with contextlib.suppress(Exception):  # whatever a template raises
            shown([{**one, "content": "a"} if isinstance(one.get("content"), kind) else one for one in messages])
            return why
    if type(error) is TemplateError:  # of raise_exception in a template
        return "refuses a role in a row's messages, or their order: some take no system, some want user and assistant in turn"
    return f"fails on a row's messages ({type(error).__name__}); each needs role and content"
