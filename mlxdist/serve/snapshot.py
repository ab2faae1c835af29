"""The prefix cache on disk, from one run of a server to the next. Each rank has its shard of every sequence.

DIRECTORY/rank-1-of-2/index.json has the model and the shares that the shards belong to, and the tokens of sequences.
The caches of each are a file of mlx-lm's save_prompt_cache, with the BLAKE2b of its bytes as its name. The index is
replaced atomically and last, so that a save that is interrupted leaves the snapshot before it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlxdist.base.atomic_file import replace_file
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.private_files import make_private_directory
from mlxdist.base.safetensors_reader import Checkpoint
from mlxdist.base.validation import build, checked, hex_bytes, list_of, map_of, number, one_of, plain_text, read_bounded
from mlxdist.nn.models.load.blobs import broadcast_blob, gather_blobs
from mlxdist.nn.models.load.weight_checks import fingerprint
from mlxdist.runtime.group.group import Group
from mlxdist.version import __version__

from .decisions import MAX_PROMPT, SEGMENTS
from .log import say
from .placement import ModelPlacement
from .prefix_cache import PrefixCache
from .quantized_cache import loaded_caches

__all__ = ["Snapshot"]

_INDEX = "index.json"
_MAX_INDEX = 1 << 28  # bytes
_MAX_SEQUENCES = 1 << 16
_DIGEST_SIZE = 16  # bytes
_NO_ADAPTER = 0


@dataclass(frozen=True)
class _Sequence:
    kind: str = checked(one_of(SEGMENTS))
    tokens: tuple[int, ...] = checked(list_of(number(0, 2**32 - 1), MAX_PROMPT))
    digest: bytes = checked(hex_bytes(_DIGEST_SIZE, _DIGEST_SIZE))  # of the file

    @property
    def name(self) -> str:
        """The file name of a sequence, the same on all ranks, although the files of their shards differ."""
        return hashlib.blake2b(repr((self.kind, self.tokens)).encode(), digest_size=_DIGEST_SIZE).hexdigest()


@dataclass(frozen=True)
class _Index:
    identity: Mapping[str, str] = checked(map_of(plain_text(256), 16))
    sequences: tuple[_Sequence, ...] = checked(list_of(lambda _, value: build(_Sequence, value), _MAX_SEQUENCES))


class Snapshot:
    """This rank's snapshot, in ``directory``, which ranks of one host may share.

    Raises:
        InvalidArgument: its directory cannot be made, or something else has its name.
    """

    def __init__(self, directory: str, group: Group) -> None:
        self._group = group
        self._identity: dict[str, str] = {}
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

    def load(self, cache: PrefixCache, directory: Path, placement: ModelPlacement, options: str) -> None:
        """Puts the sequences that all ranks can read in ``cache``. Collective.

        Others are ignored, on all ranks, and rank 0 prints why. So is a snapshot of another model than that in rank 0's
        ``directory``, of another ``placement``, with other ``options`` of KV caches, or by other versions.
        """
        model = fingerprint(Checkpoint(directory)).encode() if self._group.rank() == 0 else b""
        self._identity = {
            "model": broadcast_blob(model, self._group).decode(),
            "plan of shards": hashlib.blake2b(placement.to_json().encode(), digest_size=16).hexdigest(),
            "--kv-bits, --kv-group-size or --split-blocks": options,
            "version of mlx-lm": version("mlx-lm"),
            "version of mlxdist": __version__,
        }
        found, problems = self._read()
        blob = json.dumps({"names": list(found), "problems": problems}).encode()
        ranks = [parse_json(blob) for blob in gather_blobs(blob, self._group)]
        common = set.intersection(*(set(rank["names"]) for rank in ranks))
        for name in ranks[0]["names"]:  # in one order on all ranks
            # If some ranks lacked a sequence, ranks would compute different parts of the same prompt.
            if name in common:
                sequence, caches = found[name]
                cache.insert_cache(_NO_ADAPTER, list(sequence.tokens), caches, cache_type=sequence.kind)
        mx.eval([each.state for _, _, caches in cache.sequences(_NO_ADAPTER) for each in caches])
        if self._group.rank() == 0:
            for index, rank in enumerate(ranks):
                for problem in rank["problems"]:
                    say(f"saved prefix cache of rank {index}: {problem}; it is not used")
            if any(rank["names"] for rank in ranks):
                say(f"the prefix cache has {len(cache)} saved sequences with {cache.tokens} tokens")

    def save(self, cache: PrefixCache) -> None:
        """Replaces the existing snapshot by ``cache``, after :meth:`load`. Prints an error if it cannot be written."""
        try:
            sequences = [
                {"kind": kind, "tokens": tokens, "digest": self._write(caches)}
                for kind, tokens, caches in cache.sequences(_NO_ADAPTER)
            ]
            replace_file(self._folder / _INDEX, json.dumps({"identity": self._identity, "sequences": sequences}), 0o600)
            # Old files are removed after the index is replaced: until then, it names them.
            kept = {sequence["digest"] for sequence in sequences}
            for file in self._folder.glob("*.safetensors"):
                if file.stem not in kept:
                    file.unlink()
        except (OSError, RuntimeError, ValueError) as error:  # MLX raises the second, mlx-lm the third
            say(f"rank {self._group.rank()}: the prefix cache cannot be saved in {self._folder}: {error}")

    def _read(self) -> tuple[dict[str, tuple[_Sequence, list[Any]]], list[str]]:
        """The sequences that this rank can read, by name, with their caches; and errors of the others."""
        path, found, problems = self._folder / _INDEX, {}, []
        if not path.exists():
            return {}, []
        try:
            index = build(_Index, parse_json(read_bounded(path, _MAX_INDEX)))
        except ValueError as error:
            return {}, [f"{path} is damaged: {error}"]
        if index.identity != self._identity:
            differing = [name for name, value in self._identity.items() if index.identity.get(name) != value]
            return {}, [f"it is of another {', '.join(differing)}"]
        for sequence in index.sequences:
            file = self._folder / f"{sequence.digest.hex()}.safetensors"
            try:
                if _digest(file) != sequence.digest.hex():
                    raise ValueError("its content has changed")
                found[sequence.name] = sequence, loaded_caches(load_prompt_cache(str(file)))
            except (OSError, ValueError) as error:
                problems.append(f"{file} is damaged: {error}")
        return found, problems

    def _write(self, caches: list[Any]) -> str:
        """Writes the caches to a file, and returns the digest that names it."""
        temporary = self._folder / f"{os.urandom(8).hex()}.safetensors"
        save_prompt_cache(str(temporary), caches)
        digest = _digest(temporary)
        os.replace(temporary, self._folder / f"{digest}.safetensors")
        return digest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_SIZE)).hexdigest()
