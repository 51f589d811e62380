"""A small Hub on loopback, for the real huggingface_hub client: commits, branches, LFS, tokens, and faults on demand.

It implements the endpoints that the client uses for models and Spaces, and to read datasets, and answers all others
with 404, recorded in `HubServer.unknown`. Everything is kept in memory.
"""

import base64
import contextlib
import hashlib
import json
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".png")
REGULAR_BYTES = 10_000_000
# Every repository of the Hub begins with a commit of this file.
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


@dataclass(frozen=True)
class Access:
    """The owner and the permission of a token."""

    user: str
    role: Literal["read", "write"]


@dataclass
class Fault:
    """
    A failure of the requests of `method` whose path contains `pattern`.

    Args:
        times (`int`, *optional*, defaults to 1): Number of requests that fail; `None` means all.
        delay (`float`, *optional*, defaults to 0): Seconds to wait before anything else.
        cut (`int`, *optional*): Drop the connection after this many bytes of the request's body.
        lose_answer (`bool`, *optional*, defaults to `False`): Process the request, then drop the connection.
        cut_answer (`int`, *optional*): Process the request, then drop the connection after this many bytes of the
            response's body.
        status (`int`, *optional*): Respond with this status, without processing the request.
        message (`str`, *optional*): The error in that response: as JSON, or as it is if `headers` have a content type.
        headers (`dict[str, str]`, *optional*): Further headers of that response.
    """

    method: str
    pattern: str
    times: int | None = 1
    delay: float = 0
    cut: int | None = None
    lose_answer: bool = False
    cut_answer: int | None = None
    status: int | None = None
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Blob:
    """The content of a file. For a file in LFS, git stores only a pointer."""

    content: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def git_content(self) -> bytes:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        return pointer.encode() if self.lfs else self.content

    @cached_property
    def oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.git_content) + self.git_content).hexdigest()

    @property
    def etag(self) -> str:
        """The hash that the client compares with its own file."""
        return self.sha256 if self.lfs else self.oid

    def describe(self, path: str) -> dict[str, Any]:
        lfs = {"oid": self.sha256, "size": len(self.content), "pointerSize": len(self.git_content)}
        entry = {"type": "file", "path": path, "oid": self.oid, "size": len(self.content)}
        return entry | ({"lfs": lfs} if self.lfs else {})


@dataclass(frozen=True)
class Commit:
    """A complete state of a repository, with its parent commit."""

    title: str
    message: str
    parent: str | None
    files: dict[str, Blob]
    sha: str = field(default_factory=lambda: secrets.token_hex(20))

    def entries(self) -> list[dict[str, Any]]:
        """Lists all files and folders."""
        folders = {str(parent) for path in self.files for parent in Path(path).parents} - {"."}
        entries = [{"type": "directory", "path": path, "oid": self.sha, "size": 0} for path in folders]
        entries += [blob.describe(path) for path, blob in self.files.items()]
        return sorted(entries, key=lambda entry: entry["path"])


class Repository:
    """Commits, branches, and all uploaded LFS objects, committed or not; the kind of a Space."""

    def __init__(self, private: bool) -> None:
        self.private = private
        self.gated: str | bool = False
        self.sdk: str | None = None
        self.commits: dict[str, Commit] = {}
        self.branches: dict[str, str] = {}
        self.announced: dict[str, int] = {}
        self.objects: dict[str, bytes] = {}
        self.add("main", Commit("initial commit", "", None, {".gitattributes": Blob(GITATTRIBUTES, lfs=False)}))

    def at(self, revision: str) -> Commit:
        """Returns the commit of a branch or a full sha."""
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[sha]

    def add(self, branch: str, commit: Commit) -> str:
        self.commits[commit.sha] = commit
        self.branches[branch] = commit.sha
        return commit.sha

    def operate(self, files: dict[str, Blob], key: str, value: dict[str, Any]) -> None:
        """Applies one operation of a client's commit to `files`."""
        path = value["path"]
        if key == "deletedFile":
            if path not in files:
                raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            del files[path]
            return
        content = self.objects.get(value["oid"]) if key == "lfsFile" else base64.b64decode(value["content"])
        if content is None or (key == "lfsFile") != (upload_mode(path, len(content)) == "lfs"):
            raise Refusal(400, f"Your push was rejected: this file was not uploaded, or in the wrong way: {path}")
        files[path] = Blob(content, lfs=key == "lfsFile")


