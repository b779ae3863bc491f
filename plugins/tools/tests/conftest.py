"""A stand-in for the Hugging Face hub on loopback: repositories, commits, large files and downloads over its HTTP interface.

It answers what huggingface_hub asks in an upload and a download without the xet protocol, and records each request.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

TOKEN = "hf_planted_token_of_a_test"


@dataclass
class Repo:
    """A repository: the files of each commit, oldest first, by branch."""

    private: bool = False
    branches: dict[str, list[dict[str, bytes]]] = field(default_factory=lambda: {"main": [{}]})

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.branches[branch][-1]

    def sha(self, branch: str = "main") -> str:
        content = {name: hashlib.sha256(data).hexdigest() for name, data in self.files(branch).items()}
        return hashlib.sha1(json.dumps([len(self.branches[branch]), content]).encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """The server.

    ``fault(method, path)`` may return a status to answer with, ``"drop"`` to read a part of the request and close the
    connection, or None.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.fault: Callable[[str, str], int | str | None] = lambda method, path: None

    def new_repo(self) -> Repo:
        """Return an empty public repository."""
        return Repo()

    def asked(self, method: str, part: str) -> int:
        """Return the number of requests whose path contains ``part``."""
        return sum(method == each and part in path for each, path, _, _ in self.requests)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def answer(self, status: int, value: Any = None, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, repo: str = "") -> None:
        self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def handle_one(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        fault = self.server.fault(self.command, path)
        if fault == "drop":
            self.rfile.read(100)
            self.close_connection = True
            self.connection.close()
            return
        data = self.body()
        self.server.requests.append((self.command, path, dict(self.headers), data))
        if isinstance(fault, int):
            said = {401: "Invalid credentials in Authorization header", 403: "You may not write there"}
            self.answer(fault, {}, X_Error_Message=said.get(fault, "A fault of the test"))
        elif path.startswith("large/"):
            self.upload(path, data)
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {}, X_Error_Message="Invalid credentials in Authorization header")
        else:
            self.route(path, data)

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    def upload(self, path: str, data: bytes) -> None:
        oid = path.removeprefix("large/")
        good = hashlib.sha256(data).hexdigest() == oid
        self.server.large.update({oid: data} if good else {})
        self.answer(200 if good else 400, {})

    def route(self, path: str, data: bytes) -> None:
        """Answer a request whose token is right."""
        if path == "api/whoami-v2":
            self.answer(200, {"type": "user", "name": "me", "orgs": []})
        elif path == "api/repos/create":
            self.create(json.loads(data))
        elif path == "api/validate-yaml":
            self.validate(json.loads(data)["content"])
        elif path.startswith("api/models/"):
            user, name, *rest = path.removeprefix("api/models/").split("/")
            repo = self.server.repos.get(f"{user}/{name}")
            self.missing() if repo is None else self.of_repo(f"{user}/{name}", repo, rest, data)
        elif ".git/info/lfs/" in path:
            self.batch(path, json.loads(data))
        elif "/resolve/" in path:
            self.resolve(path)
        else:
            self.answer(404, {})

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != "me":
            self.answer(403, {}, X_Error_Message="You don't have the rights to create a model there")
            return
        known = name in self.server.repos
        self.server.repos.setdefault(name, Repo(asked.get("visibility") == "private"))
        self.answer(409 if known else 200, {"url": f"{self.server.url}/{name}"})

    def validate(self, content: str) -> None:
        """Refuse what the hub refuses: names of models and data sets that are none."""
        data = ModelCard(content).data
        try:
            for name in [data.base_model, *(data.datasets or [])]:
                validate_repo_id(name) if name else None
        except ValueError as error:
            self.answer(400, {"errors": [{"message": str(error)}], "warnings": []})
            return
        self.answer(200, {"errors": [], "warnings": []})

    def of_repo(self, name: str, repo: Repo, rest: list[str], data: bytes) -> None:
        branch = rest[1] if len(rest) > 1 else "main"
        if branch in [repo.sha(each) for each in repo.branches]:
            branch = next(each for each in repo.branches if repo.sha(each) == branch)
        if rest[:1] == ["branch"]:
            repo.branches.setdefault(branch, [dict(repo.files())])
            self.answer(200, {})
        elif rest[:1] == ["tree"]:
            self.answer(200, [self.entry(*item) for item in repo.files(branch).items()])
        elif rest[:1] == ["preupload"]:
            asked = json.loads(data)["files"]
            modes = [
                {"path": f["path"], "uploadMode": mode_of(f["path"]), "shouldIgnore": False} for f in asked
            ]
            self.answer(200, {"files": modes})
        elif rest[:1] == ["commit"]:
            self.commit(name, repo, branch, data)
        else:
            siblings = [{"rfilename": file} for file in repo.files(branch)]
            info = {"id": name, "private": repo.private, "sha": repo.sha(branch), "siblings": siblings}
            self.answer(200, info)

    @staticmethod
    def entry(path: str, data: bytes) -> dict[str, Any]:
        oid = hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest()
        found: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": oid}
        if mode_of(path) == "lfs":
            found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return found

    def commit(self, name: str, repo: Repo, branch: str, data: bytes) -> None:
        files = dict(repo.files(branch))
        for line in map(json.loads, data.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repo.branches[branch].append(files)
        sha = repo.sha(branch)
        self.answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})

    def batch(self, path: str, asked: dict[str, Any]) -> None:
        if path.endswith("verify"):
            self.answer(200 if asked["oid"] in self.server.large else 404, {})
            return
        verify = f"{self.server.url}/{path.removesuffix('objects/batch')}verify"
        objects = [
            {**entry}
            if entry["oid"] in self.server.large
            else {
                **entry,
                "actions": {
                    "upload": {"href": f"{self.server.url}/large/{entry['oid']}"},
                    "verify": {"href": verify},
                },
            }
            for entry in asked["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def resolve(self, path: str) -> None:
        name, _, rest = path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        repo = self.server.repos[name]
        branch = next((each for each in repo.branches if revision in (each, repo.sha(each))), None)
        if branch is None or file not in repo.files(branch):
            self.answer(404, {}, X_Error_Code="EntryNotFound")
            return
        data = repo.files(branch)[file]
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        self.answer(200, data, ETag=etag, X_Repo_Commit=repo.sha(branch))


def mode_of(path: str) -> str:
    """Return how the hub stores a file."""
    return "lfs" if path.endswith((".safetensors", ".png")) else "regular"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Return the stand-in; huggingface_hub of this process uses it, with a token, without xet and without waits."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    yield server
    with contextlib.suppress(OSError):
        server.shutdown()
        server.server_close()
