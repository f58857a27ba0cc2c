"""Measures the size of dpllm and the imports between its rooms.

    scripts/house     prints the figures with their limits; exit code 1 if one is exceeded

In: the source of dpllm/, not imported. Out: numbers, and imports of a room above. tests/test_architecture.py holds them.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOMS = (  # from top to bottom: a room may import only rooms below it
    "cli",
    "front door",
    "comparison",
    "publish",
    "verification",
    "auditing",
    "releases",  # a sibling of run: spends budget or reads private rows, and trains nothing
    "card",
    "run",
    "telemetry",
    "statement",
    "ledger",
    "canaries",
    "model",
    "text",
    "recipe",
    "privacy",
    "records",
    "files",
    "progress",
    "errors",
)


@dataclass(frozen=True)
class Feature:
    """A part of dpllm that users could name, with the limit of its lines."""

    name: str
    users_get: str
    files: tuple[str, ...]  # under dpllm/, as fnmatch reads them; a file belongs to the first feature that names it
    lines: int  # at most


# A limit rises only with a line in docs/decisions.md that says what users got for it, and falls with what it limits.
FEATURES = (
    Feature(
        "labels and preferences",
        "Preference pairs train under DPO or IPO, with private labels where texts are public.",
        (
            "*/labels.py",
            "privacy/releases.py",
            "privacy/preference.py",
            "model/rewards.py",
        ),
        653,
    ),
    Feature(
        "describing data",
        "Counts, clusters and a classifier of private texts, in seconds, from the same ledger.",
        (
            "*/describe.py",
            "releases/embeddings.py",
            "statement/released.py",
            "verification/check_released.py",
        ),
        1_214,
    ),
    Feature(
        "synthetic texts and private inference",
        "Texts that may be shared, by a tuned model or by private inference, with their quality.",
        (
            "releases/inference.py",
            "releases/inference_budget.py",
            "releases/quality.py",
            "publish/synthesize.py",
            "cli/publish.py",
            "card/inference.py",
            "card/synthetic.py",
            "verification/check_rows.py",
            "privacy/bounded_range.py",
            "privacy/clipped_logits.py",
            "model/reading.py",
            "releases/asked.py",
            "text/prompts.py",
        ),
        3_037,
    ),
    Feature(
        "publishing models",
        "Texts from a model, one merged set of weights, a search for leaks, and a Hub upload that is checked first.",
        ("publish/*.py", "releases/draft.py", "releases/leaks.py"),
        927,
    ),
    Feature(
        "accounting",
        "The epsilon of any mechanism here by two accountants, and the noise for a wanted epsilon.",
        (
            "cli/epsilon.py",
            "privacy/accounting.py",
            "privacy/events.py",
            "privacy/parts.py",
            "privacy/privacy_loss.py",
            "privacy/renyi.py",
            "privacy/plan.py",
        ),
        1_964,
    ),
    Feature(
        "banded noise",
        "Noise that later noise takes back in part: the same epsilon with less of it in the weights.",
        ("privacy/banded.py",),
        282,
    ),
    Feature(
        "exact private steps",
        "Sampling, clipping, noise and a check of every model against brute force: the promise holds bit for bit.",
        ("privacy/*.py",),
        4_043,
    ),
    Feature(
        "models and memory",
        "Any causal language model of transformers with LoRA or frozen layers, quantised or sharded, in memory that is known.",
        ("model/*.py",),
        1_597,
    ),
    Feature(
        "rows and chats",
        "Rows of every common format, by unit, by chat template, as documents or pairs.",
        ("text/*.py",),
        2_190,
    ),
    Feature(
        "one's own loop",
        "The same guarantee in a training loop that the user writes.",
        ("run/own_loop.py",),
        310,
    ),
    Feature(
        "forecast and advice",
        "The memory of a run, and settings that are likely to hurt, before anything is spent.",
        ("run/footprint.py",),
        297,
    ),
    Feature(
        "cards and statements",
        "A model card whose every figure is derived from recorded facts.",
        ("statement/*.py", "card/*.py", "run/base_model.py"),
        2_845,
    ),
    Feature(
        "recipes and runs",
        "One recipe in, one folder out: planned, trained, resumed, recorded.",
        (
            "run/*.py",
            "recipe/*.py",
            "releases/__init__.py",
            "cli/plan.py",
            "cli/__init__.py",
            "__init__.py",
            "__main__.py",
            "progress.py",
        ),
        5_566,
    ),
    Feature(
        "telemetry",
        "Live figures for a terminal, Prometheus and trackers, without private ones.",
        ("telemetry/*.py",),
        593,
    ),
    Feature(
        "ledger",
        "One account for each dataset, in SQLite or PostgreSQL, that no run can overspend.",
        ("ledger/*.py", "cli/ledger.py"),
        2_761,
    ),
    Feature(
        "audits of other models",
        "The same audit of a model that was trained elsewhere.",
        ("auditing/outside.py",),
        397,
    ),
    Feature(
        "canaries and audits",
        "What a model memorised: canaries, extraction, membership, with bounds that hold, over one run or many.",
        ("auditing/*.py", "canaries/*.py", "cli/audit.py"),
        3_876,
    ),
    Feature(
        "verification",
        "Anyone recomputes a card from its files.",
        ("verification/*.py",),
        1_875,
    ),
    Feature(
        "comparison",
        "Runs side by side, and a sweep that is paid as one.",
        ("comparison/*.py", "cli/compare.py"),
        1_728,
    ),
    Feature(
        "errors and files",
        "Messages of three parts; files that are whole or absent.",
        ("errors.py", "files.py", "records.py"),
        556,
    ),
)
LIMITS = {
    "modules": 162,
    "longest module": 413,
    "longest function": 60,
    "most parameters": 8,
    "functions over 60 lines": 0,
    "functions over 8 parameters": 0,
    "golf": 0,
    "upward arrows": 0,
    "rooms in cycles": 0,
    "files in cycles": 0,
}
MOST_LINES = 36_711  # of all features together; 31,000 is aimed at, and never above 33,500 after that
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Module:
    """One file, parsed."""

    name: str  # such as privacy.plan; "" is dpllm itself
    path: str  # below dpllm/
    source: str
    lines: int
    tree: ast.Module


Modules = dict[str, Module]


def read() -> Modules:
    """Every module of dpllm/, by its name."""
    modules, package = {}, Path(__file__).resolve().parents[1] / "dpllm"
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        source = path.read_text("utf-8")
        inside = path.relative_to(package).as_posix()
        modules[name] = Module(name, inside, source, len(source.splitlines()), ast.parse(source))
    return modules


def room(name: str) -> str:
    """The room in which a module lies."""
    return {"": "front door", "__main__": "cli"}.get(name, name.partition(".")[0])


def imports(module: Module, modules: Modules) -> set[str]:
    """The modules that a module imports, also inside functions and under TYPE_CHECKING.

    ``import dpllm`` does not count: it is for ``__version__``.
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
    """Imports of a room above."""
    return {(a, b) for a, b in arrows(modules) if ROOMS.index(room(a)) > ROOMS.index(room(b))}


