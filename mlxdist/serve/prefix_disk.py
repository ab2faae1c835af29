"""The disk tier of the prefix tree: each rank has a file for each node, with its shard of the keys, values and states.

A thread writes nodes in the order in which they were made, which is the same on all ranks, and another one reads. The
ranks compare at numbered steps how far they are: a node is stored once all have written it, and is in the tree again
once all have read it. What one rank cannot write or read, no rank uses.

A file is DIRECTORY/rank-1-of-2/IDENTITY/KEY-START-DIGEST.safetensors: a hash of what keys and values depend on beside
tokens, a hash of all tokens up to the end of the node, the place where the node begins, and a hash of the file, whose
metadata have the tokens of the node. Files are written under another name first. So a crash leaves whole files, and
each is checked when it is read. Files of other identities have the room that those of this one leave.
"""

import contextlib
import hashlib
import io
import json
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.base.atomic_file import replace_file
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.private_files import make_private_directory
from mlxdist.base.validation import build, checked, list_of, map_of, number, plain_text
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.blobs import gather_blobs

from .log import say

__all__ = ["PrefixDisk", "StoredNode", "extended", "hash_of"]

_MAX_HEADER = 1 << 24  # bytes
_MAX_FILES = 1 << 20
_MAX_NODE = 1 << 16  # tokens
_DIGEST_SIZE = 16  # bytes
_HOUR = 3600.0  # seconds
_END = 30.0  # seconds that the last writes may take
_NAME = re.compile(r"([0-9a-f]{32})-(\d{1,8})-[0-9a-f]{32}\.safetensors")
_UNFINISHED = re.compile(rf"\.{_NAME.pattern}-[0-9a-f]{{16}}")  # of `replace_file`

Arrays = Mapping[str, mx.array]
Scalars = Mapping[str, int | float | bool | None]


@dataclass(frozen=True)
class _Facts:
    """The metadata of a file."""

    parent: str = checked(plain_text(64))
    tokens: tuple[int, ...] = checked(list_of(number(0, 2**32 - 1), _MAX_NODE))
    adapter: int = checked(number(0, 2**16 - 1))
    states: int = checked(number(0, 1))
    scalars: Mapping[str, object] = checked(map_of(lambda _, value: value, _MAX_NODE))


@dataclass(frozen=True)
class StoredNode:
    """A node of the tree as files have it; ``key``: of all tokens up to its end."""

    key: str
    start: int
    parent: str
    tokens: tuple[int, ...]
    adapter: int
    has_states: bool


@dataclass
class _Write:
    """A node to write; ``arrays`` is None once that has been cancelled or done."""

    node: StoredNode
    arrays: Arrays | None
    scalars: Scalars


