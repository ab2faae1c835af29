"""One rank of test_pull.py. Arguments: a scenario, and a directory, in which each rank has one of its own."""

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from unittest.mock import patch

if sys.argv[1] == "damaged" and os.environ["MLXDIST_RANK"] == "0":
    os.environ["MLXDIST_INJECT_FAULTS"] = "corrupt_after=60"  # one bit of a chunk

import numpy as np
from scenarios import group, rank, run_scenario, size

from mlxdist.base.errors import Aborted, Error, InvalidArgument, PeerLost, ResourceError, TransportError
from mlxdist.base.model_directory import find_model
from mlxdist.tools.models.places import Folder, HubCache
from mlxdist.tools.models.spread import spread
from mlxdist.tools.models.transfer import CHUNK_BYTES, partial_path, write_lock

WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
COMMIT = "0123456789abcdef" * 2 + "01234567"
NAME = "org/model"


def content_of(number: int, length: int) -> bytes:
    return np.random.default_rng(number).bytes(length)


INDEX = json.dumps({"weight_map": {"a": WEIGHTS[0], "b": WEIGHTS[1]}}).encode()
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "empty.txt": b"",
    "model.safetensors.index.json": INDEX,
    WEIGHTS[0]: content_of(1, 2 * CHUNK_BYTES + 3),
    WEIGHTS[1]: content_of(2, 3 * CHUNK_BYTES),
    "nested/small.bin": content_of(3, 10),
}
SIZE = sum(map(len, FILES.values()))


def write(folder: Path, names: object = FILES) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(FILES[name])
    return folder


def assert_complete(folder: Path) -> None:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == FILES, sorted(found)


def refusal(kinds: object, words: str, place: object, **options: object) -> None:
    try:
        spread(group, place, **options)
    except kinds as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was wrong with {words!r}")


def own(directory: str) -> Path:
    return Path(directory, f"rank{rank}", "model")


def copies(directory: str) -> None:
    """Each byte leaves the first host once, all hosts get all; a second time none is sent."""
    folder = write(own(directory)) if rank == 0 else own(directory)
    done = spread(group, Folder(folder))
    assert done.files == len(FILES) and done.size == SIZE
    assert done.received == (0, *[SIZE] * (size - 1))
    assert_complete(folder)
    sent = group.stats()["payload_bytes_sent"]
    limit = SIZE + 100_000  # what the ranks agree on besides
    assert (SIZE <= sent <= limit) if 0 < size - 1 and rank < size - 1 else sent <= limit - SIZE, (sent, SIZE)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert spread(group, Folder(folder)).received == (0,) * size
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def to_another_folder(directory: str) -> None:
    source = Path(directory, "source")  # which rank 0 alone has
    if rank == 0:
        write(source)
    place = Folder(own(directory), source if rank == 0 else Path(directory, "nowhere"))
    spread(group, place)
    assert not own(directory).exists() if rank == 0 else not assert_complete(own(directory))


def resumed(directory: str) -> None:
    """Rank 1 has the right beginning of a file, the others the same of a wrong one, and an older file of equal size."""
    folder = write(own(directory), FILES if rank == 0 else list(FILES)[:3])
    part, length = partial_path(folder / WEIGHTS[1]), CHUNK_BYTES + 1
    if rank == 1:
        part.write_bytes(FILES[WEIGHTS[1]][:length])
    if rank > 1:
        part.write_bytes(bytes(length))
        (folder / WEIGHTS[0]).write_bytes(bytes(len(FILES[WEIGHTS[0]])))
        (folder / "nested").mkdir()
        (folder / "nested" / "small.bin").write_bytes(FILES["nested/small.bin"])
    done = spread(group, Folder(folder))
    assert_complete(folder)
    of_weights = sum(len(FILES[name]) for name in WEIGHTS)
    # All that lack a file get what one of them lacks.
    first = of_weights + 10 - (length if size == 2 else 0)
    assert done.received == (0, first, *[of_weights] * (size - 2))[:size], done


def not_all_take_part(directory: str) -> None:
    """The last rank has all files: it waits for the transfer of each, without a limit, and not for that of all."""
    folder = own(directory)
    if rank in (0, size - 1):
        write(folder)
    before = group.stats_by_operation().get("barrier", {"calls": 0})["calls"]
    done = spread(group, Folder(folder))
    assert done.received == (0, *[SIZE] * (size - 2), 0)[:size], done
    waits = group.stats_by_operation().get("barrier", {"calls": 0})["calls"] - before
    assert waits == (len(FILES) if size > 2 else 0), waits
    assert_complete(folder)


def several_sources(directory: str) -> None:
    """Rank 0 lacks a file with weights that its index names; the last rank has that one."""
    names = [name for name in FILES if name != WEIGHTS[0]]
    folder = own(directory)
    if rank == 0:
        write(folder, names)
    if rank == size - 1:
        write(folder, [*(names if size == 1 else ["config.json"]), WEIGHTS[0]])
    spread(group, Folder(folder))
    assert_complete(folder)


def only_others_offer(directory: str) -> None:
    """The download of rank 0 was interrupted: the files are those of another rank, in which some more are."""
    folder = own(directory)
    if rank == 0:
        write(folder, [name for name in FILES if name != "nested/small.bin"])
        (folder / "config.json").write_bytes(b"{}")
    if rank == size - 1:
        write(folder)
    spread(group, Folder(folder), offers=rank > 0)
    assert_complete(folder)


def in_the_cache_of_the_hub(directory: str) -> None:
    with patch.dict(os.environ, HF_HUB_CACHE=str(Path(directory, f"rank{rank}"))):
        in_this_cache(HubCache(NAME))