def drawing(modules: Modules) -> str:
    """A line for each room, with an arrow below the letter of each room that it imports; no arrow is left of the diagonal."""
    pairs = {(room(a), room(b)) for a, b in arrows(modules)}
    letters = "abcdefghijklmnopqrstuvwxyz"[: len(ROOMS)]
    lines = [f"{'':16}{' '.join(letters)}"]
    for letter, name in zip(letters, ROOMS, strict=True):
        row = " ".join("v" if (name, other) in pairs else "\\" if other == name else "." for other in ROOMS)
        lines.append(f"{letter} {name:14}{row}")
    return "\n".join(lines)


def cycles(arrows: set[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Groups of rooms, or of files, that import one another in a cycle."""
    names = sorted({name for arrow in arrows for name in arrow})
    reach: dict[str, set[str]] = {name: {b for a, b in arrows if a == name} for name in names}
    for middle in names:
        for start in names:
            if middle in reach[start]:
                reach[start] |= reach[middle]
    return sorted({tuple(b for b in names if b in reach[a] and a in reach[b]) for a in names if a in reach[a]})


def functions(modules: Modules) -> Iterator[tuple[str, int, int]]:
    """Name, lines and parameters of every function, without self, cls and the parameters of Triton kernels."""
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = [part for part in ast.walk(node.args) if isinstance(part, ast.arg)]
                parameters = sum(argument.arg not in {"self", "cls"} for argument in every)
                if any("triton.jit" in ast.unparse(one) for one in node.decorator_list):
                    parameters = 0
                yield f"{module.name}.{node.name}", (node.end_lineno or 0) - node.lineno + 1, parameters


def golf(module: Module) -> Iterator[str]:
    """Places where a text, list or tuple is multiplied by a condition instead of an ``if``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            text, times = node.left, node.right
            if isinstance(text, ast.Constant) and not isinstance(text.value, str):
                continue
            literal = isinstance(text, ast.Constant | ast.JoinedStr | ast.List | ast.Tuple)
            truth = isinstance(times, ast.Compare | ast.BoolOp | ast.UnaryOp)
            called = isinstance(times, ast.Call) and ast.unparse(times.func) == "bool"
            if literal and (truth or called):
                yield f"{module.name}:{node.lineno}"


def feature(module: Module) -> Feature | None:
    """The first feature that names the file of a module."""
    return next((one for one in FEATURES if any(fnmatch(module.path, pattern) for pattern in one.files)), None)


def code_lines(module: Module) -> int:
    """Number of lines that are neither blank nor a comment nor part of a docstring."""
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
    slow, wide = max(every, key=lambda row: row[1]), max(every, key=lambda row: row[2])
    rooms = cycles({(room(a), room(b)) for a, b in arrows(modules)})
    files = cycles({(name, other) for name, module in modules.items() for other in imports(module, modules)})
    golfed = [place for module in modules.values() for place in golf(module)]
    return {
        "lines": (sum(module.lines for module in modules.values()), ""),
        "code lines": (sum(map(code_lines, modules.values())), ""),
        **{
            part.name: (sum(module.lines for module in modules.values() if feature(module) == part), "")
            for part in FEATURES
        },
        "modules": (len(modules), ""),
        "longest module": (longest.lines, longest.name),
        "longest function": (slow[1], slow[0]),
        "most parameters": (wide[2], wide[0]),
        "functions over 60 lines": (sum(row[1] > 60 for row in every), ""),
        "functions over 8 parameters": (sum(row[2] > 8 for row in every), ""),
        "golf": (len(golfed), ", ".join(golfed)),
        "upward arrows": (len(upward(modules)), ""),
        "rooms in cycles": (sum(map(len, rooms)), "; ".join(map(", ".join, rooms))),
        "files in cycles": (sum(map(len, files)), "; ".join(map(", ".join, files))),
    }


if __name__ == "__main__":
    house, limits = read(), {**LIMITS, **{part.name: part.lines for part in FEATURES}, "lines": MOST_LINES}
    table = numbers(house)
    for what, (value, where) in table.items():
        limit = f"at most {limits[what]:,}" if what in limits else ""
        over = "EXCEEDED" if value > limits.get(what, value) else ""
        print(f"{what:38} {value:7,}  {limit:15} {over:9}{where}".rstrip())
    for a, b in sorted(upward(house), key=lambda pair: (ROOMS.index(room(pair[0])), ROOMS.index(room(pair[1])), pair)):
        print(f"{room(a):>12} -> {room(b):10} {a} imports {b}")
    print(f"\n{drawing(house)}")
    sys.exit(any(value > limits.get(what, value) for what, (value, _) in table.items()))