@dataclass
class Request:
    """One request with its complete body."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Any
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """A response. A body other than bytes is sent as JSON."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Refusal(Exception):  # noqa: N818 (an answer, not an error of the server)
    """An error response. The client chooses the class of its error by `code`."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        named = {name.replace("_", "-"): text for name, text in headers.items()} | {"X-Error-Message": message}
        self.reply = Reply({"error": message}, status, named | ({"X-Error-Code": code} if code else {}))


def upload_mode(path: str, size: int) -> Literal["lfs", "regular"]:
    """Returns how a file must be uploaded. The client never sends an empty file to LFS."""
    return "lfs" if size > REGULAR_BYTES or (size and path.endswith(LFS_SUFFIXES)) else "regular"


def owner_of(name: str) -> str:
    """Returns the owner of a repository. Spaces begin with `spaces/`, datasets with `datasets/`."""
    return name.removeprefix("spaces/").removeprefix("datasets/").split("/")[0]


def read_card(content: bytes) -> dict[str, Any]:
    """Returns the metadata at the top of a README; raises `yaml.YAMLError` if they are not YAML."""
    match = re.match(r"---\n(.*?)\n---\s", content.decode() + "\n", re.DOTALL)
    return (yaml.safe_load(match[1]) if match else None) or {}


class HubServer:
    """
    A context manager that serves an empty Hub. Clients run in another process, with the variables of `environment`,
    because huggingface_hub reads them when it is imported.

    Args:
        tokens (`dict[str, Access]`, *optional*): The valid tokens.

    Attributes:
        log (`list[tuple[str, str, int]]`): Method, path and status of every request; 0 for a dropped connection.
        unknown (`list[str]`): Requests that this server does not implement; tests assert that there are none.
        on_commit (`Callable[[str], object]`, *optional*): Called with the name of the repository before a client's
            commit is applied; a test can commit something else first.
    """

    def __init__(self, tokens: dict[str, Access] | None = None) -> None:
        self.tokens = tokens or {}
        self.repositories: dict[str, Repository] = {}
        self.log: list[tuple[str, str, int]] = []
        self.unknown: list[str] = []
        self.faults: list[Fault] = []
        self.on_commit: Callable[[str], object] | None = None
        self.lock = threading.RLock()
        self.stopped = threading.Event()
        self.server = Server(self)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Drops all open connections, and refuses new ones."""
        if not self.stopped.is_set():
            self.stopped.set()
            self.server.shutdown()
            self.server.server_close()
            self.server.drop_connections()

    def environment(self, home: Path | str, token: str | None = None) -> dict[str, str]:
        """Returns the environment variables for a client process."""
        settings = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        settings |= {f"HF_HUB_DISABLE_{what}": "1" for what in ("XET", "TELEMETRY", "PROGRESS_BARS")}
        # Empty without a token, or the client would send the user's own.
        return settings | {"HF_TOKEN": token or "", "HUGGING_FACE_HUB_TOKEN": ""}

    def fault(self, method: str, pattern: str, **what: Any) -> None:
        """Adds a [`Fault`]. Each request meets the first matching one that is not used up."""
        with self.lock:
            self.faults.append(Fault(method, pattern, **what))

    def clear_faults(self) -> None:
        """Removes all faults."""
        with self.lock:
            self.faults.clear()

    def take_fault(self, method: str, path: str) -> Fault | None:
        """Returns the fault that a request meets, and counts it as used."""
        with self.lock:
            for fault in self.faults:
                if fault.method == method and fault.pattern in path and fault.times != 0:
                    fault.times = fault.times and fault.times - 1
                    return fault
        return None

    def commits(self, repo_id: str, revision: str = "main") -> list[Commit]:
        """Returns the history of a branch, newest commit first."""
        with self.lock:
            repository = self.repositories[repo_id]
            history = [repository.at(revision)]
            while history[-1].parent is not None:
                history.append(repository.commits[history[-1].parent])
            return history

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Returns the files of a branch, by path."""
        with self.lock:
            return {path: blob.content for path, blob in self.repositories[repo_id].at(revision).files.items()}

    def is_private(self, repo_id: str) -> bool:
        """Returns whether the repository is private."""
        return self.repositories[repo_id].private

    def commit(
        self, repo_id: str, files: dict[str, bytes | None], message: str = "A commit", revision: str = "main"
    ) -> str:
        """Commits as another user, and creates the repository if needed; `None` deletes a file. Returns the sha."""
        with self.lock:
            repository = self.repositories.setdefault(repo_id, Repository(private=False))
            head = repository.at(revision)
            tree = dict(head.files)
            for path, content in files.items():
                if content is None:
                    del tree[path]
                else:
                    tree[path] = blob = Blob(content, lfs=upload_mode(path, len(content)) == "lfs")
                    repository.objects |= {blob.sha256: content} if blob.lfs else {}
            return repository.add(revision, Commit(message, "", head.sha, tree))

    def answer(self, request: Request) -> Reply:
        """Returns the response to a request that meets no fault."""
        for route, action in ROUTES.items():
            match = re.fullmatch(route, f"{request.method} {request.path}")
            # A pull request would become a commit to the branch without notice.
            if match and "create_pr" not in request.query:
                parts = {name: unquote(text) for name, text in match.groupdict(default="").items()}
                kind = re.match("(?:/api)?/(spaces|datasets)/", request.path)
                if kind is not None:
                    parts["name"] = f"{kind[1]}/{parts['name']}"
                if action is HubServer.apply_commit and self.on_commit is not None:
                    self.on_commit(parts["name"])
                with self.lock:
                    return action(self, request, **parts)
        self.unknown.append(f"{request.method} {unquote(request.path)}")
        raise Refusal(404, "Sorry, we can't find the page you are looking for.")

    def access(self, request: Request) -> Access | None:
        """Returns the owner of the request's token. An unknown token is refused even for public repositories."""
        header = request.headers.get("Authorization")
        access = self.tokens.get((header or "").removeprefix("Bearer "))
        if header is not None and access is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return access

    def require_write(self, request: Request, owner: str, message: str, code: str | None = None) -> None:
        access = self.access(request)
        if access is None:
            raise Refusal(401, "Invalid username or password.", code)
        if access != Access(owner, "write"):
            raise Refusal(403, message)

    def readable(self, request: Request, name: str) -> Repository:
        """Returns the repository, if the request's token may read it."""
        access, repository = self.access(request), self.repositories.get(name)
        if repository is None or (repository.private and (access is None or access.user != owner_of(name))):
            raise Refusal(404, "Repository not found", "RepoNotFound")
        return repository

    def writable(self, request: Request, name: str) -> Repository:
        """Returns the repository, if the request's token may write to it."""
        repository = self.readable(request, name)
        # Over https the client turns this 401 into a RepositoryNotFoundError anyway, over http only with the code.
        message = f"You don't have the rights to write to {name}"
        self.require_write(request, owner_of(name), message, code="RepoNotFound")
        return repository

    def list_agents(self, request: Request) -> Reply:
        """Lists no tools. The client asks once per HF_HOME which tools it should report in its headers."""
        return Reply({"standardEnvVars": [], "harnesses": {}})

    def validate_yaml(self, request: Request) -> Reply:
        try:
            read_card(request.json()["content"].encode())
        except yaml.YAMLError as error:
            return Reply({"error": str(error), "errors": [{"message": str(error)}]}, 400)
        return Reply({"errors": [], "warnings": []})

    def create_repository(self, request: Request) -> Reply:
        wanted, access = request.json(), self.access(request)
        owner = wanted.get("organization") or (access.user if access else "")
        message = f'You don\'t have the rights to create a model under the namespace "{owner}"'
        self.require_write(request, owner, message)
        name = f"{owner}/{wanted['name']}"
        reply = {"url": f"{self.url}/{name}", "name": name}
        kind = wanted.get("type", "model")
        # On the Hub, a model and a Space may have one name.
        name = f"spaces/{name}" if kind == "space" else name
        reply["url"] = f"{self.url}/{name}"
        if name in self.repositories:
            return Reply(reply | {"error": "You already created this repo"}, 409)
        private = wanted.get("private", False) or wanted.get("visibility") == "private"
        self.repositories[name] = Repository(private)
        self.repositories[name].sdk = wanted.get("sdk")
        return Reply(reply)

    def create_branch(self, request: Request, name: str, revision: str) -> Reply:
        repository = self.writable(request, name)
        if revision in repository.branches:
            raise Refusal(409, f"Reference already exists: refs/heads/{revision}")
        repository.branches[revision] = repository.at(request.json().get("startingPoint", "main")).sha
        return Reply({})

    def say_upload_modes(self, request: Request, name: str, revision: str) -> Reply:
        present, modes = self.writable(request, name).at(revision).files, []
        for wanted in request.json()["files"]:
            path, mode = wanted["path"], upload_mode(wanted["path"], wanted["size"])
            oid = {"oid": present[path].etag} if path in present else {}
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False} | oid)
        return Reply({"files": modes})

    def announce_objects(self, request: Request, name: str) -> Reply:
        """Returns an upload address for each object that is not stored yet."""
        repository, objects = self.writable(request, name), []
        for wanted in request.json()["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            repository.announced[oid] = size
            actions = {"actions": {"upload": {"href": f"{self.url}/_lfs/{name}/{oid}"}}}
            objects.append({"oid": oid, "size": size} | ({} if oid in repository.objects else actions))
        return Reply({"transfer": "basic", "objects": objects})

    def put_object(self, request: Request, name: str, oid: str) -> Reply:
        """Stores an announced object. Such requests carry no token."""
        repository = self.repositories[name]
        if (len(request.body), hashlib.sha256(request.body).hexdigest()) != (repository.announced.get(oid), oid):
            raise Refusal(400, "The object has not the size or not the SHA-256 that were announced")
        repository.objects[oid] = request.body
        return Reply(b"")

    def apply_commit(self, request: Request, name: str, revision: str) -> Reply:
        """Applies a commit atomically, on a copy of the files."""
        repository = self.writable(request, name)
        if revision not in repository.branches:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        head, (first, *lines) = repository.at(revision), [json.loads(line) for line in request.body.splitlines()]
        header, files = first["value"], dict(head.files)
        if header.get("parentCommit", head.sha) != head.sha:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        for line in lines:
            repository.operate(files, line["key"], line["value"])
        sha = repository.add(revision, Commit(header["summary"], header["description"], head.sha, files))
        return Reply({"success": True, "commitOid": sha, "commitUrl": f"{self.url}/{name}/commit/{sha}"})

    def describe_repository(self, request: Request, name: str, revision: str) -> Reply:
        repository = self.readable(request, name)
        commit = repository.at(revision or "main")
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        card = read_card(commit.files["README.md"].content) if "README.md" in commit.files else {}
        described: dict[str, Any] = {"id": name, "modelId": name, "author": name.split("/")[0], "sha": commit.sha}
        described |= {"private": repository.private, "gated": repository.gated, "siblings": siblings}
        described |= {"cardData": card, "tags": card.get("tags", [])}
        return Reply(described | {key: card[key] for key in ("pipeline_tag", "library_name") if key in card})

    def list_tree(self, request: Request, name: str, revision: str, path: str) -> Reply:
        entries, folder = self.readable(request, name).at(revision).entries(), Path(path)
        inside = [entry for entry in entries if folder in Path(entry["path"]).parents]
        if path and not inside:
            raise Refusal(404, f"{path} does not exist on {revision!r}", "EntryNotFound")
        if request.query.get("recursive") != ["true"]:
            inside = [entry for entry in inside if Path(entry["path"]).parent == folder]
        return Reply(inside)

    def send_file(self, request: Request, name: str, revision: str, path: str) -> Reply:
        """Sends a file. LFS files are sent directly, where the Hub redirects to its store; the client accepts both."""
        commit = self.readable(request, name).at(revision)
        if path not in commit.files:
            # The client caches missing files by the sha of the commit.
            raise Refusal(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.sha)
        blob, size = commit.files[path], len(commit.files[path].content)
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob.etag}"'}
        headers |= {"X-Linked-ETag": f'"{blob.sha256}"', "X-Linked-Size": str(size)} if blob.lfs else {}
        headers["Content-Type"] = "application/octet-stream"
        return Reply(blob.content, headers=headers)


