"""A Hugging Face hub on this machine: it answers what `huggingface_hub` asks to download models,
and takes those that it uploads."""

import base64
import contextlib
import hashlib
import importlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

_ASKED = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<at>[^/]+))?")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<at>[^/]+)/(?P<file>.+)")
_UPLOAD = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/(?P<what>preupload|commit)/main")
_SETTINGS = (
    "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN",
    "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN",
)  # fmt: skip


@dataclass
class Hub:
    """What is published, by name and revision, and the files that were asked for.

    A commit is a revision too. Every name in `gated` is refused to everyone. Uploads must have
    `token`; every other request is answered without one. `refusals` has the status with which parts
    of an upload are refused: "create", "preupload" or "commit".
    """

    commits: dict[tuple[str, str], str] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    downloaded: list[str] = field(default_factory=list)
    private: set[str] = field(default_factory=set)
    token: str = "hf_right"
    refusals: dict[str, int] = field(default_factory=dict)

    def clear(self) -> None:
        for part in (self.commits, self.files, self.gated, self.downloaded, self.private,
                     self.refusals):  # fmt: skip
            part.clear()

    def published(self, name: str) -> dict[str, bytes]:
        """The files of the newest commit."""
        return self.files[self.commits[name, "main"]]

    def publish(self, name: str, directory: Path, revision: str = "main") -> str:
        """Publishes the files of a directory; returns the commit."""
        content = {
            str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        return self.commit(name, content, revision)

    def commit(self, name: str, content: dict[str, bytes], revision: str = "main") -> str:
        commit = hashlib.sha1(repr((name, content)).encode()).hexdigest()
        self.files[commit] = content
        self.commits[name, revision] = self.commits[name, commit] = commit
        return commit


@contextlib.contextmanager
def serve() -> Iterator[tuple[Hub, str]]:
    """An empty hub and its address."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            _answer(self, hub)

        def do_GET(self):
            _answer(self, hub)

        def do_POST(self):
            _take(self, hub)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """`huggingface_hub` as in a new process that has, of its variables, these alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _SETTINGS:
            patch.delenv(name, raising=False)
        for name, value in {"HF_HUB_DISABLE_TELEMETRY": "1", **variables}.items():
            patch.setenv(name, str(value))
        importlib.reload(constants)
        try:
            yield
        finally:
            patch.undo()
            importlib.reload(constants)


def _answer(request: BaseHTTPRequestHandler, hub: Hub) -> None:
    path = urlsplit(request.path).path
    asked = _ASKED.fullmatch(path) or _FILE.fullmatch(path)
    name, at = (asked["name"], unquote(asked["at"] or "main")) if asked else ("", "")
    if name in hub.gated:
        return _send(request, 403, b"", {"X-Error-Code": "GatedRepo"})
    if not any(name == published for published, _ in hub.commits):
        return _send(request, 401, b"", {"X-Error-Code": "RepoNotFound"})
    commit = hub.commits.get((name, at))
    if commit is None:
        return _send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
    files = hub.files[commit]
    if "file" in asked.groupdict():
        hub.downloaded += [asked["file"]] * (request.command == "GET")
        content = files[unquote(asked["file"])]
        tag = f'"{hashlib.sha1(content).hexdigest()}"'
        return _send(request, 200, content, {"X-Repo-Commit": commit, "ETag": tag})
    tree = [
        {"type": "file", "path": file, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
        for file, text in files.items()
    ]
    siblings = [{"rfilename": file} for file in files]
    info = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": [],
            "private": name in hub.private}  # fmt: skip
    _send(request, 200, json.dumps(tree if asked["what"] == "tree" else info).encode(), {})


def _take(request: BaseHTTPRequestHandler, hub: Hub) -> None:
    """Answers a part of an upload; all files come in the commit, none by way of LFS."""
    body = request.rfile.read(int(request.headers["Content-Length"]))
    path = urlsplit(request.path).path
    if path == "/api/validate-yaml":
        return _send_json(request, {"errors": [], "warnings": []})
    asked = _UPLOAD.fullmatch(path)
    what = asked["what"] if asked else "create"
    is_known = request.headers["Authorization"] == f"Bearer {hub.token}"
    if status := hub.refusals.get(what, None if is_known else 401):
        return _send(request, status, b'{"error": "No."}', {})
    address = f"http://{request.headers['Host']}"
    if what == "create":
        tree = json.loads(body)
        name = f"{tree['organization']}/{tree['name']}"
        if (name, "main") in hub.commits:
            page = json.dumps({"url": f"{address}/{name}"}).encode()
            return _send(request, 409, page, {})
        hub.commit(name, {".gitattributes": b""})
        hub.private |= {name} if tree.get("visibility") == "private" else set()
        return _send_json(request, {"url": f"{address}/{name}"})
    name = asked["name"]
    if what == "preupload":
        files = json.loads(body)["files"]
        regular = {"uploadMode": "regular", "shouldIgnore": False}
        return _send_json(request, {"files": [{"path": f["path"], **regular} for f in files]})
    content = dict(hub.published(name))
    for line in map(json.loads, body.splitlines()):
        if line["key"] == "file":
            content[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        elif line["key"] == "deletedFile":
            del content[line["value"]["path"]]
    commit = hub.commit(name, content)
    page = f"{address}/{name}/commit/{commit}"
    return _send_json(request, {"success": True, "commitUrl": page, "commitOid": commit})


def _send_json(request: BaseHTTPRequestHandler, tree: dict) -> None:
    _send(request, 200, json.dumps(tree).encode(), {})


def _send(
    request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str]
) -> None:
    request.send_response(status)
    for key, value in {**headers, "Content-Length": str(len(content))}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)