class PrefixDisk:
    """This rank's files, in ``directory``, which ranks of one host may share: ``max_bytes`` of them, others' included.

    ``hourly``: bytes that are written in an hour; half of ``max_bytes`` by default. Flash memory wears out.

    Raises:
        InvalidArgument: the rank's directory cannot be made, or something else has its name.
    """

    def __init__(self, directory: str, max_bytes: int, group: Group, hourly: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._hourly = max_bytes // 2 if hourly is None else hourly
        self._group = group
        self._folder = Path(directory, f"rank-{group.rank()}-of-{group.size()}")
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            is_ours = make_private_directory(self._folder)  # prompts are private
        except OSError as error:
            raise InvalidArgument(f"serve: {self._folder} cannot be made: {error.strerror}") from None
        if not is_ours:
            raise InvalidArgument(
                f"serve: {self._folder} is no directory, or another user's; --prompt-cache-dir names another place"
            )
        self._files: dict[str, Path] = {}  # by key
        self._others: deque[Path] = deque()  # of other identities, in the order in which they are removed
        self._bytes = 0  # of all of these
        self._lock = threading.Condition()
        self._queue: deque[_Write] = deque()
        self._pending: dict[str, _Write] = {}  # by key, the last for each
        self._made = self._done = 0  # writes that were ordered, and those that are done or cancelled, in this order
        self._failed = self._closing = False  # failed: the write that is next
        self._has_said = False
        self._reader = ThreadPoolExecutor(1, "mlxdist prefix reader")
        self._writer = threading.Thread(target=self._write_all, name="mlxdist prefix writer", daemon=True)
        self._writer.start()

    def open(self, identity: Mapping[str, str]) -> list[StoredNode]:
        """The nodes of this ``identity`` that the files of all ranks have, parents first, in the order of rank 0's
        files. Collective."""
        self._folder /= _digest(json.dumps(identity).encode())
        with contextlib.suppress(OSError):  # of a full disk: the first write says so
            self._folder.mkdir(mode=0o700, exist_ok=True)
        self._find_others()
        # Nodes whose key, start and states are the same have the same tokens, adapter and parent: their keys are right.
        found = _with_right_keys(self._read_folder())
        mine = {(node.key, node.start, node.has_states): node for node in found}
        blobs = gather_blobs(json.dumps([*mine]).encode(), self._group)
        names = [[tuple(name) for name in parse_json(blob)] for blob in blobs]
        common = set.intersection(*map(set, names))
        return _parents_first([mine[name] for name in names[0] if name in common])

    def keep(self, keys: Collection[str]) -> None:
        """Removes the files of all other nodes."""
        for key in self._files.keys() - set(keys):
            self.remove(key)

    def write(self, node: StoredNode, arrays: Arrays, scalars: Scalars) -> int:
        """Has a node written. Returns the number of the write: they count from 1."""
        write = _Write(node, arrays, scalars)
        with self._lock:
            self._queue.append(write)
            self._pending[node.key] = write
            self._made += 1
            self._lock.notify()
            return self._made

    def remove(self, key: str) -> None:
        """Removes the file of a node, and cancels its write."""
        with self._lock:
            if write := self._pending.pop(key, None):
                write.arrays = None
                self._lock.notify()
            file = self._files.pop(key, None)
        if file is not None:
            self._unlink(file)

    def progress(self) -> tuple[int, int]:
        """The number of writes that are done, and 1 if the next one has failed."""
        with self._lock:
            return self._done, int(self._failed)

    def skip(self, number: int) -> None:
        """Goes on after write ``number``, which has failed on some rank."""
        with self._lock:
            if self._failed and self._done + 1 == number:
                self._failed = False
                self._done += 1
            self._lock.notify()

    def read(self, keys: Sequence[str]) -> "Future[list[tuple[bytes, dict[str, object]]]]":
        """Begins to read nodes. The result: the files' bytes and scalars, up to the first that cannot be read."""
        with self._lock:
            files = [self._files.get(key, self._folder / f"{key} without a file") for key in keys]
        return self._reader.submit(self._read_files, files)

    def close(self) -> None:
        """Waits for the writes that are due, for half a minute at most."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._writer.join(_END)
        self._reader.shutdown(cancel_futures=True)

    def _find_others(self) -> None:
        """Lists the files of other identities: first those of the one that has written nothing for the longest, and of
        these the newest, which go on from older ones."""
        folders = []
        for folder in self._folder.parent.glob("?" * 2 * _DIGEST_SIZE):
            if files := [each for each in _files_of(folder) if _NAME.fullmatch(each[2].name)]:
                self._bytes += sum(size for _, size, _ in files)
                if folder != self._folder:
                    folders.append(files[::-1])
        self._others.extend(path for files in sorted(folders) for _, _, path in files)

    def _read_folder(self) -> list[StoredNode]:
        """This rank's nodes, the oldest file first. Files that are damaged, or whose write was killed, are removed."""
        found: dict[str, StoredNode] = {}
        for *_, path in _files_of(self._folder):
            name = _NAME.fullmatch(path.name)
            if name is None:
                if _UNFINISHED.fullmatch(path.name):
                    _unlink(path)
                continue
            try:
                facts = None if len(found) == _MAX_FILES else _facts(path)
            except (OSError, ValueError):
                facts = None
            if facts is None:
                self._unlink(path)
                continue
            key = name[1]
            if key in self._files:
                self.remove(key)  # an older file of a node that has been split
            self._files[key] = path
            found[key] = StoredNode(key, int(name[2]), facts.parent, facts.tokens, facts.adapter, bool(facts.states))
        return list(found.values())

    def _read_files(self, files: Sequence[Path]) -> list[tuple[bytes, dict[str, object]]]:
        found: list[tuple[bytes, dict[str, object]]] = []
        for path in files:
            try:
                data = path.read_bytes()
                if _digest(data) != path.stem.rpartition("-")[2]:
                    raise ValueError("its content has changed")
                found.append((data, dict(_facts(io.BytesIO(data)).scalars)))
            except (OSError, ValueError) as error:
                say(f"saved prefix cache of rank {self._group.rank()}: {path.name} is damaged: {error}; it is not used")
                break
        return found

    def _write_all(self) -> None:
        """The thread that writes."""
        hour, written = time.monotonic(), 0
        while (write := self._next()) is not None:
            with self._lock:
                # What an hour has no bytes for waits, and is cancelled when memory evicts its node.
                while (left := hour + _HOUR - time.monotonic()) > 0 and not (
                    written <= self._hourly or write.arrays is None or self._closing
                ):
                    self._lock.wait(left)
                is_too_much = left > 0 and written > self._hourly  # and the server ends
                arrays = None if is_too_much else write.arrays
            if left <= 0:
                hour, written = time.monotonic(), 0
            failed = False
            if arrays is not None:
                try:
                    written += self._write(write, arrays)
                except Exception as error:  # of the system, of MLX: the thread goes on
                    failed = True
                    if not self._has_said:
                        self._has_said = True
                        say(f"rank {self._group.rank()}: the prefix cache cannot be saved in {self._folder}: {error}")
            with self._lock:
                write.arrays = None
                if self._pending.get(write.node.key) is write:
                    del self._pending[write.node.key]
                self._failed = failed
                self._done += not failed

    def _next(self) -> _Write | None:
        with self._lock:
            while self._failed or not self._queue:
                if self._closing:
                    return None
                self._lock.wait()
            return self._queue.popleft()

    def _write(self, write: _Write, arrays: Arrays) -> int:
        """Writes a file, and returns its size."""
        node, buffer = write.node, io.BytesIO()
        facts = {"parent": node.parent, "tokens": node.tokens, "adapter": node.adapter, "states": int(node.has_states)}
        mx.save_safetensors(buffer, dict(arrays), {"mlxdist": json.dumps(facts | {"scalars": dict(write.scalars)})})
        data = buffer.getbuffer()
        path = self._folder / f"{node.key}-{node.start}-{_digest(data)}.safetensors"
        while self._others and self._bytes + len(data) > self.max_bytes:
            self._unlink(self._others.popleft())
        replace_file(path, data, 0o600)
        with self._lock:
            self._bytes += len(data)
            is_due = write.arrays is not None  # it has not been cancelled meanwhile
            if is_due:
                self._files[node.key] = path
        if not is_due:
            self._unlink(path)
        return len(data)

    def _unlink(self, path: Path) -> None:
        freed = _unlink(path)
        with self._lock:
            self._bytes -= freed


def _files_of(folder: Path) -> list[tuple[int, int, Path]]:
    """The files of a folder, the oldest first, each with its time and size."""
    found = []
    for path in folder.glob("*"):  # none, if the folder cannot be made
        with contextlib.suppress(OSError):  # another server has removed it
            status = path.lstat()
            found.append((status.st_mtime_ns, status.st_size, path))
    return sorted(found)


def _unlink(path: Path) -> int:
    """Removes a file. Returns its size."""
    with contextlib.suppress(OSError):  # someone has emptied the folder
        size = path.lstat().st_size
        path.unlink()
        return size
    return 0


def _parents_first(nodes: Sequence[StoredNode]) -> list[StoredNode]:
    """The nodes whose parents are there, by where they end: after their parents, and after shorter ones."""
    found: dict[str, StoredNode] = {}
    for node in sorted(nodes, key=lambda node: node.start + len(node.tokens)):
        parent = found.get(node.parent)
        if node.start == 0 or (parent is not None and parent.start + len(parent.tokens) == node.start):
            found[node.key] = node
    return list(found.values())


def hash_of(adapter: int) -> Any:
    """The hash of no tokens, from which those of nodes go on that are computed with an adapter."""
    return hashlib.blake2b(adapter.to_bytes(4, "little"), digest_size=_DIGEST_SIZE)


def extended(parent: Any, tokens: np.ndarray) -> Any:
    """The hash that names a node, of its adapter and all tokens up to its end: that of its parent with its tokens."""
    made = parent.copy()
    made.update(tokens.astype("<u4").tobytes())
    return made


def _with_right_keys(nodes: Sequence[StoredNode]) -> list[StoredNode]:
    """The nodes whose tokens and those of all nodes before them are the ones that their keys are of."""
    keys: dict[str, Any] = {}
    for node in _parents_first(nodes):
        parent = keys.get(node.parent) if node.start else hash_of(node.adapter)
        if parent is not None and node.tokens:
            key = extended(parent, np.array(node.tokens, np.uint32))
            if key.hexdigest() == node.key:
                keys[node.key] = key
    return [node for node in nodes if node.key in keys]


def _facts(source: "Path | io.BytesIO") -> _Facts:
    """The metadata of a file. Raises OSError or ValueError."""
    with open(source, "rb") if isinstance(source, Path) else contextlib.nullcontext(source) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER:
            raise ValueError("its header is too long")
        header = parse_json(file.read(length))
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    text = metadata.get("mlxdist") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ValueError("it has no metadata of mlxdist")
    return build(_Facts, parse_json(text))


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_SIZE).hexdigest()
