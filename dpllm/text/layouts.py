"""How a row reads: the layouts that trainers document become one of four formats.

Comes in: one row as its source holds it. Goes out: a ``Row`` of a format, and what was read from where. A row never decides how
another one reads: it can only make the whole be refused. Errors name columns and never their text. It must not know where rows
come from, nor what a token is.
"""

from __future__ import annotations

import contextlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from dpllm.errors import DataError
from dpllm.text.sources import Raw

Format = Literal["messages", "prompt_completion", "text", "preference"]
FIELDS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected"),
}
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
    "system": "system",
}
"""Who speaks in ShareGPT's ``from`` -> the role of a message."""
SPEAKERS = sorted({*ROLES.values(), "developer", "function", "ipython", "observation", "context", "document"})
"""Roles that chat templates know."""
SEPARATOR = ";"
"""Between the values of several columns, in the name of a value that ``dpllm describe`` counts."""
TOOLS, KWARGS = BESIDE = ("tools", "chat_template_kwargs")
"""Columns beside messages that a chat template reads, as TRL names them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of data, from the reader to its tokens.

    Attributes:
        parts: Every column that some layout reads -> text or messages: those of the source, and those of the row's format.
        unit: What the unit column says, as its source holds it, see ``data.unit_name``; None without one.
        codes: Columns beside the text that were asked for, of those that the row has -> their values as the source holds them.
        line: What stands before the text by ``data.control``, see ``code_line``; empty without.
    """

    parts: dict[str, Any]
    unit: Any = None
    codes: dict[str, Any] = field(default_factory=dict)
    line: str = ""


def code_line(columns: Sequence[str], values: Sequence[str]) -> str:
    """What ``data.control`` puts before a text, such as "visit: home | age: old", with its line end; nothing of it is learned."""
    return " | ".join(f"{column}: {value}" for column, value in zip(columns, values, strict=True)) + "\n"


def shares_of(columns: Sequence[str]) -> str:
    """Name of the released statistic of the joint distribution of columns, as ``asked.Statistic.name`` gives it."""
    return f"shares of {SEPARATOR.join(columns)}"


class Layout(NamedTuple):
    """One way to write a row."""

    name: str
    format: Format
    reads: dict[str, tuple[str, ...]]
    """Column of the format -> the columns that it is made of, of which ``OPTIONAL`` ones may be missing."""
    lists: bool
    """Whether these hold lists of messages, or else text."""
    convert: Callable[[Raw], Raw] | None = None
    """Makes the columns of the format; None where they are there."""
    texts: tuple[str, ...] = ("system",)
    """Columns that hold text beside such lists."""

    def columns(self) -> list[str]:
        """All columns that are read."""
        return [column for columns in self.reads.values() for column in columns]

    def needed(self) -> list[str]:
        """Those without which nothing can be read."""
        return [column for column in self.columns() if column not in OPTIONAL]

    @property
    def may_be_empty(self) -> bool:
        """Whether null is the empty text here: csv has no other word for it, and pandas none for the empty cell of a csv file."""
        return not self.lists and self.format in ("text", "prompt_completion")

    def holds(self, row: Raw) -> bool:
        """Whether a row that fits has something to learn in one of its columns."""
        return any(row[column] for column in self.needed() if column not in ("prompt", "instruction"))

    def fits(self, row: Raw) -> bool:
        """Whether every column that is needed is there; in a table, a column that only another row fills is null."""
        if any(column not in row or (row[column] is None and not self.may_be_empty) for column in self.needed()):
            return False
        # Those with one of these columns read text or messages.
        shared = not {"prompt", "chosen"}.isdisjoint(self.columns())
        if not shared or not self.lists:
            return not shared or not all(isinstance(row[column], list) for column in self.columns())
        return all(isinstance(row[column], list) == (column not in self.texts) for column in self.columns())


OPTIONAL = {"input", "system", *BESIDE}


def renamed(raw: Raw, place: str, columns: Mapping[str, str | None]) -> Raw:
    """The row with the columns that ``data.columns`` names under the names of a format, under which nothing else is read.

    Raises:
        DataError: One is missing, and is not ``OPTIONAL``; it is named.
    """
    if missing := sorted({column for to, column in columns.items() if column and to not in OPTIONAL} - raw.keys()):
        raise DataError(
            f"{place} has no column {missing[0]!r}, which data.columns names. Check the spelling in data.columns, or fix or "
            "drop the row."
        )
    row = {**raw, **{to: raw.get(column) for to, column in columns.items() if column}}
    # null: as if the column were not there
    return {name: value for name, value in row.items() if columns.get(name, name)}


