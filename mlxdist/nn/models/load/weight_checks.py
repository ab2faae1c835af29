"""Whether all ranks load the same model: their files compared before, what they have read compared after."""

import hashlib
import json
import zlib
from collections.abc import Mapping

import numpy as np

from mlxdist.base.errors import InvalidArgument, name_ranks
from mlxdist.base.json_reader import parse_json
from mlxdist.base.safetensors_reader import Checkpoint, StoredTensor
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.blobs import gather_blobs
from mlxdist.runtime.operations.collectives import all_gather

from .weight_sources import Source

__all__ = ["checksum", "fingerprint", "require_same_files", "require_same_tensors"]


def require_same_files(checkpoint: Checkpoint, group: Group) -> None:
    """Compares config.json, and the size and header of each file of weights, by their BLAKE2b."""
    digests = _digests(checkpoint)
    everyones = [parse_json(blob) for blob in gather_blobs(json.dumps(digests).encode(), group)]
    for name in sorted(set().union(*everyones)):
        having = [rank for rank, others in enumerate(everyones) if name in others]
        if len(having) < group.size():
            raise InvalidArgument(
                f"load_sharded: only {name_ranks(having)} of {group.size()} found {name}; the directories must be the "
                "same on all hosts, or be on rank 0 alone, with stream=True"
            )
        differing = [rank for rank, others in enumerate(everyones) if others[name] != everyones[0][name]]
        if differing:
            raise InvalidArgument(
                f"load_sharded: {name} of {name_ranks(differing)} is not that of rank 0 (size and header, or text, "
                "differ); copy the directory of one host to all others, or give stream=True"
            )


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of what the ranks compare: config.json, the headers and sizes of files, and some bytes of each tensor."""
    checksums = {name: checksum(tensor, None) for name, tensor in checkpoint.tensors.items()}
    compared = json.dumps([_digests(checkpoint), checksums], sort_keys=True)
    return hashlib.blake2b(compared.encode(), digest_size=16).hexdigest()


def _digests(checkpoint: Checkpoint) -> dict[str, str]:
    config = (checkpoint.directory / "config.json").read_bytes()
    digests = {"config.json": hashlib.blake2b(config, digest_size=16).hexdigest()}
    return digests | {file.path.name: file.digest.hex() for file in checkpoint.files}


def checksum(source: Source, full: memoryview | None) -> int:
    """CRC-32 (zlib's) of a tensor of which this rank has all bytes in ``full``; else of some that all ranks read."""
    if full is not None:
        return zlib.crc32(full)
    if isinstance(source, StoredTensor):
        return zlib.crc32(source.sample())
    memory = memoryview(bytearray(source.nbytes))
    source.read(0, [], 0, memory)
    return zlib.crc32(memory)


def require_same_tensors(checksums: Mapping[str, int], sources: Mapping[str, Source], group: Group) -> None:
    """Compares the checksums of parameters, which are the same on all ranks and in the same order."""
    if not checksums:
        return
    mine = np.array(list(checksums.values()), np.uint32)
    everyones = all_gather(mine, group=group).reshape(group.size(), -1)
    differs = everyones != everyones[0]
    if not differs.any():
        return
    paths = [path for path, differ in zip(checksums, differs.any(axis=0)) if differ]
    source = sources[paths[0]]
    where = f" ({source.name} in {source.file.path.name})" if isinstance(source, StoredTensor) else ""
    raise InvalidArgument(
        f"load_sharded: the ranks hold different weights: {paths[0]}{where} of "
        f"{name_ranks(np.flatnonzero(differs.any(axis=1)).tolist())} is not that of rank 0"
        + (f"; so are {len(paths) - 1} more parameters" if len(paths) > 1 else "")
        + "; copy the directory of one host to all others, or give stream=True"
    )
