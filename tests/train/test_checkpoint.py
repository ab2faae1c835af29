"""train.Checkpoints in one process: what comes back, and that half a checkpoint is never taken for one."""

import json
import signal
import subprocess
import sys
import threading
import warnings
import zlib

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxdist.base import errors
from mlxdist.base.environment import Environment
from mlxdist.train import Checkpoints
from mlxdist.train.checkpoint import saving

TREE = {"weights": mx.arange(1000)}


def save(directory, *steps, tree=TREE, **options):
    with Checkpoints(directory, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, tree)
    return checkpoints


def load(directory, **options):
    """The tree of `save`, and the step."""
    tree = {"weights": mx.zeros(0)}
    return Checkpoints(directory).load(tree, **options), tree["weights"]


def there(directory):
    return sorted(int(path.name[5:]) for path in directory.glob("step-*"))


def tensors(directory, step):
    (path,) = (directory / f"step-{step:08}").glob("rank-*.safetensors")
    return path


def equal(a, b):
    a, b = dict(tree_flatten(a)), dict(tree_flatten(b))
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and mx.array_equal(a[k], b[k]) for k in a)


DTYPES = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 complex64".split()


def test_any_tree_comes_back(tmp_path):
    def tree(fill):
        return {
            "layers": [{"weight": fill * mx.random.normal((3, 4))}, {"weight": mx.zeros((0, 2))}],
            "dtypes": {
                name: (fill * mx.arange(-2, 5)).astype(getattr(mx, name if name != "bool" else "bool_"))
                for name in DTYPES
            },
            "16 bit": (mx.array([fill * 1.5, -2.25], mx.bfloat16), mx.array([1e-3], mx.float16)),
            "scalar": mx.array(fill * 2**62, mx.uint64),
            "deep": {
                "deeper": {"transposed": fill * mx.arange(6).reshape(2, 3).T, "strided": fill * mx.arange(9)[::2]}
            },
        }

    saved, into = tree(1), tree(0)
    checkpoints = save(tmp_path / "new" / "directory", 7, tree=saved)
    assert checkpoints.load(into) == 7 and equal(into, saved)
    assert isinstance(into["16 bit"], tuple)


def test_values_come_back(tmp_path):
    values = {
        "epoch": 3,
        "name": "a \u00e4 \ud800",
        "rate": 0.1,
        "done": False,
        "none": None,
        "large": -(2**70),
        "list": [1, [2.5, ""]],
    }
    into = {"epoch": 0, "name": 0, "rate": 0, "done": 0, "none": 0, "large": 0, "list": [0, [0, 0]]}
    assert save(tmp_path, 1, tree=values).load(into) == 1
    assert into == values and into["done"] is False


def test_training_goes_on_as_if_nothing_had_happened(tmp_path):
    def start():
        mx.random.seed(0)
        return nn.Linear(8, 8), optim.AdamW(optim.cosine_decay(1e-2, 10), bias_correction=True)

    def train(model, optimizer, steps):
        for step in steps:
            gradients = nn.value_and_grad(model, lambda m: m(mx.full((2, 8), step + 1.0)).square().sum())(model)[1]
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state)

    undisturbed, optimizer = start()
    train(undisturbed, optimizer, range(8))

    model, optimizer = start()
    train(model, optimizer, range(5))
    save(tmp_path, 5, tree={"model": model, "optimizer": optimizer})
    model, optimizer = start()
    step = Checkpoints(tmp_path).load({"model": model, "optimizer": optimizer})
    train(model, optimizer, range(step, 8))
    assert equal(model.parameters(), undisturbed.parameters())


def test_an_object_with_a_state_and_restore(tmp_path):
    class Position:
        def __init__(self, place):
            self.place = place

        @property
        def state(self):
            return {"place": self.place, "seeds": [mx.array([1, 2])]}

        def restore(self, state):
            self.place, self.seeds = state["place"], state["seeds"]

    into = Position(0)
    save(tmp_path, 1, tree={"data": Position(17)}).load({"data": into})
    assert into.place == 17 and into.seeds[0].tolist() == [1, 2]