def _of_alpaca(row: Raw) -> Raw:
    asked = (row["instruction"], row.get("input"))
    return {"prompt": "".join(f"{part}\n" for part in asked if part), "completion": row["output"]}


def _of_sharegpt(row: Raw) -> Raw:
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for turn in row["conversations"]:
        if not (isinstance(turn, dict) and {"role", "from"} & turn.keys()):
            raise DataError(
                "has a turn in column 'conversations' without a key 'from' or 'role' that names the speaker"
            )
        if "from" not in turn:
            messages.append(turn)
        elif isinstance(turn["from"], str) and turn["from"] in ROLES:
            messages.append({"role": ROLES[turn["from"]], "content": turn.get("value")})
        else:
            raise DataError(f"has a turn in column 'conversations' whose 'from' is not one of {', '.join(ROLES)}")
    return {"messages": messages}


def of_chats(row: Raw) -> Raw:
    """A prompt and a completion, which are messages, as one conversation; of the prompt nothing is learned."""
    before = [{**turn, "weight": 0} if isinstance(turn, dict) else turn for turn in row["prompt"]]
    return {"messages": before + row["completion"]}


def _of_answers(row: Raw) -> Raw:
    """The words, or messages, that both answers begin with are their prompt: no word is cut, since a space follows a prompt."""
    chosen, rejected = row["chosen"], row["rejected"]
    most = min(len(chosen), len(rejected)) - 1  # something is left of both
    same = next((place for place in range(most) if chosen[place] != rejected[place]), most)
    if isinstance(chosen, str):
        same = max((place for place in range(same) if chosen[place].isspace()), default=0)
    return {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


def _of_told_prompt(row: Raw) -> Raw:
    pair = _of_answers(row)
    if all(not isinstance(one, dict) or one.get("content") != row["prompt"] for one in pair["prompt"]):
        raise DataError(
            "has a text in column 'prompt' that is no message with which both answers begin, and type --data.columns '{prompt: "
            "null}' if it may be ignored"
        )
    return pair


_PAIRS: dict[str, tuple[str, ...]] = {field: (field,) for field in FIELDS["preference"]}
_TOLD = "preference as messages that begin with the prompt"
LAYOUTS = (
    Layout(_TOLD, "preference", _PAIRS, True, _of_told_prompt, ("prompt",)),
    *(Layout(fmt, fmt, {field: (field,) for field in fields}, fmt == "messages") for fmt, fields in FIELDS.items()),
    Layout("preference as messages", "preference", _PAIRS, True),
    Layout("preference without a prompt", "preference", {**_PAIRS, "prompt": ()}, False, _of_answers),
    Layout("preference as messages without a prompt", "preference", {**_PAIRS, "prompt": ()}, True, _of_answers),
    Layout("ShareGPT", "messages", {"messages": ("system", "conversations")}, True, _of_sharegpt),
    Layout(
        "Alpaca",
        "prompt_completion",
        {"prompt": ("instruction", "input"), "completion": ("output",)},
        False,
        _of_alpaca,
    ),
    Layout("prompt and completion as messages", "messages", {"messages": ("prompt", "completion")}, True, of_chats),
)
"""Where a row fits several of one format, the first counts."""
COLUMNS = tuple(dict.fromkeys(column for layout in LAYOUTS for column in layout.columns()))
"""All that some layout reads."""
FIX = "Set data.format, and fix or drop the rows that lack what it reads."


def layout_of(row: Raw, place: str, wanted: str, before: Layout | None, named: Iterable[str] = ()) -> Layout:
    """The layout of a row, which is that of the rows before it: of the format ``wanted``, or with auto of the only one it fits.

    ``named``: columns that the recipe names. Errors name these and those of the formats alone: a file may hold text as a column's
    name, such as keys in JSON, or the first row of a csv file without a header line.

    Raises:
        DataError: Several formats, another layout than before, or none; the columns are named.
    """
    fitting = [layout for layout in LAYOUTS if wanted in ("auto", layout.format) and layout.fits(row)]
    fitting = [layout for layout in fitting if layout.holds(row)] or fitting
    if len({layout.format for layout in fitting}) > 1:
        names = " and as ".join(layout.name for layout in fitting)
        raise DataError(
            f"{place} reads as {names}, and data.format: auto does not choose between them, because one row could then decide "
            f"how all others are read. {FIX}"
        )
    if fitting and before and before != fitting[0]:
        raise DataError(
            f"{place} reads as {fitting[0].name}, but the rows before it read as {before.name}. All rows must have the same "
            f"format, so that no row decides how others are read. {FIX}"
        )
    if before or fitting:
        return before or fitting[0]
    if wanted in get_args(Format):
        return next(layout for layout in LAYOUTS if layout.name == wanted)
    headed = not any(suffix in place.lower() for suffix in (".csv", ".tsv"))
    filled = {name for name, value in row.items() if value is not None}
    known = sorted(filled & {*COLUMNS, *named})
    columns = (
        f"fills the columns {', '.join(known) or 'none'} of those that dpllm reads, and {len(filled) - len(known)} others"
        if headed
        else "has none of them, or the file lacks a header line, or its delimiter is not data.csv.delimiter"
    )
    raise DataError(
        f"{place} {columns}; a row needs text, or prompt and completion, or messages, or instruction and output (Alpaca), or "
        "conversations (ShareGPT), or chosen and rejected (preference). Name other columns with data.columns, as in "
        "--data.columns '{text: body}'."
    )


def converted(row: Raw, place: str, layout: Layout) -> tuple[Raw, bytes]:
    """The row with the columns of the format, and these as bytes.

    Raises:
        DataError: A column that does not hold what the layout reads; the column is named.
    """
    row = {**row, **{column: _filled(row[column]) for column in layout.columns() if isinstance(row.get(column), list)}}
    if layout.may_be_empty:
        row |= {column: "" for column in layout.needed() if column in row and row[column] is None}
    fields = _beside(row, place) if layout.lists else b""
    for column in layout.columns():
        if row.get(column) is not None or column not in OPTIONAL:
            _check(row.get(column), place, column, layout)
    try:
        row |= layout.convert(row) if layout.convert else {}
    except DataError as error:
        raise DataError(f"{place} {error}. Fix or drop the row.") from None
    turns = [turn for field in FIELDS[layout.format] for turn in row[field]] if layout.lists else []
    if not all(isinstance(turn, dict) and str(turn.get("role")) in SPEAKERS for turn in turns):
        raise DataError(
            f"{place} has a message whose role is not one of {', '.join(SPEAKERS)}, so a chat template may reject it. Fix the "
            "role, or drop the row."
        )
    _check_contents(turns, place)
    if layout.format == "preference":
        _check_answers(row, place, layout)
    return row, b"".join(packed(row[field], place, field) for field in FIELDS[layout.format]) + fields


def _beside(row: Raw, place: str) -> bytes:
    """Makes values of the columns of ``BESIDE``, which many files hold as JSON in a text, and returns them as bytes."""
    fields = b""
    for column, kind in zip(BESIDE, (list, dict), strict=True):
        value = row.get(column)
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value) if isinstance(value, str) else value
        if value and not (isinstance(value, kind) and all(isinstance(one, dict | str) for one in value)):
            raise DataError(
                f"{place} has no {'list of tools' if kind is list else 'names with values'} in column {column!r}, which a chat "
                f"template reads. Fix or drop the row, or type --data.columns '{{{column}: null}}' to ignore the column."
            )
        if value:
            row[column] = _filled(value, keep="")
            fields += packed(row[column], place, column)
        else:
            row.pop(column, None)
    return fields


