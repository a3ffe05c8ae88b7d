"""A Hub on loopback: what `huggingface_hub`'s client needs to create, push, list and download model repositories.

    with LoopbackHub() as hub:
        environment = hub.environment(home)   # for a process of its own: the client reads it when it is imported

`write-token` belongs to "user", who may write to "user/*"; `read-token` is known and may write nothing. All else
is refused as the real Hub does it: with its statuses, `X-Error-Code` and `X-Error-Message`. Repositories live in
memory: a commit maps paths to blobs, a branch names a commit.
"""

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKENS = {"write-token": "user", "read-token": "reader"}
WRITERS = {"user"}
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".png", ".mp4")


@dataclass(frozen=True)
class Blob:
    content: bytes
    lfs: bool

    @property
    def etag(self) -> str:
        """Git's name of the contents, or that of LFS."""
        of_git = b"" if self.lfs else b"blob %d\0" % len(self.content)
        return (hashlib.sha256 if self.lfs else hashlib.sha1)(of_git + self.content).hexdigest()

    def describe(self, path: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(self.content), "oid": self.etag}
        if self.lfs:
            entry["lfs"] = {"oid": self.etag, "size": len(self.content), "pointerSize": 134}
        return entry


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        names = json.dumps([message, branch, len(self.commits), {path: blob.etag for path, blob in files.items()}])
        sha = hashlib.sha1(names.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def resolve(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None


class Refusal(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, body: dict | None = None):
        super().__init__(message)
        self.status, self.code, self.body = status, code, body


class LoopbackHub:
    """The server and its state. `uploads` lists the objects received; `on_upload` is called before each is answered."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.requests: list[str] = []
        self.on_upload: Callable[[], None] = lambda: None
        hub = self

        class Handler(RequestHandler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: Path, token: str | None = "write-token") -> dict[str, str]:
        """Environment of a process that knows this Hub and no other, with caches of its own in `home`."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
        environment |= {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",  # its storage is another server; LFS is what every Hub speaks
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
        }
        return environment | ({"HF_TOKEN": token} if token is not None else {})

    def create(self, repo_id: str, files: dict[str, bytes] | None = None, private: bool = False) -> Repository:
        """Creates a repository with a first commit, as the real Hub does."""
        repository = self.repositories[repo_id] = Repository(private)
        contents = {".gitattributes": b"*.safetensors filter=lfs\n"} | (files or {})
        repository.commit("main", {path: Blob(data, is_lfs(path)) for path, data in contents.items()}, "initial commit")
        return repository

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Path to contents of a revision's files."""
        repository = self.repositories[repo_id]
        sha = repository.resolve(revision)
        assert sha is not None, revision
        return {path: blob.content for path, blob in repository.commits[sha].items()}


def is_lfs(path: str) -> bool:
    return path.endswith(LFS_SUFFIXES)


class RequestHandler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    ROUTES = (
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<branch>[^/]+)", "branch"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/refs", "refs"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(/(?P<folder>.*))?", "tree"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?", "info"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs-objects/(?P<oid>[0-9a-f]{64})", "lfs_upload"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def log_message(self, *args: object) -> None:
        """The tests' output stays clean; `hub.requests` has every request."""

    def answer(self) -> None:
        path, method = urlsplit(self.path).path, self.command.replace("HEAD", "GET")
        self.hub.requests.append(f"{self.command} {path}")
        self.data = self.read_body()
        try:
            for wanted, pattern, name in self.ROUTES:
                if wanted == method and (found := re.fullmatch(pattern, path)):
                    groups = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
                    getattr(self, name)(**groups)
                    return
            raise Refusal(404, f"no such endpoint: {method} {path}")
        except Refusal as refusal:
            headers = {"X-Error-Message": str(refusal)} | ({"X-Error-Code": refusal.code} if refusal.code else {})
            self.send(refusal.status, refusal.body or {"error": str(refusal)}, headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size + 2)[:-2])
        self.rfile.readline()
        return b"".join(parts)

    def send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        given = {"Content-Type": "application/json", "Content-Length": str(len(content))} | (headers or {})
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # Who may do what

    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if token and token not in TOKENS:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return TOKENS.get(token)

    def check_may_write(self, namespace: str) -> None:
        user = self.user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        if user not in WRITERS or user != namespace:
            raise Refusal(403, f'You don\'t have the rights to write under the namespace "{namespace}".')

    def repository(self, repo: str) -> Repository:
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and self.user() != repo.split("/")[0]):
            raise Refusal(401 if self.user() is None else 404, "Repository not found", "RepoNotFound")
        return found

    def files(self, repo: str, revision: str) -> tuple[str, dict[str, Blob]]:
        repository = self.repository(repo)
        sha = repository.resolve(revision)
        if sha is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, repository.commits[sha]

    # Endpoints

    def create(self) -> None:
        wanted = json.loads(self.data)
        namespace = wanted.get("organization") or self.user() or ""
        repo = f"{namespace}/{wanted['name']}"
        self.check_may_write(namespace)
        if repo in self.hub.repositories:
            raise Refusal(409, "You already created this model repo", body={"url": f"{self.hub.url}/{repo}"})
        self.hub.create(repo, private=wanted.get("visibility") == "private" or bool(wanted.get("private")))
        self.send(200, {"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo})

    def validate_yaml(self) -> None:
        self.send(200, {"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        self.check_may_write(repo.split("/")[0])
        _, present = self.files(repo, revision)
        answers = []
        for file in json.loads(self.data)["files"]:
            blob = present.get(file["path"])
            mode = "lfs" if is_lfs(file["path"]) else "regular"
            oid = None if blob is None else blob.etag
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send(200, {"files": answers})

    def lfs_batch(self, repo: str) -> None:
        self.check_may_write(repo.split("/")[0])
        objects = []
        for wanted in json.loads(self.data)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs-objects/{wanted['oid']}", "header": {}}}
            objects.append(answer)
        self.send(200, {"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid: str) -> None:
        if hashlib.sha256(self.data).hexdigest() != oid:  # the client was killed
            raise Refusal(400, "contents and oid do not match")
        self.hub.objects[oid] = self.data
        self.hub.uploads.append(oid)
        self.hub.on_upload()
        self.send(200, b"")

    def commit(self, repo: str, revision: str) -> None:
        self.check_may_write(repo.split("/")[0])
        _, present = self.files(repo, revision)
        files, message = dict(present), ""
        for line in self.data.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif entry["key"] == "lfsFile":
                files[value["path"]] = Blob(self.hub.objects[value["oid"]], lfs=True)
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.hub.repositories[repo].commit(revision, files, message)
        self.send(200, {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})

    def branch(self, repo: str, branch: str) -> None:
        self.check_may_write(repo.split("/")[0])
        repository = self.repository(repo)
        if branch in repository.branches:
            raise Refusal(409, f"Reference already exists: {branch}")
        repository.branches[branch] = self.files(repo, json.loads(self.data or b"{}").get("startingPoint", "main"))[0]
        self.send(200, {})

    def refs(self, repo: str) -> None:
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
            for name, sha in self.repository(repo).branches.items()
        ]
        self.send(200, {"branches": branches, "converts": [], "tags": []})

    def tree(self, repo: str, revision: str, folder: str = "") -> None:
        _, files = self.files(repo, revision)
        prefix = f"{folder}/" if folder else ""
        recursive = "recursive=true" in self.path.lower()
        inside = {path: blob for path, blob in files.items() if path.startswith(prefix)}
        self.send(
            200, [blob.describe(path) for path, blob in inside.items() if recursive or "/" not in path[len(prefix) :]]
        )

    def info(self, repo: str, revision: str = "main") -> None:
        sha, files = self.files(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        private = self.repository(repo).private
        self.send(200, {"_id": "0", "id": repo, "sha": sha, "private": private, "tags": [], "siblings": siblings})

    def resolve(self, repo: str, revision: str, path: str) -> None:
        sha, files = self.files(repo, revision)
        headers = {"X-Repo-Commit": sha}
        blob = files.get(path)
        if blob is None:
            error = {"error": "Entry not found"}
            self.send(404, error, headers | {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        headers |= {"ETag": f'"{blob.etag}"', "Content-Type": "application/octet-stream"}
        if blob.lfs:
            headers |= {"X-Linked-Etag": f'"{blob.etag}"', "X-Linked-Size": str(len(blob.content))}
        self.send(200, blob.content, headers)
