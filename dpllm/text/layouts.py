"""Converts the row layouts that trainers document to four formats.

Comes in: one row as its source holds it. Goes out: a ``Row`` of a format, and which columns were read. A row never decides how
another one is read: it can only cause a refusal of the whole source. Errors name columns and never their text. Must not know
sources or tokens.
"""

from __future__ import annotations

import contextlib
import json
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
"""ShareGPT's ``from`` -> the role of a message."""
SPEAKERS = sorted({*ROLES.values(), "developer", "function", "ipython", "observation", "context", "document"})
"""Roles that chat templates support."""
SEPARATOR = ";"
"""Joins the values of several columns into the name of a value that ``dpllm describe`` counts."""
TOOLS, KWARGS = TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""TRL's names of the columns that a chat template reads besides the messages."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of data, from the reader to its tokens.

    Attributes:
        parts: Column -> text or messages, for each column that some layout reads: the source's, and those of the row's format.
        unit: Value of the unit column as the source holds it, see ``data.unit_name``; None without such a column.
        codes: Requested column that the row has -> its value as the source holds it.
        line: The line of ``data.control`` before the text, see ``code_line``; empty without it.
    """

    parts: dict[str, Any]
    unit: Any = None
    codes: dict[str, Any] = field(default_factory=dict)
    line: str = ""


def code_line(columns: Sequence[str], values: Sequence[str]) -> str:
    """The line that ``data.control`` puts before a text, such as "visit: home | age: old", with its line end; it is masked."""
    return " | ".join(f"{column}: {value}" for column, value in zip(columns, values, strict=True)) + "\n"


def shares_of(columns: Sequence[str]) -> str:
    """``Statistic.name`` of the released joint distribution of columns."""
    return f"shares of {SEPARATOR.join(columns)}"


class Layout(NamedTuple):
    """One layout of rows."""

    name: str
    format: Format
    reads: dict[str, tuple[str, ...]]
    """Column of the format -> the columns from which it is made; ``OPTIONAL`` ones may be missing."""
    lists: bool
    """Whether these columns hold lists of messages instead of text."""
    convert: Callable[[Raw], Raw] | None = None
    """Makes the columns of the format; None if the row has them already."""
    texts: tuple[str, ...] = ("system",)
    """Columns that hold text although ``lists`` is set."""

    def columns(self) -> list[str]:
        """All columns that are read."""
        return [column for columns in self.reads.values() for column in columns]

    def needed(self) -> list[str]:
        """The columns that a row must have."""
        return [column for column in self.columns() if column not in OPTIONAL]

    @property
    def may_be_empty(self) -> bool:
        """Whether null means empty text: csv cannot write it otherwise, and pandas reads an empty csv cell as null."""
        return not self.lists and self.format in ("text", "prompt_completion")

    def holds(self, row: Raw) -> bool:
        """Whether a fitting row has anything to learn."""
        return any(row[column] for column in self.needed() if column not in ("prompt", "instruction"))

    def fits(self, row: Raw) -> bool:
        """Whether the row has every needed column; in a table, a column that only other rows fill is null."""
        if any(column not in row or (row[column] is None and not self.may_be_empty) for column in self.needed()):
            return False
        # Layouts with one of these columns differ in whether they read text or messages.
        shared = not {"prompt", "chosen"}.isdisjoint(self.columns())
        if not shared or not self.lists:
            return not shared or not all(isinstance(row[column], list) for column in self.columns())
        return all(isinstance(row[column], list) == (column not in self.texts) for column in self.columns())


OPTIONAL = {"input", "system", *TEMPLATE_COLUMNS}


def renamed(raw: Raw, location: str, columns: Mapping[str, str | None]) -> Raw:
    """Renames the columns of ``data.columns`` to those of a format; each of these is then read from nowhere else.

    Raises:
        DataError: A column that is not ``OPTIONAL`` is missing; the error names it.
    """
    if missing := sorted({column for to, column in columns.items() if column and to not in OPTIONAL} - raw.keys()):
        raise DataError(
            f"{location} has no column {missing[0]!r}, which data.columns names. Check the spelling in data.columns, or fix or "
            "drop the row."
        )
    row = {**raw, **{to: raw.get(column) for to, column in columns.items() if column}}
    # null ignores the column
    return {name: value for name, value in row.items() if columns.get(name, name)}


def _of_alpaca(row: Raw) -> Raw:
    instructions = (row["instruction"], row.get("input"))
    return {"prompt": "".join(f"{part}\n" for part in instructions if part), "completion": row["output"]}


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
    """A prompt and a completion, both lists of messages, as one conversation; nothing in the prompt is learned."""
    before = [{**turn, "weight": 0} if isinstance(turn, dict) else turn for turn in row["prompt"]]
    return {"messages": before + row["completion"]}


def _of_answers(row: Raw) -> Raw:
    """Takes the common first words, or messages, of both answers as their prompt; it ends at a space, so no word is cut."""
    chosen, rejected = row["chosen"], row["rejected"]
    longest = min(len(chosen), len(rejected)) - 1  # so that neither answer is empty
    shared = next((index for index in range(longest) if chosen[index] != rejected[index]), longest)
    if isinstance(chosen, str):
        shared = max((index for index in range(shared) if chosen[index].isspace()), default=0)
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _of_prompt_as_text(row: Raw) -> Raw:
    pair = _of_answers(row)
    if all(not isinstance(turn, dict) or turn.get("content") != row["prompt"] for turn in pair["prompt"]):
        raise DataError(
            "has a text in column 'prompt' that no message before both answers repeats; --data.columns '{prompt: null}' ignores "
            "that column"
        )
    return pair


_PAIRS: dict[str, tuple[str, ...]] = {field: (field,) for field in FIELDS["preference"]}
_PROMPT_AS_TEXT = "preference as messages that begin with the prompt"
LAYOUTS = (
    Layout(_PROMPT_AS_TEXT, "preference", _PAIRS, True, _of_prompt_as_text, ("prompt",)),
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
"""If a row fits several layouts of one format, the first is used."""
COLUMNS = tuple(dict.fromkeys(column for layout in LAYOUTS for column in layout.columns()))
"""All columns that some layout reads."""
FIX = "Set data.format, and fix or drop the rows that lack what it reads."


def layout_of(row: Raw, location: str, fmt: str, previous: Layout | None, named_columns: Iterable[str] = ()) -> Layout:
    """The layout of a row: that of the rows before it, that of format ``fmt``, or under auto that of the only format that fits.

    Errors name only ``named_columns``, those of the recipe, and columns of the formats: a column name may itself be private text,
    such as a key in JSON or the first row of a csv file without a header line.

    Raises:
        DataError: The row fits several formats, another layout than the rows before it, or none; the error names the columns.
    """
    fitting = [layout for layout in LAYOUTS if fmt in ("auto", layout.format) and layout.fits(row)]
    fitting = [layout for layout in fitting if layout.holds(row)] or fitting
    if len({layout.format for layout in fitting}) > 1:
        names = " and as ".join(layout.name for layout in fitting)
        raise DataError(
            f"{location} reads as {names}, and data.format: auto does not choose between them, because one row could then decide "
            f"how all others are read. {FIX}"
        )
    if fitting and previous and previous != fitting[0]:
        raise DataError(
            f"{location} reads as {fitting[0].name}, but the rows before it read as {previous.name}. All rows must have the same "
            f"format, so that no row decides how others are read. {FIX}"
        )
    if previous or fitting:
        return previous or fitting[0]
    if fmt in get_args(Format):
        return next(layout for layout in LAYOUTS if layout.name == fmt)
    has_header = not any(suffix in location.lower() for suffix in (".csv", ".tsv"))
    filled = {name for name, value in row.items() if value is not None}
    readable = sorted(filled & {*COLUMNS, *named_columns})
    columns = (
        f"fills the columns {', '.join(readable) or 'none'} of those that dpllm reads, and {len(filled) - len(readable)} others"
        if has_header
        else "has no column that dpllm reads as text, or the file lacks a header line, or has another data.csv.delimiter"
    )
    raise DataError(
        f"{location} {columns}; a row needs text, or prompt and completion, or messages, or instruction and output (Alpaca), or "
        "conversations (ShareGPT), or chosen and rejected (preference). Name other columns with data.columns, as in "
        "--data.columns '{text: body}'."
    )


def converted(row: Raw, location: str, layout: Layout) -> tuple[Raw, bytes]:
    """Returns the row with the columns of the format, and these columns as bytes.

    Raises:
        DataError: A column does not hold what the layout reads; the error names the column.
    """
    row = {**row, **{column: _filled(row[column]) for column in layout.columns() if isinstance(row.get(column), list)}}
    if layout.may_be_empty:
        row |= {column: "" for column in layout.needed() if column in row and row[column] is None}
    fields = _template_columns(row, location) if layout.lists else b""
    for column in layout.columns():
        if row.get(column) is not None or column not in OPTIONAL:
            _check(row.get(column), location, column, layout)
    try:
        row |= layout.convert(row) if layout.convert else {}
    except DataError as error:
        raise DataError(f"{location} {error}. Fix or drop the row.") from None
    turns = [turn for field in FIELDS[layout.format] for turn in row[field]] if layout.lists else []
    if not all(isinstance(turn, dict) and str(turn.get("role")) in SPEAKERS for turn in turns):
        raise DataError(
            f"{location} has a message whose role is not one of {', '.join(SPEAKERS)}, so a chat template may reject it. Fix the "
            "role, or drop the row."
        )
    _check_contents(turns, location)
    if layout.format == "preference":
        _check_answers(row, location, layout)
    return row, b"".join(packed(row[field], location, field) for field in FIELDS[layout.format]) + fields


def _template_columns(row: Raw, location: str) -> bytes:
    """Parses the columns of ``TEMPLATE_COLUMNS``, which many files hold as JSON text, and returns them as bytes."""
    fields = b""
    for column, kind in zip(TEMPLATE_COLUMNS, (list, dict), strict=True):
        value = row.get(column)
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value) if isinstance(value, str) else value
        if value and not (isinstance(value, kind) and all(isinstance(item, dict | str) for item in value)):
            raise DataError(
                f"{location} has no {'list of tools' if kind is list else 'names with values'} in column {column!r}, which a "
                f"chat template reads. Fix or drop the row, or type --data.columns '{{{column}: null}}' to ignore the column."
            )
        if value:
            row[column] = _filled(value, keep="")
            fields += packed(row[column], location, column)
        else:
            row.pop(column, None)
    return fields


def _check_contents(turns: Sequence[Mapping[str, Any]], location: str) -> None:
    for turn in turns:
        content, problem = turn.get("content"), ""
        if not isinstance(content, str | list | None):
            problem = "whose content is neither text nor a list of parts"
        elif content is None and not turn.keys() - {"role", "content", "weight", "name"}:
            problem = "whose content is null"
        elif isinstance(content, list) and not all(
            isinstance(part, dict) and part.get("type") == "text" for part in content
        ):
            problem = "with content in parts, one of which is not text (an image?)"
        if problem:
            raise DataError(f"{location} has a message {problem}. Write its text, or drop the row.")


def _check(value: Any, location: str, column: str, layout: Layout) -> None:
    listed = layout.lists and column not in layout.texts
    if not isinstance(value, list if listed else str) or (listed and not value):
        kind = "a list of messages" if listed else "text"
        name = layout.name if layout.convert else f"format {layout.format}"
        raise DataError(
            f"{location} has no {kind} in column {column!r}, which {name} reads. "
            "Fix or drop the row, or name the column with data.columns."
        )


def _check_answers(row: Raw, location: str, layout: Layout) -> None:
    for side in ("chosen", "rejected"):
        answer = row[side]
        if not answer or (layout.lists and not any(learned(turn) for turn in answer)):
            missing = "no turn of the assistant" if layout.lists else "nothing"
            raise DataError(f"{location} has {missing} in one of its answers. Fix or drop the row.")
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{location} has two equal answers, so neither was preferred. Fix or drop the row.")


def packed(value: Any, location: str, field: str) -> bytes:
    """A value of a row as bytes; different values give different bytes.

    Raises:
        DataError: The value holds an unpaired surrogate; the error names ``field``.
    """
    try:
        text = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{location} holds half a character (an unpaired surrogate) in column {field!r}, which no tokenizer reads. Fix "
            "or drop the row."
        ) from None
    return b"%d:" % len(text) + text


def _filled(value: Any, keep: str = "content") -> Any:
    """Drops keys that are null, except ``keep``: a table gives every message the keys of all others."""
    if isinstance(value, list):
        return [_filled(inner, keep) for inner in value]
    if isinstance(value, dict):
        return {key: _filled(inner, keep) for key, inner in value.items() if inner is not None or key == keep}
    return value


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from strings(inner)


def in_words(layout: Layout, columns: Mapping[str, str | None], codes: Sequence[str]) -> str:
    """The columns of a layout in one line; ``columns`` is the recipe's data.columns, ``codes`` its data.control."""

    def shown(column: str) -> str:
        return f"{columns[column]} (else {column})" if columns.get(column) else column

    parts = []
    for target, sources in layout.reads.items():
        source_columns = (
            " + ".join(shown(source) for source in sources if columns.get(source, source))
            or "what both answers begin with"
        )
        parts.append(source_columns if source_columns == target else f"{source_columns} -> {target}")
    line_columns = f", behind a line with {', '.join(codes)}" if codes else ""
    return f"read as {layout.name}: {', '.join(parts)}{line_columns}"


def texts_of(row: Row, fmt: Format) -> list[tuple[str, Format, Row]]:
    """Names, formats and rows of the texts to learn from a row: the row itself, or both answers of a pair, chosen first."""
    if fmt != "preference":
        return [("", fmt, row)]
    shared = {name: row.parts[name] for name in TEMPLATE_COLUMNS if name in row.parts}
    prompt, texts = row.parts["prompt"], list[tuple[str, Format, Row]]()
    for side in FIELDS["preference"][1:]:
        parts = {"prompt": prompt, "completion": row.parts[side]}
        chat = isinstance(prompt, list)
        answer_row = replace(row, parts={**shared, **of_chats(parts)} if chat else parts)
        texts.append((side, "messages" if chat else "prompt_completion", answer_row))
    return texts


def learned(message: Mapping[str, Any]) -> bool:
    """Whether a message's tokens are targets: it is the assistant's and its ``weight`` is not 0."""
    return message["role"] == "assistant" and message.get("weight") != 0