def _check_contents(turns: Sequence[Mapping[str, Any]], place: str) -> None:
    for turn in turns:
        content, wrong = turn.get("content"), ""
        if not isinstance(content, str | list | None):
            wrong = "whose content is neither text nor a list of parts"
        elif content is None and not turn.keys() - {"role", "content", "weight", "name"}:
            wrong = "whose content is null"
        elif isinstance(content, list) and not all(
            isinstance(one, dict) and one.get("type") == "text" for one in content
        ):
            wrong = "with content in parts, of which one is no text (an image?)"
        if wrong:
            raise DataError(f"{place} has a message {wrong}, so it cannot be read. Write its text, or drop the row.")


def _check(value: Any, place: str, column: str, layout: Layout) -> None:
    listed = layout.lists and column not in layout.texts
    if not isinstance(value, list if listed else str) or (listed and not value):
        kind = "a list of messages" if listed else "text"
        name = layout.name if layout.convert else f"format {layout.format}"
        raise DataError(
            f"{place} has no {kind} in column {column!r}, which {name} reads. "
            "Fix or drop the row, or name the column with data.columns."
        )


def _check_answers(row: Raw, place: str, layout: Layout) -> None:
    for side in ("chosen", "rejected"):
        answer = row[side]
        if not answer or (layout.lists and not any(learned(turn) for turn in answer)):
            what = "no turn of the assistant" if layout.lists else "nothing"
            raise DataError(f"{place} has {what} in one of its answers, so nothing was preferred. Fix or drop the row.")
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{place} has two equal answers, of which none was preferred. Fix or drop the row.")