MODEL, REVISION, FILE = r"(?P<name>[^/]+(?:/[^/]+)?)", "(?P<revision>[^/]+)", "(?P<path>.+)"
# The first match counts: otherwise a name without a slash would match the rest of the path as well.
ROUTES: dict[str, Callable[..., Reply]] = {
    "GET /api/agent-harnesses": HubServer.list_agents,
    "POST /api/validate-yaml": HubServer.validate_yaml,
    "POST /api/repos/create": HubServer.create_repository,
    f"POST /api/models/{MODEL}/branch/{REVISION}": HubServer.create_branch,
    f"POST /api/(?:models|spaces)/{MODEL}/preupload/{REVISION}": HubServer.say_upload_modes,
    rf"POST /(?:spaces/)?{MODEL}\.git/info/lfs/objects/batch": HubServer.announce_objects,
    r"PUT /_lfs/(?P<name>.+)/(?P<oid>[0-9a-f]{64})": HubServer.put_object,
    f"POST /api/(?:models|spaces)/{MODEL}/commit/{REVISION}": HubServer.apply_commit,
    f"GET /api/(?:models|datasets)/{MODEL}/tree/{REVISION}(?:/{FILE})?": HubServer.list_tree,
    f"GET /api/(?:models|spaces|datasets)/{MODEL}(?:/revision/{REVISION})?": HubServer.describe_repository,
    f"(?:GET|HEAD) /(?:datasets/)?{MODEL}/resolve/{REVISION}/{FILE}": HubServer.send_file,
}


