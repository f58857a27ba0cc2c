"""What is written down works: commands run, recipes load, links lead somewhere, no machine's path is left behind.

How blocks of commands are written: tests/docs_pages.py. Where they run: tests/docs_workspace.py.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import docs_pages
import docs_workspace
import pytest
from docs_pages import ROOT, Block, Command
from remembered import Once

from dpllm.cli import _parser, _split
from dpllm.recipe.config import RunConfig, load_config
from dpllm.recipe.section import describe

sys.path.insert(0, str(ROOT / "scripts"))
reference: Any = importlib.import_module("reference")
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "accelerate")
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "model_cards/**/*.md", "dpllm/text/builtin/**/*.md")
    for path in ROOT.glob(pattern)
)
# The pages whose commands are executed.
GUIDES = [page for page in PAGES if page.parent == ROOT or ROOT / "docs" in page.parents]
GUIDES = [page for page in GUIDES if page.name != "CHANGELOG.md"]
# What a page may type without saying that it is not run.
SHELL = {"dpllm", "accelerate", "cat", "export", "head", "ls", "mkdocs"}
# Assembled, so that this file does not contain what it looks for.
MACHINES = re.compile(
    rb"(?<![\w.])/(?:" + b"|".join([b"wo" + b"rk", b"ro" + b"ot", b"home/" + b"(?!alice)[a-z]+"]) + rb")/\w"
)


def tracked() -> list[Path]:
    try:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / os.fsdecode(name) for name in names.split(b"\0") if name]


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", RECIPES, ids=label)
def test_a_recipe_loads_and_says_how_to_launch_it(path: Path) -> None:
    load_config(path)
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert re.fullmatch(rf"# accelerate launch .*recipes/train\.py {re.escape(label(path))}\b.*", first), first
    assert f"dpllm train {label(path)}" in first


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_links_lead_somewhere(path: Path) -> None:
    for target in docs_pages.links(path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        assert page.exists(), target
        if anchor and "." not in anchor:  # mkdocs checks those of the reference, which docstrings make
            assert anchor in docs_pages.anchors(page.read_text(encoding="utf-8")), target


def test_the_gallery_names_every_recipe_and_every_recipe_that_is_named_exists() -> None:
    gallery = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert [label(path) for path in RECIPES if label(path) not in gallery] == []
    for page in GUIDES:
        text = docs_pages.shown(page.read_text(encoding="utf-8"))
        named = set(re.findall(r"(?<![\w/])(?:recipes|scripts|docs|tests|benchmarks)/[\w/.-]+\w", text))
        assert [name for name in sorted(named) if not (ROOT / name).exists()] == [], page


@pytest.mark.parametrize(("start", "most"), [("`privacy.epsilon`", 12), ("a data row", 40)])
def test_each_file_on_the_way_to_the_card_is_there_and_named_once(start: str, most: int) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split(f"\n## From {start} to the card\n")[1].split("\n## ")[0]
    files = re.findall(r"`([\w/]+\.(?:py|md\.j2))`", section)
    assert 10 < len(files) <= most
    assert [name for name in files if not (ROOT / "dpllm" / name).is_file() or files.count(name) > 1] == []


def test_the_documentation_stays_short() -> None:
    """As ``find docs -name '*.md' | xargs wc -w`` counts: a fact has one home, elsewhere is a link."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) <= 32
    assert sum(len(text.split()) for text in pages) <= 34_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1_300


def test_every_command_has_a_line_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    ([\w-]+)  ", _parser().format_help(), flags=re.MULTILINE)
    assert len(commands) > 10
    assert [name for name in commands if not re.search(rf"`dpllm {name}\b", text)] == []


def test_tables_are_what_the_code_says() -> None:
    """Fields, keys, exit codes and metrics have one home, their docstrings; each table stands on one page."""
    shown = [(page, page.read_text(encoding="utf-8")) for page in reference.pages()]
    stale = [label(page) for page, text in shown if reference.written(text) != text]
    assert stale == [], "run: python scripts/reference.py"
    tables = [name for _, text in shown for _, name, _ in reference.MARKED.findall(text)]
    assert sorted(tables) == sorted(reference.TABLES)


def test_every_key_metric_and_exit_code_has_its_meaning() -> None:
    for rows in (reference.recipe_keys(), reference.metric_families(), reference.exit_codes()):
        assert [row[0] for row in rows if not row[-1].endswith(".")] == []
    keys = [name for name, *_ in reference.recipe_keys()]
    described = describe(RunConfig)
    assert set(keys) <= set(re.findall(r"^  --(\S+)", described, flags=re.MULTILINE))
    assert {"  --privacy.epsilon (default 8.0)", "  --data.train (required)"} <= set(described.splitlines())
    assert {"train.learning_rate", "audit.canaries.groups", "adapter.last_blocks", "output_dir"} <= set(keys)


@pytest.fixture(scope="session")
def prepared(once: Once, full: bool) -> Path:
    """What every page finds."""
    shown: dict[str, str] = {}
    for page in GUIDES:
        recipes = docs_pages.recipes(page.read_text(encoding="utf-8"))
        assert not recipes.keys() & shown.keys(), f"{page} shows a recipe under a name that another page uses"
        shown |= recipes
    return once("docs", lambda folder: docs_workspace.prepare(folder, shown, every_page=full))


def blocks_of(page: Path) -> list[Block]:
    parsed = docs_pages.blocks(page.read_text(encoding="utf-8"))
    return [block for block in parsed if block.language in docs_pages.EXECUTED]