def in_this_cache(place: HubCache) -> None:
    if rank == 0:
        snapshot = place.root / "snapshots" / COMMIT
        for name, content in FILES.items():
            blob = place.root / "blobs" / hashlib.sha256(content).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(content)
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
        (place.root / "refs").mkdir()
        (place.root / "refs" / "main").write_text(COMMIT)
    spread(group, place)
    found = find_model(NAME)
    assert found is not None and found.name == COMMIT
    assert_complete(found)
    assert (found / "config.json").is_symlink() and len(list((place.root / "blobs").iterdir())) == len(FILES)
    from huggingface_hub import snapshot_download

    cache = os.environ["HF_HUB_CACHE"]
    assert Path(snapshot_download(NAME, cache_dir=cache, local_files_only=True)).samefile(found)
    assert spread(group, place).received == (0,) * size
    # A blob on the first host that is not what its name says goes nowhere.
    damaged = (found / WEIGHTS[1]).resolve()
    damaged.write_bytes(bytes(damaged.stat().st_size)) if rank == 0 else damaged.unlink()
    if size > 1:
        refusal(Error, "is damaged: its SHA-256 is not the one in its name", place)
        assert rank == 0 or not damaged.exists()


def refused(directory: str) -> None:
    folder = own(directory)
    refusal(InvalidArgument, "no host has a config.json", Folder(folder))
    if rank == 0:
        write(folder, ["config.json"])
    refusal(InvalidArgument, "no weights", Folder(folder))
    if rank == 0:
        write(folder, list(FILES)[:4])
    refusal(InvalidArgument, f"{WEIGHTS[1]} is missing", Folder(folder))
    if rank == 0:
        (folder / "model.safetensors.index.json").unlink()
    refusal(InvalidArgument, f"{WEIGHTS[1]} is missing", Folder(folder))  # as the name of the first one says
    if rank == 0:
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../escaped.safetensors"}}')
    refusal(InvalidArgument, "leads out of the model's directory", Folder(folder))
    assert rank == 0 or not folder.exists()


def full_disk(directory: str) -> None:
    folder = own(directory)
    if rank == 0:
        write(folder)
        with (folder / "model-00003.safetensors").open("wb") as file:
            file.truncate(min(2**43, shutil.disk_usage(directory).total))  # a hole, which takes no room
    refusal((InvalidArgument, ResourceError), "nothing was written", Folder(folder))
    assert rank == 0 or not folder.exists()


def locked(directory: str) -> None:
    """Another pull writes to the folder of the last rank."""
    folder = write(own(directory)) if rank == 0 else own(directory)
    if rank == size - 1:
        with write_lock(folder):
            refusal(ResourceError, "another `mlxdist pull` writes to", Folder(folder))
    else:
        refusal(InvalidArgument, "another `mlxdist pull` writes to", Folder(folder))
    spread(group, Folder(folder))
    assert_complete(folder)


def changed(directory: str) -> None:
    """A file is written to while it is read."""
    folder = write(own(directory)) if rank == 0 else own(directory)

    def write_to_it(what: str, done: int, of: int) -> None:
        if rank == 0 and what == WEIGHTS[0]:
            with (folder / what).open("r+b") as file:
                file.write(b"new")

    refusal(Error, "was changed while it was read", Folder(folder), on_progress=write_to_it)
    assert rank == 0 or not (folder / WEIGHTS[0]).exists()


def shortened(directory: str) -> None:
    """Another pull has begun a file again, and ended early, after this one has compared what there was of it."""
    folder = write(own(directory)) if rank == 0 else own(directory)
    part = partial_path(folder / WEIGHTS[0])
    if rank:
        folder.mkdir(parents=True)
        part.write_bytes(FILES[WEIGHTS[0]][: CHUNK_BYTES + 1])

    def begin_again(what: str, done: int, of: int) -> None:
        if rank and what == f"comparing {WEIGHTS[1]}":
            os.truncate(part, 1)

    # A rank may learn of another's file before it looks at its own.
    refusal((OSError, Aborted) if rank else Aborted, "has become shorter", Folder(folder), on_progress=begin_again)
    assert rank == 0 or not (folder / WEIGHTS[0]).exists()


def damaged(directory: str) -> None:
    """Bytes change on their way, and nothing else notices."""
    folder = write(own(directory)) if rank == 0 else own(directory)
    refusal(TransportError, "has arrived damaged on rank", Folder(folder))


def writing_fails(directory: str) -> None:
    """The system refuses a write of the last rank, in the middle of a file."""
    folder = write(own(directory)) if rank == 0 else own(directory)
    last = rank == size - 1
    if last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_BYTES, CHUNK_BYTES))
    refusal(OSError if last else Aborted, "File too large", Folder(folder))
    assert not last or partial_path(folder / WEIGHTS[0]).stat().st_size == CHUNK_BYTES


def interrupted(directory: str) -> None:
    """The last rank disappears in the middle of a file."""
    folder = write(own(directory)) if rank == 0 else own(directory)

    def disappear(what: str, done: int, of: int) -> None:
        if rank == size - 1 and what == WEIGHTS[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        spread(group, Folder(folder), disappear)
    except (PeerLost, Aborted) as error:
        assert f"rank {size - 1}" in str(error), error
        print("others have noticed", flush=True)
        sys.exit(0)


def continued(directory: str) -> None:
    folder = own(directory)
    done = spread(group, Folder(folder))
    assert_complete(folder)
    assert 0 < done.received[-1] < SIZE, done


run_scenario(globals())
