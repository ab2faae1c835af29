"""Weights from rank 0, which alone has the files, to the ranks that hold them: in chunks, each shard with a checksum.

Ranks whose shards of a parameter are the same get them at once: by broadcast if those are all ranks, else from rank 0
one after the other. Rank 0 reads the next chunk while the one before is on its way. After every parameter all ranks
compare the CRC-32 (zlib's) of what has arrived with that of what rank 0 has read, and get rank 0's error if it failed.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mlxdist.base.errors import InvalidArgument, TransportError, name_ranks
from mlxdist.base.json_reader import parse_json
from mlxdist.base.safetensors_reader import Checkpoint, local_shape, write_header
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.blobs import broadcast_blob
from mlxdist.runtime.operations.collectives import all_gather, broadcast
from mlxdist.runtime.operations.point_to_point import recv, send

from ..plan import Shard
from .weight_sources import Source

__all__ = ["CHUNK_BYTES", "TOKENIZER_FILES", "WITH_TOKENIZER", "checkpoint_of_rank_0", "stream_shard"]

CHUNK_BYTES = 8 * 2**20
MAX_SMALL_FILE_BYTES = 256 * 2**20
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*.tiktoken")
WITH_TOKENIZER = (
    *("generation_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template*", *TOKENIZER_FILES),
)
SMALL_FILES = ("config.json", "hf_quant_config.json", *WITH_TOKENIZER)


@contextmanager
def checkpoint_of_rank_0(directory: Path, group: Group) -> Iterator[Checkpoint]:
    """The checkpoint in ``directory`` on rank 0; on the others, within the block, a copy of all but the weights.

    The files of weights have their headers there, and behind it a hole that takes no room on the disk.
    """
    checkpoint: Checkpoint | None = None
    files: Sequence[tuple[str, int, int]] = []
    content = b""
    with agreed("load_sharded", group):
        if group.rank() == 0:
            checkpoint = Checkpoint(directory)
            files, content = _small_files(checkpoint)
    files = parse_json(broadcast_blob(json.dumps(files).encode(), group))
    content = broadcast_blob(content, group)
    with TemporaryDirectory(prefix="mlxdist-") as temporary:
        with agreed("load_sharded", group):
            if checkpoint is None:
                _write(Path(temporary), files, content)
                checkpoint = Checkpoint(Path(temporary))
        yield checkpoint


def stream_shard(
    source: Source,
    shard: Shard,
    memory: np.ndarray | None,
    group: Group,
    holders: Sequence[int],
    advance: Callable[[int], Any] = lambda count: None,
) -> None:
    """Fills ``memory``, bytes, with this rank's shard of a parameter. Every rank calls it, with the same parameter;
    on the ranks that are no ``holders`` of it ``memory`` is None. Rows of ranks hold the same shards.

    Raises:
        InvalidArgument: on every rank, where rank 0 cannot read it.
        TransportError: on every rank, where what arrived is not what rank 0 has read.
    """
    failures: list[InvalidArgument] = []
    checksums = np.zeros(group.size() + 1, np.uint32)  # rank 0: of every rank; else: of what came
    for slices, ranks in _shards(shard, holders):
        if group.rank() == 0:
            length = math.prod(local_shape(shard.shape, shard.axis, slices)) * source.itemsize
            read = partial(_read, failures, source, shard.axis, slices)
            checksums[ranks] = _send(read, memory if 0 in ranks else None, length, ranks, group, advance)
        elif group.rank() in ranks and memory is not None:
            checksums[0] = _receive(memory, len(ranks) == group.size(), group)
    checksums[-1] = len(failures)
    everyones = all_gather(checksums, group=group).reshape(group.size(), -1)
    if everyones[0, -1]:
        with agreed("load_sharded", group):
            if failures:
                raise failures[0]
    if differing := [rank for rank in range(1, group.size()) if everyones[rank, 0] != everyones[0, rank]]:
        raise TransportError(
            f"load_sharded: {shard.path} has arrived damaged on {name_ranks(differing)}: its CRC-32 is not that of "
            "what rank 0 has read; run it again with MLXDIST_CHECKSUM=1, to see whether a cable is at fault"
        )


def _read(
    failures: list[InvalidArgument], source: Source, axis: int, slices: Sequence[slice], start: int, chunk: np.ndarray
) -> None:
    try:
        if not failures:
            source.read(axis, slices, start, chunk.data)
    except InvalidArgument as error:  # the others wait for as many bytes; the end says that they are none
        failures.append(error)


def _send(
    read: Callable[[int, np.ndarray], None],
    memory: np.ndarray | None,
    length: int,
    ranks: Sequence[int],
    group: Group,
    advance: Callable[[int], Any],
) -> int:
    """Sends a shard to ``ranks``, reading the next chunk meanwhile, and returns its checksum. ``memory``: rank 0's."""
    handles: list[Any] = []
    buffers = [np.empty(CHUNK_BYTES, np.uint8) for _ in range(2)] if memory is None else []
    checksum = 0
    for number, start in enumerate(range(0, length, CHUNK_BYTES)):
        # Two buffers: one chunk is in flight while the next one is read.
        room = buffers[number % 2] if memory is None else memory[start:]
        chunk = room[: min(CHUNK_BYTES, length - start)]
        read(start, chunk)
        checksum = zlib.crc32(chunk.data, checksum)
        for handle in handles:
            handle.wait()
        if len(ranks) == group.size():
            handles = [broadcast(chunk, group=group, out=chunk, async_op=True)]
        else:
            handles = [send(chunk, rank, group=group, async_op=True) for rank in ranks if rank != 0]
        advance(len(chunk) * len(ranks))
    for handle in handles:
        handle.wait()
    return checksum