def bash_of(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "bash"]


def runs(block: Block, full: bool) -> bool:
    return block.marker is None or (full and block.marker == "run under --full")


@pytest.mark.parametrize("page", GUIDES, ids=label)
def test_every_command_is_executed_or_says_why_not(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert docs_pages.typed_outside(text) == [], "type commands in a block of bash"
    commands = [command for block in bash_of(page) if block.marker is None for command in block.commands()]
    strange = [f"line {command.line}: {command.text}" for command in commands if command.words[0] not in SHELL]
    assert strange == [], "say <!-- not run: why --> before the block"


@pytest.mark.parametrize("page", GUIDES, ids=label)
def test_commands_take_the_arguments_that_a_page_types(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are not run too."""
    for command in (command for block in bash_of(page) for command in block.commands()):
        if command.words[0] == "dpllm" and not {"--help", "--keys"} & set(command.words):
            assert accepted(command), f"{label(page)} line {command.line}: {command.text}"


@pytest.mark.parametrize("page", GUIDES, ids=label)
def test_commands_in_the_text_have_names_options_and_keys_that_exist(page: Path) -> None:
    """They leave out what is required, so they are not parsed: each option is one of the command, or a key of a recipe."""
    keys = {f"--{name}" for name, *_ in reference.recipe_keys()}
    typed = docs_pages.typed_inside(page.read_text(encoding="utf-8"))
    typed += [command.text for block in bash_of(page) for command in block.commands()]
    for text in typed:
        words = text.replace("|", " ").split()
        if words[0] == "dpllm":
            accepted_names = options(words[1:3]) | keys
            # Such as --data.csv: a section that is written out as a map.
            accepted_names |= {key[:end] for key in keys for end, letter in enumerate(key) if letter == "."}
            assert set(re.findall(r"(?<!\S)--[a-z][\w.-]*", text)) <= accepted_names, text


def options(words: list[str]) -> set[str]:
    """Those of a command, or of an action of ``dpllm ledger``; it has to exist."""
    parser = _parser()
    for word in words:
        actions = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not actions:
            break
        if not re.fullmatch(r"[a-z][a-z-]*", word):  # such as ACTION
            break
        assert word in actions[0], f"dpllm {' '.join(words)}: there is no {word}"
        parser = actions[0][word]
    return {option for action in parser._actions for option in action.option_strings}


def accepted(command: Command) -> bool:
    arguments, _ = _split(command.words[1:])
    try:
        return not _parser().parse_known_args(arguments)[1]
    except SystemExit:
        return False


# The first page of all in every run of the tests, and the others under --full.
WITH_COMMANDS = [
    pytest.param(page, marks=[] if page.name == "README.md" else pytest.mark.full) for page in GUIDES if blocks_of(page)
]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=label)
def test_the_commands_of_a_page_work(page: Path, prepared: Path, tmp_path: Path, full: bool) -> None:
    blocks = [block for block in blocks_of(page) if runs(block, full)]
    if not blocks:
        pytest.skip("every block of this page says why it is not run, or runs under --full")
    with docs_workspace.opened(prepared, tmp_path / "here") as workspace:
        for block in blocks:
            if block.language == "python":
                workspace.python(block)
            for command in block.commands() if block.language == "bash" else ():
                code, output = workspace.run(command)
                assert code == command.exit_code, f"{label(page)} line {command.line}: {command.text}\n{output}"


@pytest.mark.parametrize("page", [page for page in GUIDES if docs_pages.recipes(page.read_text("utf-8"))], ids=label)
def test_recipes_that_a_page_shows_load(page: Path, tmp_path: Path) -> None:
    for name, text in docs_pages.recipes(page.read_text(encoding="utf-8")).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        load_config(tmp_path / name)


def build_site(folder: Path) -> None:
    # Not --quiet: it drops the warnings before --strict counts them.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    output = done.stdout + done.stderr
    assert (done.returncode, "WARNING" in output) == (0, False), output


@pytest.fixture(scope="session")
def site(once: Once) -> Path:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    return once("site", build_site)


def test_the_site_builds_without_a_warning(site: Path) -> None:
    pages = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    written = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert written <= pages
    assert (site / "search" / "search_index.json").is_file()


def test_docstrings_reach_the_reference(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text(encoding="utf-8")
    assert "dpllm.privacy.plan.Plan.of" in text
    assert 'class="guarantee"' in text


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """Somebody without a connection, or who must not make one, sees the same pages."""
    loads = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*\b(?:href|src)=[\"']?((?:https?:)?//[^\"' >]+)")
    inside = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)")
    targets_of = {}
    for path in (path for kind in ("html", "css", "svg") for path in site.rglob(f"*.{kind}")):
        text = path.read_text(encoding="utf-8")
        targets_of[path.name] = [*loads.findall(text), *inside.findall(text)]
        assert 'class="mermaid"' not in text, "a diagram of mermaid is drawn by a script from elsewhere"
    assert {name: targets for name, targets in targets_of.items() if targets} == {}


def test_no_file_names_a_place_on_a_build_machine() -> None:
    contents = {label(path): path.read_bytes() for path in tracked() if path.is_file()}
    texts = {name: content for name, content in contents.items() if b"\0" not in content[:8000]}
    assert {name: match[0] for name, content in texts.items() if (match := MACHINES.search(content))} == {}