def test_a_part_of_what_was_saved(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    checkpoints = save(tmp_path, 1, tree={"model": model, "optimizer": optim.Adam(0.1), "more": mx.ones(2)})
    assert checkpoints.load({"model": other}) == 1
    assert equal(model.parameters(), other.parameters())


def test_what_is_saved_is_what_was_there(tmp_path, monkeypatch):
    """Also if the program goes on before it is written: with other arrays, in place of or in the same ones."""
    go_on, write = threading.Event(), saving.write_tensors
    monkeypatch.setattr(saving, "write_tensors", lambda *arguments: go_on.wait(20) and write(*arguments))
    tree = {"a": mx.arange(4.0), "b": mx.arange(1 << 20), "weights": mx.zeros(3)}
    before = {"a": mx.arange(4.0), "b": mx.arange(1 << 20), "weights": mx.zeros(3)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree)
    tree["a"][1] = 7
    tree["b"] += 1
    tree["weights"] = mx.ones(3)
    mx.eval(tree)
    go_on.set()
    checkpoints.wait()
    assert not equal(tree, before) and checkpoints.load(tree) == 1 and equal(tree, before)


def test_a_slice_is_saved_without_the_rest(tmp_path):
    large = mx.zeros((1000, 1000))
    save(tmp_path, 1, tree={"row": large[3], "column": large[:, 3]})
    assert tensors(tmp_path, 1).stat().st_size < 10_000


def test_the_file_is_safetensors(tmp_path):
    save(tmp_path, 1)
    assert equal(mx.load(str(tensors(tmp_path, 1))), TREE)


def test_the_latest_ones_stay(tmp_path):
    checkpoints = save(tmp_path, 1, 9, 10, 100_000_000)
    assert there(tmp_path) == [10, 100_000_000] and checkpoints.latest() == 100_000_000
    save(tmp_path, 100_000_001, keep=1)
    assert there(tmp_path) == [100_000_001]
    save(tmp_path, 100_000_002, 100_000_003, 100_000_010, 100_000_011, 100_000_012, keep=1, keep_every=10)
    assert there(tmp_path) == [100_000_010, 100_000_012]


def test_the_same_step_twice(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 3, tree={"weights": mx.zeros(2)})
    assert len(list(tmp_path.glob("*/*"))) == 2 and load(tmp_path)[1].shape == (2,)


@pytest.mark.parametrize("length", [0, 7, 8, 100, 4000, "all but one", "one more"])
@pytest.mark.parametrize("name", ["rank-*.safetensors", "manifest.json"])
def test_a_torn_file_is_not_taken_for_a_checkpoint(tmp_path, name, length):
    save(tmp_path, 1, 2)
    (torn,) = (tmp_path / "step-00000002").glob(name)
    data = torn.read_bytes()
    lengths = {"all but one": len(data) - 2, "one more": len(data) + 1}  # the last one of a manifest ends the line
    length = lengths[length] if length in lengths else min(length, len(data) - 2)
    torn.write_bytes((data + b"x")[:length])
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 1
    with pytest.raises(errors.InvalidArgument, match="the checkpoint of step 2 (has a damaged|lacks the file)"):
        checkpoints.load(dict(TREE), step=2)
    with pytest.warns(UserWarning, match=r"step 1 is loaded from .*, since the checkpoint of step 2 (has|lacks)"):
        assert checkpoints.load(dict(TREE)) == 1
    checkpoints.save(2, TREE)
    assert checkpoints.latest() == 2, "rewritten"


def test_without_a_manifest_it_is_none(tmp_path):
    """A first save that was killed leaves files: training begins from step 0, and they go with the next one."""
    save(tmp_path, 5)
    (tmp_path / "step-00000005" / "manifest.json").unlink()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None and checkpoints.load(dict(TREE)) is None
    checkpoints.save(1, TREE)
    checkpoints.wait()
    assert there(tmp_path) == [1]


def test_a_torn_file_does_not_count_when_old_ones_go(tmp_path):
    save(tmp_path, 1, 2)
    tensors(tmp_path, 2).write_bytes(b"")
    save(tmp_path, 3)
    assert there(tmp_path) == [1, 2, 3] and Checkpoints(tmp_path).latest() == 3
    save(tmp_path, 4)
    assert there(tmp_path) == [3, 4]


def test_a_flipped_bit_leads_to_the_one_before(tmp_path):
    """And saving goes on from there."""
    save(tmp_path, 100, 200)
    path = tensors(tmp_path, 200)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 200, "sizes alone are compared"
    with pytest.warns(UserWarning, match=f"step 100 is loaded .* step 200 has a file {path.name} .*: its CRC-32 diff"):
        assert checkpoints.load(dict(TREE)) == 100
    checkpoints.save(150, TREE)
    checkpoints.wait()
    assert there(tmp_path) == [100, 150]


def test_where_all_are_damaged_training_does_not_begin_again(tmp_path):
    save(tmp_path, 1, 2)
    for step in (1, 2):
        tensors(tmp_path, step).write_bytes(b"")
    with pytest.raises(
        errors.InvalidArgument, match="checkpoint of step 1 lacks .* step 2 lacks .* from step 0, remove"
    ):
        load(tmp_path)


def test_no_flipped_bit_is_loaded(tmp_path):
    """At any place of the files: in headers, in the data of every array, in the manifest."""
    tree = {"weights": mx.arange(8, dtype=mx.float32), "half": mx.ones((3, 1), mx.bfloat16), "mask": mx.array([True])}
    save(tmp_path, 3, tree=tree)
    loaded = []
    for path in (tensors(tmp_path, 3), tmp_path / "step-00000003" / "manifest.json"):
        data = path.read_bytes()
        for place in range(len(data) - 1):  # a line ends the manifest, in which other blanks mean the same
            flipped = bytearray(data)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            into = dict(tree)
            try:
                Checkpoints(tmp_path).load(into, other_run=True)
            except errors.InvalidArgument as error:
                assert "step 3 has" in str(error) or "step 3 lacks" in str(error)
            else:
                if not equal(into, tree) or path.suffix == ".safetensors":
                    loaded.append((path.name, place))
        path.write_bytes(data)
    assert equal(into, tree) and Checkpoints(tmp_path).load(into) == 3
    assert loaded == []


def forge(directory, step, change):
    """Another manifest, with the right CRC-32."""
    path = directory / f"step-{step:08}" / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"]
    change(manifest)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    path.write_text(f'{{"crc32": "{zlib.crc32(text.encode()):08x}", "manifest": {text}}}\n')


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(format=2),
        lambda manifest: manifest["files"][0].update(name="../../secret"),
        lambda manifest: manifest["arrays"]["weights"].__setitem__(0, "F4"),
        lambda manifest: manifest["arrays"]["weights"][2][0].__setitem__(0, 1),
        lambda manifest: manifest["arrays"].update(weights=[]),
        lambda manifest: manifest.pop("step"),
        lambda manifest: manifest.update(arrays=[]),
        lambda manifest: manifest["arrays"]["weights"][2].clear(),
        lambda manifest: manifest["arrays"].update(weights=["I32", [2000], [[0]]]),
        lambda manifest: manifest["arrays"].update(weights=["F32", [1000], [[0]]]),
    ],
)
def test_a_manifest_that_does_not_fit(tmp_path, change):
    save(tmp_path, 1)
    forge(tmp_path, 1, change)
    with pytest.raises(errors.InvalidArgument, match="the checkpoint of step 1 has"):
        load(tmp_path)


