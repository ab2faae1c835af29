"""One rank of test_checkpoint_ranks.py: checkpoints that several ranks save. Arguments: a directory, and what to do."""

import errno
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map

import mlxdist
import mlxdist.nn as mnn
from mlxdist.nn.layout.cut import Cut
from mlxdist.nn.models.cuts import cuts
from mlxdist.train import Checkpoints, fully_shard
from mlxdist.train.checkpoint import checkpoints as module
from mlxdist.train.checkpoint import saving
from mlxdist.train.checkpoint.directory import remove
from mlxdist.train.checkpoint.reading import Reader
from mlxdist.train.config import CheckpointConfig
from mlxdist.train.saves import Saves

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

group = mlxdist.init()
rank, size = group.rank(), group.size()
directory = Path(sys.argv[1])
PROMPT = mx.array([[5, 17, 3, 60, 21, 9, 44]])
readers: list[Reader] = []


class Recorded(Reader):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        readers.append(self)


def whole() -> nn.Module:
    mx.random.seed(0)
    return tiny_models.build("llama")


def cut(ranks: int = size) -> nn.Module:
    model = whole()
    return model if ranks == 1 else mnn.shard_model(model, mnn.plan_shards(model, tp=ranks), group=group)


def moments(model: nn.Module, found: dict[str, Cut]) -> optim.Optimizer:
    """As if there had been a step: known ones, of which each rank has its part."""
    optimizer = optim.AdamW(1e-3)
    optimizer.init(model.trainable_parameters())
    parameters = dict(tree_flatten(whole().parameters()))
    for path, value in parameters.items():
        state = optimizer.state
        for name in path.split("."):
            state = state[int(name) if isinstance(state, list) else name]
        state["m"], state["v"] = found[path].take(value * 2), found[path].take(value * value)
    return optimizer


def equal(a: object, b: object) -> bool:
    a, b = dict(tree_flatten(a)), dict(tree_flatten(b))
    return a.keys() == b.keys() and all(mx.array_equal(a[name], b[name]) for name in a)


def nothing(model: nn.Module) -> nn.Module:
    model.update(tree_map(mx.zeros_like, model.parameters()))
    return model


def written(step: int, where: Path = directory) -> list[Path]:
    return sorted((where / f"step-{step:08}").glob("rank-*"))


def comes_back() -> None:
    """Each rank saves a half of what is sharded, and some of the rest; the state of random numbers is its own."""
    model = cut()
    optimizer = moments(model, cuts(model))
    state, own = {"model": model, "optimizer": optimizer}, {"random": mx.array([rank, 7])}
    with Checkpoints(directory) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state, own=own)
    total = 3 * sum(array.nbytes for _, array in tree_flatten(whole().parameters()))
    sizes = [path.stat().st_size for path in written(30)]
    assert len(sizes) == size and total <= sum(sizes) < 1.2 * total + 10_000, (sizes, total)
    assert max(sizes) < 1.1 * min(sizes) + 5000, sizes
    assert not written(10)

    again, theirs, mine = nothing(cut()), optim.AdamW(1e-3), {"random": mx.array(0)}
    assert Checkpoints(directory).load({"model": again, "optimizer": theirs}, own=mine) == 30
    assert equal(again.parameters(), model.parameters()) and equal(theirs.state, optimizer.state) and equal(mine, own)


def on_other_ranks() -> None:
    """In another job: the same model, sharded over other ranks or not at all, from a checkpoint of 2."""
    model = nothing(cut())
    found = cuts(model)
    optimizer, own = optim.AdamW(1e-3), {"random": mx.array([3])}
    module.complete.__globals__["Reader"] = Recorded
    state = {"model": model, "optimizer": optimizer}
    assert Checkpoints(directory).load(state, own=own, other_run=True) == 30
    assert own["random"].tolist() == [3], "as it was, or as two ranks have saved it"
    for path, value in tree_flatten(whole().parameters()):
        assert mx.array_equal(dict(tree_flatten(model.parameters()))[path], found[path].take(value))
    assert equal(optimizer.state, moments(model, found).state | {"learning_rate": optimizer.state["learning_rate"]})
    mine = own if size == 2 else {}  # 2 ranks have saved
    held = sum(array.nbytes for _, array in tree_flatten([model.parameters(), optimizer.state, mine]))
    (reader,) = readers
    assert reader.bytes_read == held and reader.bytes_sent == 0, (reader.bytes_read, held)
    assert mx.allclose(model(PROMPT), whole()(PROMPT), atol=1e-4)


