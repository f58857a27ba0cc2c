"""How large dpllm is, and how its rooms hang together.

    scripts/house     a table beside the limits; exit code 1 where one is exceeded

In: the source of dpllm/, not imported. Out: numbers, and imports of a room above. tests/test_architecture.py holds them.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOMS = (  # from top to bottom: a room may import only rooms below it
    *(
        "front door",
        "cli",
        "lab",
        "comparison",
        "publish",
        "verification",
        "card",
        "auditing",
        "forecast",
        "run",
        "telemetry",
    ),
    *("statement", "ledger", "canaries", "model", "text", "recipe", "privacy", "files", "progress", "errors"),
)
# Of a room: lines. A limit rises only together with a line in docs/decisions.md that says what users got for it: at most 550
# lines for one feature. It falls with what it limits.
LIMITS = {
    "front door": 374,
    "cli": 2_216,
    "lab": 1_048,
    "comparison": 2_170,
    "publish": 2_525,
    "verification": 2_857,
    "card": 770,
    "auditing": 4_072,
    "forecast": 952,
    "run": 4_303,
    "telemetry": 784,
    "statement": 3_098,
    "ledger": 2_698,
    "canaries": 666,
    "model": 2_190,
    "text": 2_443,
    "recipe": 1_646,
    "privacy": 5_897,
    "files": 371,
    "progress": 38,
    "errors": 74,
    "modules": 205,
    "longest module": 412,
    "longest function": 60,
    "most parameters": 8,
    "functions over 60 lines": 0,
    "functions over 8 parameters": 0,
    "upward arrows": 0,
    "rooms in cycles": 0,
}
MOST_LINES = 41_192  # of all rooms together; 31,000 is aimed at, and never above 33,500 after that
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Module:
    """One file, parsed."""

    name: str  # such as privacy.plan; "" is dpllm itself
    source: str
    lines: int
    tree: ast.Module


Modules = dict[str, Module]


def read() -> Modules:
    """Every module of dpllm/, by its name."""
    found, package = {}, Path(__file__).resolve().parents[1] / "dpllm"
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        source = path.read_text("utf-8")
        found[name] = Module(name, source, len(source.splitlines()), ast.parse(source))
    return found


def room(name: str) -> str:
    """The room in which a module lies."""
    return "front door" if name in {"", "__main__"} else name.partition(".")[0]


def imports(module: Module, modules: Modules) -> set[str]:
    """The modules that a module imports, wherever it does: also inside functions, and for the type checker alone.

    ``import dpllm`` is none: it stands for ``__version__``.
    """
    full = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            full += [start + alias.name for alias in node.names]
    inner = [name.removeprefix("dpllm.") for name in full if name.startswith("dpllm.")]
    return {name if name in modules else name.rpartition(".")[0] for name in inner} - {"", module.name}


def arrows(modules: Modules) -> set[tuple[str, str]]:
    """Every import that leads from one room to another: (module, imported module)."""
    pairs = {(name, other) for name, module in modules.items() for other in imports(module, modules)}
    return {(name, other) for name, other in pairs if room(name) != room(other)}


def upward(modules: Modules) -> set[tuple[str, str]]:
    """The imports that lead to a room above."""
    return {(a, b) for a, b in arrows(modules) if ROOMS.index(room(a)) > ROOMS.index(room(b))}


def cycles(modules: Modules) -> list[tuple[str, ...]]:
    """Groups of rooms that reach one another."""
    reach: dict[str, set[str]] = {name: set() for name in ROOMS}
    for a, b in arrows(modules):
        reach[room(a)].add(room(b))
    for middle in ROOMS:
        for start in ROOMS:
            if middle in reach[start]:
                reach[start] |= reach[middle]
    return sorted({tuple(b for b in ROOMS if b in reach[a] and a in reach[b]) for a in ROOMS if a in reach[a]})


def functions(modules: Modules) -> Iterator[tuple[str, int, int]]:
    """Name, lines and parameters of every function; self and cls are not counted."""
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = [part for part in ast.walk(node.args) if isinstance(part, ast.arg)]
                parameters = sum(argument.arg not in {"self", "cls"} for argument in every)
                yield f"{module.name}.{node.name}", (node.end_lineno or 0) - node.lineno + 1, parameters


def code_lines(module: Module) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in NO_CODE:
            held |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(held)


def numbers(modules: Modules) -> dict[str, tuple[int, str]]:
    """What is measured, and where it is largest; of each number less is better."""
    every, longest = list(functions(modules)), max(modules.values(), key=lambda module: module.lines)
    slow, wide, rings = max(every, key=lambda row: row[1]), max(every, key=lambda row: row[2]), cycles(modules)
    return {
        "lines": (sum(module.lines for module in modules.values()), ""),
        "code lines": (sum(map(code_lines, modules.values())), ""),
        **{name: (sum(one.lines for one in modules.values() if room(one.name) == name), "") for name in ROOMS},
        "modules": (len(modules), ""),
        "longest module": (longest.lines, longest.name),
        "longest function": (slow[1], slow[0]),
        "most parameters": (wide[2], wide[0]),
        "functions over 60 lines": (sum(row[1] > 60 for row in every), ""),
        "functions over 8 parameters": (sum(row[2] > 8 for row in every), ""),
        "upward arrows": (len(upward(modules)), ""),
        "rooms in cycles": (sum(map(len, rings)), "; ".join(map(", ".join, rings))),
    }


if __name__ == "__main__":
    house, limits = read(), {**LIMITS, "lines": MOST_LINES}
    table = numbers(house)
    for what, (value, where) in table.items():
        limit = f"at most {limits[what]:,}" if what in limits else ""
        over = "EXCEEDED" if value > limits.get(what, value) else ""
        print(f"{what:28} {value:7,}  {limit:15} {over:9}{where}".rstrip())
    for a, b in sorted(upward(house), key=lambda pair: (ROOMS.index(room(pair[0])), ROOMS.index(room(pair[1])), pair)):
        print(f"{room(a):>12} -> {room(b):10} {a} imports {b}")
    sys.exit(any(value > limits.get(what, value) for what, (value, _) in table.items()))