@pytest.mark.parametrize(
    "tree, words",
    [
        ({"model": nn.Linear(4, 5)}, r"'model.weight' has the shape \(5, 3\) in it, and \(5, 4\) here"),
        ({"model": nn.Linear(3, 5, bias=False)}, "it has 'model.bias', which the model here has not"),
        ({"model": nn.Sequential(nn.Linear(3, 5))}, "it has no 'model.layers.0.weight'"),
        ({"weights": mx.zeros(3)}, "it has no 'weights'"),
        ({"epoch": 0}, "it has no 'epoch'"),
    ],
)
def test_a_checkpoint_of_another_model(tmp_path, tree, words):
    checkpoints = save(tmp_path, 1, tree={"model": nn.Linear(3, 5)})
    before = dict(tree_flatten(tree["model"].parameters())) if "model" in tree else {}
    with pytest.raises(errors.InvalidArgument, match=f"of step 1 is of another model: .*{words}"):
        checkpoints.load(tree)
    assert all(array is before[name] for name, array in tree_flatten(tree["model"].parameters())) if before else True


KILLED = """
import sys, mlx.core as mx
from mlxdist.train import Checkpoints
tree = {f"w{i}": mx.zeros(1 << 20) for i in range(16)}
checkpoints, step = Checkpoints(sys.argv[1]), 1
print("saving", flush=True)
while True:
    checkpoints.save(step, {"step": step, **tree})
    step += 1
"""