class Server(ThreadingHTTPServer):
    """The sockets of a [`HubServer`], with one thread per connection."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), Handler)

    def drop_connections(self) -> None:
        """Closes connections that are kept alive, which would be served after the end otherwise."""
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect, and shows all other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 for `HubServer.answer`, with the faults in front of it."""

    protocol_version = "HTTP/1.1"
    # Headers and body are two writes; with Nagle's algorithm, the second waits until the first is acknowledged.
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing."""

    def serve(self) -> None:
        hub, target, length = self.server.hub, urlsplit(self.path), int(self.headers.get("Content-Length", 0))
        fault = hub.take_fault(self.command, unquote(target.path))
        if fault is not None and hub.stopped.wait(fault.delay):
            raise ConnectionAbortedError
        cut = fault.cut if fault is not None else None
        # The body is always read, or its rest would be parsed as the next request of the connection.
        body = self.rfile.read(length if cut is None else min(cut, length))
        if cut is not None or len(body) < length:
            # A fault without a response, or a client that died in the middle of its request.
            self.drop()
            return
        if fault is not None and fault.status is not None:
            typed = any(name.lower() == "content-type" for name in fault.headers)
            reply = Reply(fault.message.encode() if typed else {"error": fault.message}, fault.status, fault.headers)
            reply.headers = {"X-Error-Message": fault.message} | reply.headers
        else:
            try:
                reply = hub.answer(Request(self.command, target.path, parse_qs(target.query), self.headers, body))
            except Refusal as refusal:
                reply = refusal.reply
        if fault is not None and fault.lose_answer:
            self.drop()
            return
        hub.log.append((self.command, unquote(target.path), reply.status))
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body, default=str).encode()
        # The client quotes the request id in its errors.
        headers = {"Content-Type": "application/json", "X-Request-Id": self.headers.get("X-Amzn-Trace-Id", "")}
        self.send_response(reply.status)
        for name, text in (headers | reply.headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body[: fault.cut_answer if fault is not None else None] if self.command != "HEAD" else b"")
        if fault is not None and fault.cut_answer is not None:
            self.close_connection = True

    def drop(self) -> None:
        self.server.hub.log.append((self.command, unquote(urlsplit(self.path).path), 0))
        self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = serve  # noqa: N815 (http.server calls them so)
