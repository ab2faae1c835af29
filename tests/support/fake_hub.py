"""A server of the part of the Hugging Face Hub's HTTP API that downloads need, for tests without a network.

Run it, `python fake_hub.py ADDRESS PORT FOLDER NAME`, or use `serving`. Large files (.safetensors) are LFS files, whose
ETag is their SHA-256.
"""

import contextlib
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["COMMIT", "serving"]

COMMIT = "89abcdef01234567" * 2 + "89abcdef"


class Hub(ThreadingHTTPServer):
    """``sent``: the bytes of each file that it has sent; ``cut``: the number of bytes after which it ends a large file,
    once; ``wrong``: whether large files arrive with other bytes."""

    def __init__(self, address: tuple[str, int], folder: Path, name: str) -> None:
        super().__init__(address, _Handler)
        self.folder, self.name = folder, name
        self.sent: dict[str, int] = {}
        self.cut: int | None = None
        self.wrong = False

    @property
    def endpoint(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_address[1]}"

    def describe(self, path: Path) -> dict[str, object]:
        content = path.read_bytes()
        blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        found = {"type": "file", "path": path.name, "size": len(content), "oid": blob}
        if path.suffix == ".safetensors":
            found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return found


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        if path in (f"/api/models/{hub.name}", f"/api/models/{hub.name}/revision/main"):
            files = [{"rfilename": file.name} for file in sorted(hub.folder.iterdir())]
            self._reply(json.dumps({"id": hub.name, "sha": COMMIT, "siblings": files}).encode())
        elif path == f"/api/models/{hub.name}/tree/{COMMIT}":
            self._reply(json.dumps([hub.describe(file) for file in sorted(hub.folder.iterdir())]).encode())
        elif path.startswith(f"/{hub.name}/resolve/{COMMIT}/"):
            self._file(hub.folder / Path(path).name)
        else:
            self._reply(b'{"error": "Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})

    def _file(self, path: Path) -> None:
        described = self.server.describe(path)
        lfs = described.get("lfs")
        etag = lfs["oid"] if isinstance(lfs, dict) else described["oid"]
        content, headers = path.read_bytes(), {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if begin:
            first = int(begin[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            content = content[first:]
        self._reply(content, 206 if begin else 200, headers, path.name)

    def _reply(self, body: bytes, status: int = 200, headers: dict[str, str] = {}, file: str = "") -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        hub = self.server
        if hub.wrong and file.endswith(".safetensors"):
            body = bytes(len(body))
        if hub.cut is not None and file.endswith(".safetensors"):
            body, hub.cut = body[: hub.cut], None
            self.close_connection = True
        if file:
            hub.sent[file] = hub.sent.get(file, 0) + len(body)
        self.wfile.write(body)


@contextlib.contextmanager
def serving(folder: Path, name: str) -> Iterator[Hub]:
    """A hub on this machine that has the model ``name`` with the files of ``folder``."""
    with Hub(("127.0.0.1", 0), folder, name) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


if __name__ == "__main__":
    Hub((sys.argv[1], int(sys.argv[2])), Path(sys.argv[3]), sys.argv[4]).serve_forever()