def packed(value: Any, place: str, field: str) -> bytes:
    """A value of a row as bytes, of which no two are the same in different rows.

    Raises:
        DataError: It holds half a character; ``field`` is named.
    """
    try:
        text = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{place} holds half a character (an unpaired surrogate) in column {field!r}, which no tokenizer reads. Fix or drop "
            "the row."
        ) from None
    return b"%d:" % len(text) + text


def _filled(value: Any, keep: str = "content") -> Any:
    """Without keys that hold nothing: a table gives every message the keys of any other. The content may be nothing."""
    if isinstance(value, list):
        return [_filled(inner, keep) for inner in value]
    if isinstance(value, dict):
        return {key: _filled(inner, keep) for key, inner in value.items() if inner is not None or key == keep}
    return value


def strings(value: Any) -> Iterator[str]:
    """Every text in a value of JSON, names of keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from strings(inner)


def in_words(layout: Layout, columns: Mapping[str, str | None], codes: Sequence[str]) -> str:
    """From which columns a layout is read, in one line; ``columns`` is the recipe's data.columns, ``codes`` its data.control."""

    def told(column: str) -> str:
        return f"{columns[column]} (else {column})" if columns.get(column) else column

    parts = []
    for target, sources in layout.reads.items():
        made_of = (
            " + ".join(told(source) for source in sources if columns.get(source, source))
            or "what both answers begin with"
        )
        parts.append(made_of if made_of == target else f"{made_of} -> {target}")
    behind = f", behind a line with {', '.join(codes)}" if codes else ""
    return f"read as {layout.name}: {', '.join(parts)}{behind}"


def words(parts: Mapping[str, Any], fields: Sequence[str]) -> str:
    """The words of a row in their order, by which it is recognised elsewhere; of messages, what each of them says.

    Spaces, line breaks and Unicode composition do not matter, nor into how many columns a record is cut. The answers of a pair
    are sorted: with another one preferred, they are the same record.
    """
    texts = []
    for value in (parts[name] for name in fields):
        if isinstance(value, list):
            value = " ".join(str(turn.get("content", "") if isinstance(turn, dict) else turn) for turn in value)
        texts.append(" ".join(unicodedata.normalize("NFC", str(value)).split()))
    if fields[1:] == FIELDS["preference"][1:]:  # with a prompt apart, or before each
        texts = sorted(" ".join(f"{texts[0]} {answer}".split()) for answer in texts[1:])
    return " ".join(unicodedata.normalize("NFC", " ".join(texts)).split())


def texts_of(row: Row, fmt: Format) -> list[tuple[str, Format, Row]]:
    """The texts that a row is learned as, each with a name and how it reads: itself; or of a pair both answers, chosen first."""
    if fmt != "preference":
        return [("", fmt, row)]
    prompt, beside = row.parts["prompt"], {name: row.parts[name] for name in BESIDE if name in row.parts}
    chat, texts = isinstance(prompt, list), list[tuple[str, Format, Row]]()
    for side in FIELDS["preference"][1:]:
        parts = {"prompt": prompt, "completion": row.parts[side]}
        read = replace(row, parts={**beside, **of_chats(parts)} if chat else parts)
        texts.append((side, "messages" if chat else "prompt_completion", read))
    return texts


def learned(message: Mapping[str, Any]) -> bool:
    """Whether a message's tokens are targets: the assistant's, unless its ``weight`` is 0."""
    return message["role"] == "assistant" and message.get("weight") != 0