def saves_fully_sharded() -> None:
    model = fully_shard(whole())
    found = cuts(model)
    assert not any(cut.is_full for cut in found.values())
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(30, {"model": model, "optimizer": moments(model, found)}, own={"random": mx.array([3])})


def loads_fully_sharded() -> None:
    """What ranks have saved whose model was sharded along axes, or flat over another number of them."""
    model = fully_shard(nothing(whole()))
    found, optimizer = cuts(model), optim.AdamW(1e-3)
    module.complete.__globals__["Reader"] = Recorded
    assert Checkpoints(directory).load({"model": model, "optimizer": optimizer}, other_run=True) == 30
    for path, value in tree_flatten(whole().parameters()):
        assert mx.array_equal(dict(tree_flatten(model.parameters()))[path], found[path].take(value)), path
    assert equal(optimizer.state, moments(model, found).state)
    held = sum(array.nbytes for _, array in tree_flatten([model.parameters(), optimizer.state]))
    assert readers[0].bytes_read <= held, (readers[0].bytes_read, held)
    assert mx.allclose(model(PROMPT), whole()(PROMPT), atol=1e-4)


def flat(shape: tuple[int, ...], ranks: int = size, number: int = rank) -> Cut:
    """As fully_shard has it: equal parts of what is flattened, with zeros at the end of the last ones."""
    count = 1
    for length in shape:
        count *= length
    length = -(-count // ranks)
    return Cut.full(shape).flattened(min(number * length, count), min((number + 1) * length, count), length, group)


SHAPES = {"a": (5, 7), "b": (3,), "c": (4, 2, 3), "d": ()}
FULL = {name: mx.random.normal(shape, key=mx.random.key(len(name))) for name, shape in SHAPES.items()}


def saves_flat() -> None:
    found = {name: flat(shape) for name, shape in SHAPES.items()}
    tree = {name: found[name].take(FULL[name]) for name in SHAPES}
    Checkpoints(directory).save(1, tree | {"steps": 3}, cuts=found)


def loads_flat() -> None:
    """Flat over these ranks, and cut along an axis."""
    found = {name: flat(shape) for name, shape in SHAPES.items()}
    tree = {name: mx.zeros(found[name].local_shape) for name in SHAPES}
    assert Checkpoints(directory).load(tree, cuts=found, other_run=True) == 1
    assert equal(tree, {name: found[name].take(FULL[name]) for name in SHAPES})
    ends = [7 * number // size for number in range(size + 1)]
    along = Cut.full((5, 7)).along(1, [[(start, stop)] for start, stop in zip(ends, ends[1:])], group)
    tree = {"a": mx.zeros(along.local_shape), "b": mx.zeros(3)}
    assert Checkpoints(directory).load(tree, cuts={"a": along} if size > 1 else {}, other_run=True) == 1
    assert mx.array_equal(tree["a"], along.take(FULL["a"])) and mx.array_equal(tree["b"], FULL["b"])


def disks_of_their_own() -> None:
    """Two hosts, of which each has a directory that the other does not see."""
    mine = directory / f"host-{rank % 2}"
    model = cut()
    found = cuts(model)
    with Checkpoints(mine, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"model": model, "values": [step], "scalar": mx.array(step)}, own={"rank": rank})
    assert [path.name.split("-")[1] for path in written(2, mine)] == [str(rank) for rank in range(rank % 2, size, 2)]
    assert not written(1, mine) and (mine / "step-00000002" / "manifest.json").exists()

    module.complete.__globals__["Reader"] = Recorded
    state, own = {"model": nothing(cut()), "values": [0], "scalar": mx.array(0)}, {"rank": -1}
    assert Checkpoints(mine).load(state, own=own) == 2 and state["scalar"].item() == 2
    assert equal(state["model"].parameters(), model.parameters()) and (state["values"], own) == ([2], {"rank": rank})
    shared = sum(array.nbytes for path, array in tree_flatten(model.parameters()) if found[path].is_full)
    sent = sum(mlxdist.all_gather(mx.array([readers[0].bytes_sent])).tolist())
    heads = sum(
        array.nbytes for path, array in tree_flatten(whole().parameters()) if "k_proj" in path or "v_proj" in path
    )
    # To the other host; of 4 ranks, two on different hosts hold the same KV heads, and one of them has written these.
    expected = (shared + 4) * (size // 2) + (heads if size == 4 else 0)
    assert sent == expected, (sent, expected)

    mlxdist.barrier()
    if rank == 1:
        written(2, mine)[0].unlink()
    mlxdist.barrier()
    with pytest.raises(mlxdist.InvalidArgument, match="step 2 lacks the file rank-1-of"):
        Checkpoints(mine).load(state)


def refuses(call, words: str, kind: type = mlxdist.InvalidArgument) -> None:
    with pytest.raises(kind, match=words):
        call()
    mlxdist.barrier()


def failures() -> None:
    """Of one rank are errors on all, before anything is written."""
    checkpoints = Checkpoints(directory / "failures")
    tree = {"w": mx.ones(2)}
    refuses(lambda: checkpoints.save(1, {"w": None if rank else b""} if rank != 1 else tree), r"'w' is a bytes.*rank 0")
    refuses(lambda: checkpoints.save(rank, tree), "disagree about the step: 0 on rank 0, 1 on rank 1")
    refuses(lambda: checkpoints.save(1, {"n": rank}), "different values of 'n': 0 and, on rank 1, 1")
    refuses(lambda: checkpoints.save(1, {"w": mx.array([rank])}), "different values of 'w': of ranks 0 and 1")
    refuses(lambda: checkpoints.save(1, {"w": mx.zeros(2 + rank)}), "'w' is F32 of shape .3,. on rank 1, but F32 of")
    large = mx.zeros(100_000).at[-1].add(rank)
    refuses(lambda: checkpoints.save(1, {"v": tree, "w": large}), "different values of 'w'")
    model = cut()
    refuses(lambda: checkpoints.save(1, {"model": model.parameters()}), "different values of 'model.* belongs into own")
    adafactor = optim.Adafactor(1e-3)
    adafactor.init(model.trainable_parameters())
    refuses(lambda: checkpoints.save(1, {"m": model, "o": adafactor}), "'o.*' has the shape .* pass .* as own=")
    refuses(lambda: checkpoints.load(tree, step=rank), "ranks disagree about step and other_run")
    refuses(lambda: Checkpoints(None if rank == 1 else directory), "None is no path")
    refuses(lambda: Checkpoints(directory, keep=1 + rank), "disagree about keep")
    assert not list((directory / "failures").glob("step-*"))
    checkpoints.save(1, {"m": model}, own={"o": adafactor})
    checkpoints.wait()
    mlxdist.barrier()
    if rank == 0:
        (directory / "file").write_text("mine")
    mlxdist.barrier()
    refuses(lambda: Checkpoints(directory / "file").load(tree), "file is a file, not a directory")


def a_disk_is_full() -> None:
    """On rank 1: the next save fails on all; the one before stays, and nothing of the failed one."""
    checkpoints, write = Checkpoints(directory / "full"), saving.write_tensors
    tree, own = {"w": mx.ones(1000)}, {"r": mx.array([rank])}
    checkpoints.save(1, tree, own=own)
    checkpoints.wait()

    def fail(path: Path, *arguments) -> None:
        path.write_bytes(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    saving.write_tensors = fail if rank == 1 else write
    checkpoints.save(2, tree, own=own)
    refuses(lambda: checkpoints.save(3, tree, own=own), r"rank-1-of-.* No space left.*rank 1 on", mlxdist.ResourceError)
    saving.write_tensors = write
    mlxdist.barrier()
    assert checkpoints.latest() == 1 and not written(2, directory / "full")
    checkpoints.save(3, tree, own=own)
    assert checkpoints.latest() == 3


def too_little_room() -> None:
    """On a disk of 1 MiB that both ranks share, with inodes for two checkpoints and a half: an error on all ranks
    before anything is written. Half a disk of each rank fits alone."""
    checkpoints, tree = Checkpoints(directory), {"w": mx.ones(1000)}
    large, small = ({"r": mx.full(count, float(rank))} for count in (150_000, 100))
    words = rf"step 1 needs 1.1\d MiB in {directory} of ranks 0 and 1, whose disk has .* KiB left; nothing was written"
    refuses(lambda: checkpoints.save(1, tree, own=large), words, mlxdist.ResourceError)
    assert not list(directory.glob("step-*"))
    for step in (1, 2):
        checkpoints.save(step, tree, own=small)
    words = rf"step 3 needs 4 inodes in {directory} of ranks 0 and 1, whose disk has 2 left; nothing was written"
    refuses(lambda: checkpoints.save(3, tree, own=small), words, mlxdist.ResourceError)
    assert checkpoints.latest() == 2 and not (directory / "step-00000003").exists()
    mlxdist.barrier()
    if rank == 0:
        remove(directory / "step-00000001")
        remove(directory / "step-00000002")
    mlxdist.barrier()
    checkpoints.save(3, tree, own=small)
    assert checkpoints.latest() == 3


def a_training_goes_on() -> None:
    """Past one save that has failed, and not past two in a row, or the last one."""
    with Checkpoints(directory, keep=1) as checkpoints:
        checkpoints.load({"w": mx.zeros(0)})
        state, small, large = {}, mx.ones(1000), mx.ones(400_000)
        saves = Saves(checkpoints, state, CheckpointConfig(), group)
        for step, state["w"] in enumerate((small, large, small, small, large), 4):
            saves.save(step, is_last=False)
        assert checkpoints.latest() == 7
        with pytest.raises(mlxdist.ResourceError, match="step 9 needs"):
            saves.save(9, is_last=False)
        with pytest.raises(mlxdist.ResourceError, match="step 9 needs"):
            Saves(checkpoints, state, CheckpointConfig(), group).save(9, is_last=True)
        assert checkpoints.latest() == 7


def a_flipped_bit() -> None:
    """In the file of rank 1: all ranks load the one before."""
    where = directory / "flipped"
    with Checkpoints(where) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"n": step}, own={"r": mx.array([rank])})
    mlxdist.barrier()
    if rank == 0:
        (path,) = (path for path in written(2, where) if path.name.startswith("rank-1"))
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    mlxdist.barrier()
    tree = {"n": 0}
    with warnings.catch_warnings(record=True) as caught:
        assert Checkpoints(where).load(tree) == 1 and tree["n"] == 1
    assert len(caught) == (rank == 0) and all("step 2 has a file rank-1" in str(one.message) for one in caught)


def training_goes_on() -> None:
    """While rank 1 writes for long, collectives and a save's arrays: neither waits, the next save does."""
    write = saving.write_tensors
    go_on = threading.Event()
    saving.write_tensors = lambda *arguments: (rank == 1 and go_on.wait(60), write(*arguments))[1]
    checkpoints, own = Checkpoints(directory / "slow"), {"r": mx.array([rank])}
    checkpoints.save(1, {"n": 1}, own=own)
    for _ in range(20):  # rank 0's thread waits in a collective of the save's own group
        assert mlxdist.all_sum(mx.ones(1000))[0].item() == size
        time.sleep(0.01)
    assert not (directory / "slow" / "step-00000001" / "manifest.json").exists()
    mlxdist.barrier()
    go_on.set()
    saving.write_tensors = write
    checkpoints.save(2, {"n": 2}, own=own)
    assert checkpoints.latest() == 2


def one_rank_dies() -> None:
    """While it writes: the others get the error, and do not hang."""
    checkpoints = Checkpoints(directory / "dead")
    if rank == 1:
        saving.write_tensors = lambda *arguments: os._exit(3)
    checkpoints.save(1, {"n": 1}, own={"r": mx.array([rank])})
    try:
        checkpoints.wait()
    except mlxdist.PeerLost as error:
        print("lost", error, flush=True)


def mesh() -> None:
    made = mlxdist.mesh(dp=size // 2, tp=2)
    model = whole()
    model = mnn.shard_model(model, mnn.plan_shards(model, tp=2), group=made["tp"])
    with Checkpoints(directory / "mesh", mesh=made) as checkpoints:
        checkpoints.save(1, {"model": model})
    total = sum(array.nbytes for _, array in tree_flatten(whole().parameters()))
    sizes = [path.stat().st_size for path in written(1, directory / "mesh")]
    assert len(sizes) == size and total < sum(sizes) < 1.2 * total + 10_000, "replicas share the work"
    manifest = next(checkpoints_of(directory / "mesh")).manifest
    assert manifest.mesh == {axis: length for axis, length in {"dp": size // 2, "tp": 2}.items() if length > 1}


def checkpoints_of(where: Path):
    return module.complete("test", where, group, module.Problems())


for name in sys.argv[2:]:
    globals()[name]()
    mlxdist.barrier()
print("done")