def test_a_writer_that_is_killed_leaves_complete_checkpoints(tmp_path):
    """64 MiB each, so that it is killed while it writes."""
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    writer.stdout.readline()
    unfinished = lambda: [path for path in tmp_path.glob("step-*") if not (path / "manifest.json").exists()]
    while not (list(tmp_path.glob("*/manifest.json")) and unfinished()):
        assert writer.poll() is None
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(errors.InvalidArgument, match="of another run"):
        checkpoints.save(10**6, TREE)
    tree = {"step": 0} | {f"w{i}": mx.ones(1) for i in range(16)}
    with warnings.catch_warnings(action="ignore"):  # it may have been killed after the first
        step = checkpoints.load(tree, other_run=True)
    assert tree["step"] == step and tree["w15"].shape == (1 << 20,)
    checkpoints.save(step + 1, tree)
    checkpoints.wait()
    assert not unfinished(), "what it left is gone"


def test_no_checkpoint_is_saved_before_a_later_one(tmp_path):
    save(tmp_path, 700)
    with pytest.raises(errors.InvalidArgument, match="checkpoint of step 700, later than 100"):
        save(tmp_path, 100)


def test_other_files_are_left_alone(tmp_path):
    for name in ("step-1", "step-00000009.bak", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    assert Checkpoints(tmp_path).latest() is None
    save(tmp_path, 1)
    (tmp_path / "step-00000001" / "notes").write_text("mine")
    save(tmp_path, 2, 3)
    assert (tmp_path / "step-00000001" / "notes").read_text() == "mine"
    assert [path.name for path in (tmp_path / "step-00000001").iterdir()] == ["notes"]
    assert Checkpoints(tmp_path).latest() == 3


def test_parameters_of_another_dtype(tmp_path):
    checkpoints = save(tmp_path, 1, tree={"model": nn.Linear(3, 5)})
    model = nn.Linear(3, 5)
    model.set_dtype(mx.float16)
    before = dict(tree_flatten(model.parameters()))
    with pytest.raises(
        errors.InvalidArgument, match="'model.(weight|bias)' is mlx.core.float32 .* mlx.core.float16 here"
    ):
        checkpoints.load({"model": model})
    assert equal(before, model.parameters())


def test_a_tree_that_contains_itself(tmp_path):
    tree = {"list": [mx.ones(2)]}
    tree["list"].append(tree)
    for call in (lambda: Checkpoints(tmp_path).save(1, tree), lambda: Checkpoints(tmp_path).load(tree)):
        with pytest.raises(errors.InvalidArgument, match="the tree contains itself at 'list.1'"):
            call()
    save(tmp_path, 1, tree={"a": TREE, "b": TREE})  # twice the same is no cycle


def test_no_directory_has_no_checkpoint(tmp_path):
    assert Checkpoints(tmp_path / "none").latest() is None
    assert Checkpoints(tmp_path / "none").load(dict(TREE)) is None
    with pytest.raises(errors.InvalidArgument, match="none has no checkpoint of step 3"):
        Checkpoints(tmp_path / "none").load(dict(TREE), step=3)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "tree, words",
    [
        ({"step": b"3"}, "the leaf 'step' is a bytes, not an mx.array"),
        ({"a": [mx.zeros(1), {3}]}, "the leaf 'a.1' is a set"),
        ({"a": np.zeros(1)}, "the leaf 'a' is a ndarray"),
        ({"a": float("nan")}, "the leaf 'a' is nan"),
        ({}, "the tree is empty"),
        ({"a.b": mx.zeros(1)}, "without a dot"),
        ({"a/b": mx.zeros(1)}, "without a dot"),
        ({"0": mx.zeros(1)}, "no number"),
        ({"": mx.zeros(1)}, "the key ''"),
        ({3: mx.zeros(1)}, "the key 3"),
    ],
)
def test_trees_that_would_not_come_back_are_rejected(tmp_path, tree, words):
    for call in (lambda: save(tmp_path / "new", 1, tree=tree), lambda: Checkpoints(tmp_path / "new").load(tree)):
        with pytest.raises(errors.InvalidArgument, match=f"Checkpoints.(save|load): .*{words}"):
            call()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", [-1, 100.0, True, "1", None, 10**18])