def _receive(memory: np.ndarray, from_broadcast: bool, group: Group) -> int:
    checksum = 0
    for start in range(0, len(memory), CHUNK_BYTES):
        chunk = memory[start : start + CHUNK_BYTES]
        handle: Any  # with one, as on rank 0: operations with and without one are matched apart
        if from_broadcast:
            handle = broadcast(chunk, group=group, out=chunk, async_op=True)
        else:
            handle = recv(chunk.shape, np.uint8, 0, group=group, out=chunk, async_op=True)
        handle.wait()
        checksum = zlib.crc32(chunk.data, checksum)
    return checksum


def _shards(shard: Shard, holders: Sequence[int]) -> list[tuple[list[slice], list[int]]]:
    """The different shards of a parameter, and which ranks hold each."""
    ranks_of: dict[tuple, list[int]] = {}
    for rank in holders:
        ranks_of.setdefault(shard.ranges[rank % len(shard.ranges)] if shard.ranges else (), []).append(rank)
    return [([slice(*ends) for ends in ranges], ranks) for ranges, ranks in ranks_of.items()]


def _small_files(checkpoint: Checkpoint) -> tuple[list[tuple[str, int, int]], bytes]:
    """Name, bytes that are sent, and size of each file; and those bytes, one file after the other."""
    paths = sorted({path for pattern in SMALL_FILES for path in checkpoint.directory.glob(pattern) if path.is_file()})
    files, content = [], []
    for path in paths:
        if path.stat().st_size > MAX_SMALL_FILE_BYTES:
            raise InvalidArgument(f"{path} has {path.stat().st_size} bytes, too many to send it to the other ranks")
        content.append(path.read_bytes())
        files.append((path.name, len(content[-1]), len(content[-1])))
    for file in checkpoint.files:
        content.append(file.header)
        files.append((file.path.name, len(file.header), file.size))
    return files, b"".join(content)


def _write(directory: Path, files: Sequence[tuple[str, int, int]], content: bytes) -> None:
    for name, length, size in files:
        write_header(directory / Path(name).name, content[:length], size)
        content = content[length:]
