"""The pages of the documentation as values: their blocks of commands, their links, their headings.

Comes in: Markdown. Goes out: blocks, links, anchors. Must not run anything. The conventions:

- A block marked ``bash`` or ``python`` is executed, in the order of the page, in one directory for each page.
- ``<!-- not run: REASON -->`` on the line before a block says why it is not. ``<!-- run under --full: REASON -->`` says
  that it takes longer than a normal run of the tests allows.
- A comment ``# ... ends with exit code N`` behind a command says that it ends with that code, and not with 0.
- A block of any other kind holds what somebody sees, not what somebody types.
"""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXECUTED = ("bash", "python")
OPERATORS = {"|", "||", "&&", ";", ">", ">>", "<"}
_FENCED = re.compile(r"^([^\S\n]*)```+[^\S\n]*(\w*)[^\n]*\n(.*?)^[^\S\n]*```+[^\S\n]*$", re.DOTALL | re.MULTILINE)
_BLOCKS = re.compile(r"^(\s*)```.*?^\s*```\s*$", re.DOTALL | re.MULTILINE)
_MARKER = re.compile(r"^<!-- (not run|run under --full): (\S.*?) -->$")
_EXIT = re.compile(r"#.*\bends with exit code (\d+)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Command:
    """One command of a block, as typed: continued lines are joined, comments cut off."""

    text: str
    exit_code: int
    line: int

    @property
    def words(self) -> list[str]:
        """Up to the first pipe or redirection."""
        return list(itertools.takewhile(lambda word: word not in OPERATORS, shlex.split(self.text)))

    @property
    def is_plain(self) -> bool:
        """No shell is needed to run it."""
        return not set(shlex.split(self.text)) & OPERATORS


@dataclass(frozen=True)
class Block:
    """A fenced block: what language, what marker (kind and reason) stands before it, what it says."""

    language: str
    line: int
    text: str
    marker: str | None = None
    reason: str | None = None

    def commands(self) -> list[Command]:
        """The commands of a ``bash`` block."""
        parsed, start = [], self.line + 1
        for lines in re.split(r"(?<!\\)\n", self.text):
            words = re.sub(r"(^|\s)#.*$", "", lines.replace("\\\n", " ")).split()
            code = _EXIT.search(lines)
            if words:
                parsed.append(Command(" ".join(words), int(code[1]) if code else 0, start))
            start += 1 + lines.count("\n")
        return parsed


def blocks(markdown: str) -> list[Block]:
    """Every fenced block of a page, in order."""
    assert len(re.findall(r"^\s*```", markdown, re.MULTILINE)) % 2 == 0, "a block has no end"
    parsed = []
    for fenced in _FENCED.finditer(markdown):
        indent, language, text = fenced.groups()
        marker = _MARKER.match(markdown[: fenced.start()].rstrip().rpartition("\n")[2].strip())
        text = "\n".join(line.removeprefix(indent) for line in text.splitlines())
        line = markdown.count("\n", 0, fenced.start()) + 1
        parsed.append(Block(language, line, text, *(marker.groups() if marker else (None, None))))
    return parsed


def recipes(markdown: str) -> dict[str, str]:
    """Recipes that a page shows: blocks of YAML whose first line is a comment with the name of a file."""
    named = ((block, re.match(r"# ([\w-]+\.yaml)$", block.text.split("\n")[0])) for block in blocks(markdown))
    return {name[1]: block.text for block, name in named if name and block.language == "yaml"}


def shown(markdown: str) -> str:
    """A page without its comments."""
    return re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)


def prose(markdown: str) -> str:
    """A page without its blocks, code spans and comments."""
    return re.sub(r"`[^`\n]*`", "", shown(_BLOCKS.sub("", markdown)))


def links(markdown: str) -> list[str]:
    """Targets of links and pictures, those with a scheme left out."""
    return [target for target in _LINK.findall(prose(markdown)) if not re.match(r"[a-z]+:", target)]


def typed_inside(markdown: str) -> list[str]:
    """Commands of ours in the text and in tables: code spans that begin with ``dpllm`` and a command."""
    spans = re.findall(r"`([^`]+)`", shown(_BLOCKS.sub("", markdown)))
    return [" ".join(span.split()) for span in spans if re.match(r"dpllm\s+[a-z]", span)]


def anchors(markdown: str) -> set[str]:
    """The anchors that headings of a page get, on GitHub as in the site."""
    headings = re.findall(r"^#+\s+(.*?)\s*$", _BLOCKS.sub("", markdown), flags=re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def typed_outside(markdown: str) -> list[str]:
    """Commands of ours in an indented block or one of another language, where no test would see them."""
    fenced = [line for block in blocks(markdown) if block.language not in EXECUTED for line in block.text.splitlines()]
    indented = [line for line in _BLOCKS.sub("", markdown).splitlines() if line.startswith("    ")]
    ours = re.compile(r"^\s*\$?\s*(dpllm [a-z]|accelerate launch|scripts/\w|pip install)")
    return [line.strip() for line in fenced + indented if ours.match(line)]