def test_bad_steps(tmp_path, step):
    with pytest.raises(errors.InvalidArgument, match="step must be an integer from 0 to [0-9]+, not "):
        save(tmp_path / "new", step)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("option", ["keep", "keep_every"])
@pytest.mark.parametrize("number", [0, -1, 2.0, True, "2"])
def test_bad_numbers(tmp_path, option, number):
    with pytest.raises(errors.InvalidArgument, match=f"{option} must be an integer from 1 to [0-9]+, not "):
        Checkpoints(tmp_path, **{option: number})


@pytest.mark.parametrize("path", [None, 5, b"directory", "a\0b"])
def test_what_is_no_path_is_rejected(path):
    with pytest.raises(errors.InvalidArgument, match="Checkpoints: .* is no path"):
        Checkpoints(path)


def test_the_last_step_of_all(tmp_path):
    save(tmp_path, np.int64(10**18 - 1))
    assert load(tmp_path)[0] == 10**18 - 1
    (tmp_path / "step-1000000000000000000").mkdir()
    assert Checkpoints(tmp_path).latest() == 10**18 - 1


def test_a_directory_that_is_a_file(tmp_path):
    """Not None, as if no step had been done."""
    (tmp_path / "file").write_text("mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        for call in (lambda: Checkpoints(directory).latest(), lambda: load(directory)):
            with pytest.raises(errors.InvalidArgument, match=f"{directory} is a file, not a directory"):
                call()
        with pytest.raises(errors.ResourceError, match=f"{directory} cannot be written"):
            save(directory, 1)
    assert (tmp_path / "file").read_text() == "mine"


def in_another_process(program, *arguments):
    program = f"import sys, mlx.core as mx; from mlxdist.train import Checkpoints; {program}"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout


SAVE = "Checkpoints(sys.argv[1]).save(int(sys.argv[2]), {'weights': mx.zeros(2)})"


def test_another_run_is_gone_on_with_only_on_purpose(tmp_path):
    """Without a launcher each process is a run."""
    in_another_process(SAVE, tmp_path, 7)
    with pytest.raises(errors.InvalidArgument, match=r"of another run, [0-9a-f]{16}; .* other_run=True"):
        load(tmp_path)
    with pytest.raises(errors.InvalidArgument, match=r"step 7 of another run, [0-9a-f]{16}; .* other_run=True"):
        save(tmp_path, 8)
    assert there(tmp_path) == [7]
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load(dict(TREE), other_run=True) == 7
    checkpoints.save(8, TREE)
    assert checkpoints.load(dict(TREE)) == 8
    assert there(tmp_path) == [7, 8], "the one before stays"


@pytest.mark.parametrize(
    "variables, run",
    [
        ({"MLXDIST_JOB": "a-1"}, "a-1"),
        ({"MLXDIST_JOB": "a-1", "MLXDIST_RESTART_COUNT": "1"}, "a"),
        ({"MLXDIST_JOB": "a-1-12", "MLXDIST_RESTART_COUNT": "12"}, "a-1"),
        ({"MLXDIST_JOB": "a", "MLXDIST_RESTART_COUNT": "1"}, "a"),
    ],
)
def test_all_starts_of_a_job_are_one_run(variables, run):
    assert Environment.read(variables).run == run


def test_a_process_without_a_job_is_a_run():
    assert Environment.read({}).run == Environment.read({}).run != ""


def test_a_program_that_ends_has_its_last_checkpoint(tmp_path):
    """Without wait()."""
    in_another_process(SAVE, tmp_path, 7)
    assert Checkpoints(tmp_path).latest() == 7


def test_no_thread_is_left(tmp_path):
    save(tmp_path, 1, 2)
    assert not [thread for thread in threading.enumerate() if "checkpoint" in thread.name]


def test_bytes_of_a_manifest_are_few(tmp_path):
    """A hundred bytes for each array of each rank."""
    save(tmp_path, 1, tree={f"array {i}": mx.zeros(3) for i in range(1000)})
    assert (tmp_path / "step-00000001" / "manifest.json").stat().st_size < 60_000
