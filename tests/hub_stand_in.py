"""A stand-in for the Hugging Face Hub on loopback: the few endpoints that huggingface_hub uses to push and to download."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS = (".safetensors", ".png", ".parquet")


@dataclass
class Repository:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})


@dataclass
class Hub:
    """What arrived, and how to answer; the name of a dataset begins with ``datasets/``."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    refuse: int | None = None
    endpoint: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def _asked(self) -> str:
        """The path, in which a dataset is a model of its name."""
        path = self.path.partition("?")[0]
        self.hub.asked.append(f"{self.command} {path}")
        return path.replace("/api/datasets/", "/api/models/datasets/")

    def do_GET(self) -> None:
        path = self._asked()
        if path.startswith("/api/models/"):
            name = path.removeprefix("/api/models/").split("/revision/")[0].split("/tree/")[0]
            result = self.hub.repositories.get(name)
            if result is None or self.hub.refuse:
                return self._answer(
                    {"error": "no such repository"}, self.hub.refuse or 404, {"X-Error-Code": "RepoNotFound"}
                )
            if "/tree/" in path:
                tree = [{"type": "file", "path": p, "size": len(c), "oid": _oid(c)} for p, c in result.files.items()]
                return self._answer(tree)
            siblings = [{"rfilename": name} for name in sorted(result.files)]
            return self._answer(
                {"id": name, "private": result.private, "sha": COMMIT, "siblings": siblings, "tags": []}
            )
        name, _, rest = path.lstrip("/").partition("/resolve/")
        file = rest.partition("/")[2]
        content = self.hub.repositories[name].files.get(file) if name in self.hub.repositories else None
        if content is None:
            return self._answer({"error": "no such file"}, 404, {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(content)}"', "Accept-Ranges": "none"}
        self._send(content, 200, "application/octet-stream", headers)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.hub.asked.append(f"PUT {self.path}")
        content = self._body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.objects[oid] = content
        self._answer({})

    def do_POST(self) -> None:
        path = self._asked()
        body = self._body()
        if self.hub.refuse:
            return self._answer({"error": "no"}, self.hub.refuse)
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            name = f"datasets/{name}" if asked.get("type") == "dataset" else name
            known = name in self.hub.repositories
            private = bool(asked.get("private") or asked.get("visibility") == "private")
            self.hub.repositories.setdefault(name, Repository(private))
            return self._answer(
                {"url": f"{self.hub.endpoint}/{name}", "id": name.removeprefix("datasets/")}, 409 if known else 200
            )
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": item["oid"], "size": item["size"],
                 "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{item['oid']}", "header": {}}}}
                for item in json.loads(body)["objects"]
            ]  # fmt: skip
            return self._answer({"transfer": "basic", "objects": objects})
        name, _, what = path.removeprefix("/api/models/").partition("/preupload/")
        if what:
            files = [
                {
                    "path": item["path"],
                    "uploadMode": "lfs" if item["path"].endswith(LFS) else "regular",
                    "shouldIgnore": False,
                }
                for item in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        name = name.partition("/commit/")[0]
        files_of = self.hub.repositories[name].files
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                assert value["encoding"] == "base64"
                files_of[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files_of[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files_of[value["path"]]
        url = f"{self.hub.endpoint}/{name}/commit/{COMMIT}"
        return self._answer({"commitUrl": url, "commitOid": COMMIT, "hookOutput": ""})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, "application/json", headers or {})

    def _send(self, content: bytes, status: int, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def running(patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub without repositories, to which huggingface_hub of this process speaks."""
    from huggingface_hub import constants

    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    patch.setenv("HF_ENDPOINT", hub.endpoint)
    patch.setenv("HF_TOKEN", "hf_test")
    patch.setenv("NO_PROXY", "127.0.0.1")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
