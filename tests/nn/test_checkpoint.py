"""mlxdist.save_checkpoint and its kin: what comes back, and that half a file is never taken for a checkpoint."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxdist import latest_checkpoint, load_checkpoint, save_checkpoint
from mlxdist.base import errors
from mlxdist.base.environment import Environment

TREE = {"weights": mx.arange(1000)}


def save(directory, *steps, **options):
    return [save_checkpoint(directory, TREE, step, **options) for step in steps]


def equal(a, b):
    a, b = dict(tree_flatten(a)), dict(tree_flatten(b))
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and mx.array_equal(a[k], b[k]) for k in a)


def test_any_tree_comes_back(tmp_path):
    tree = {
        "layers": [{"weight": mx.random.normal((3, 4))}, {"weight": mx.zeros((0, 2))}],
        "16 bit": [mx.array([1.5, -2.25], mx.bfloat16), mx.array([1e-3], mx.float16)],
        "step": mx.array(2**62, mx.uint64),
        "deep": {"deeper": {"mask": mx.array([True, False]), "transposed": mx.arange(6).reshape(2, 3).T}},
    }
    path = save_checkpoint(tmp_path / "new" / "directory", tree, 7)
    loaded, step = load_checkpoint(path)
    assert step == 7 and equal(loaded, tree)
    assert equal({"a": mx.arange(3)}, load_checkpoint(save_checkpoint(tmp_path, {"a": mx.arange(3)}, 0))[0])


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
    save_checkpoint(tmp_path, {"model": model.parameters(), "optimizer": optimizer.state}, 5)
    model, optimizer = start()
    tree, step = load_checkpoint(latest_checkpoint(tmp_path))
    model.update(tree["model"])
    optimizer.state = tree["optimizer"]
    train(model, optimizer, range(step, 8))
    assert equal(model.parameters(), undisturbed.parameters())


def test_the_latest_ones_stay(tmp_path):
    paths = save(tmp_path, 1, 9, 10, 100_000_000)
    assert sorted(tmp_path.iterdir()) == sorted(paths[-2:])
    assert latest_checkpoint(tmp_path) == paths[-1]
    last = save(tmp_path, 100_000_001, keep=1)
    assert list(tmp_path.iterdir()) == last
    assert load_checkpoint(last[0])[1] == 100_000_001


def test_the_same_step_twice(tmp_path):
    save(tmp_path, 3)
    path = save_checkpoint(tmp_path, {"weights": mx.zeros(2)}, 3)
    assert list(tmp_path.iterdir()) == [path] and load_checkpoint(path)[0]["weights"].shape == (2,)


@pytest.mark.parametrize("length", [0, 7, 8, 100, 4000, "all but one", "one more"])
def test_a_torn_file_is_not_taken_for_a_checkpoint(tmp_path, length):
    good, torn = save(tmp_path, 1, 2)
    data = torn.read_bytes()
    length = {"all but one": len(data) - 1, "one more": len(data) + 1}.get(length, length)
    torn.write_bytes((data + b"\0")[:length])
    assert latest_checkpoint(tmp_path) == good
    with pytest.raises(errors.InvalidArgument, match=f"{torn.name} is damaged: .* latest_checkpoint"):
        load_checkpoint(torn)
    save(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == torn, "rewritten"


def test_a_torn_file_does_not_count_when_old_ones_go(tmp_path):
    first, torn = save(tmp_path, 1, 2)
    torn.write_bytes(b"")
    assert save(tmp_path, 3)[0] == latest_checkpoint(tmp_path) and first.exists()


@pytest.mark.parametrize("header", [b"[]", b'{"a": {}}', b"{}", b"\xff", b"{"])
def test_any_header_is_rejected_with_an_error_of_ours(tmp_path, header):
    path = tmp_path / "step-00000001.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(errors.InvalidArgument, match="step-00000001"):
        load_checkpoint(path)


KILLED = """
import os, sys, threading, time, mlx.core as mx, mlxdist
tree = {str(i) + "w": mx.zeros(1 << 20) for i in range(16)}
mx.eval(tree)
print("saving", flush=True)
step = 1
while True:
    mlxdist.save_checkpoint(sys.argv[1], {"step": mx.array(step), **tree}, step)
    step += 1
"""


def test_a_writer_that_is_killed_leaves_complete_checkpoints(tmp_path):
    """64 MiB each, so that it is killed while it writes."""
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    writer.stdout.readline()
    while not (list(tmp_path.glob("step-*")) and list(tmp_path.glob("writing-*"))):
        assert writer.poll() is None
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    path = latest_checkpoint(tmp_path)
    with pytest.raises(errors.InvalidArgument, match="of another run"):
        save_checkpoint(tmp_path, TREE, 10**6)
    tree, step = load_checkpoint(path, other_run=True)
    assert tree["step"].item() == step and len(tree) == 17
    save_checkpoint(tmp_path, tree, step + 1)
    assert not list(tmp_path.glob("writing-*")), "what it left is gone"


def test_no_checkpoint_is_saved_before_a_later_one(tmp_path):
    save(tmp_path, 700)
    with pytest.raises(errors.InvalidArgument, match="checkpoint of step 700, later than 100"):
        save(tmp_path, 100)


def test_other_files_are_left_alone(tmp_path):
    for name in ("step-1.safetensors", "step-00000009.safetensors.bak", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 1, 2, 3)
    assert len(list(tmp_path.iterdir())) == 5


def test_no_directory_has_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    with pytest.raises(errors.InvalidArgument, match="does not exist"):
        load_checkpoint(tmp_path / "none")


def test_a_file_of_somebody_else(tmp_path):
    mx.save_safetensors(str(tmp_path / "step-00000001.safetensors"), TREE)
    with pytest.raises(errors.InvalidArgument, match="not written by save_checkpoint"):
        load_checkpoint(latest_checkpoint(tmp_path))


@pytest.mark.parametrize(
    "tree, words",
    [
        ({"step": 3}, "the leaf 'step' is a int, not an mx.array"),
        ({"a": [mx.zeros(1), None]}, "the leaf 'a.1' is a NoneType"),
        ({}, "no mx.array"),
        ({"a.b": mx.zeros(1)}, "has a dot"),
        ({"0": mx.zeros(1)}, "a number as in a list"),
    ],
)
def test_trees_that_would_not_come_back_are_rejected(tmp_path, tree, words):
    with pytest.raises(errors.InvalidArgument, match=words):
        save_checkpoint(tmp_path / "new", tree, 1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step, keep", [(-1, 2), (1, 0), (100.0, 2), (1, 2.0), (True, 2), ("1", 2), (None, 2)])
def test_bad_numbers(tmp_path, step, keep):
    with pytest.raises(errors.InvalidArgument, match="(step|keep) must be an integer from [01] to [0-9]+, not "):
        save_checkpoint(tmp_path / "new", TREE, step, keep)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", [None, 5, b"directory", "a\0b"])
def test_what_is_no_path_is_rejected(path):
    for function, *more in ((save_checkpoint, TREE, 1), (latest_checkpoint,), (load_checkpoint,)):
        with pytest.raises(errors.InvalidArgument, match="_checkpoint: .* is no path"):
            function(path, *more)


def test_the_last_step_of_all(tmp_path):
    """What is saved can be loaded."""
    assert load_checkpoint(*save(tmp_path, 10**18 - 1))[1] == 10**18 - 1
    with pytest.raises(errors.InvalidArgument, match="step must be an integer .* not 1000000000000000000"):
        save(tmp_path, 10**18)
    (tmp_path / "step-1000000000000000000.safetensors").write_bytes((tmp_path / os.listdir(tmp_path)[0]).read_bytes())
    assert load_checkpoint(latest_checkpoint(tmp_path))[1] == 10**18 - 1


def test_a_number_of_numpy_is_a_step(tmp_path):
    assert save_checkpoint(tmp_path, TREE, np.int64(100)) == latest_checkpoint(tmp_path)


def test_a_directory_that_is_a_file(tmp_path):
    """Not None, as if no step had been done."""
    (tmp_path / "file").write_text("mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        for call in (latest_checkpoint, lambda directory: save_checkpoint(directory, TREE, 1)):
            with pytest.raises(errors.InvalidArgument, match=f"checkpoint: {directory} is a file, not a directory"):
                call(directory)
    with pytest.raises(errors.InvalidArgument, match=r"is a directory; pass what latest_checkpoint\(directory\) finds"):
        load_checkpoint(tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


def test_no_flipped_bit_is_loaded(tmp_path):
    """At any place of the file: in its header and in the data of every array."""
    tree = {"weights": mx.arange(8, dtype=mx.float32), "half": mx.ones((3, 1), mx.bfloat16), "mask": mx.array([True])}
    path = save_checkpoint(tmp_path, tree, 3)
    data = path.read_bytes()
    loaded = []
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            load_checkpoint(path, other_run=True)
        except errors.InvalidArgument as error:
            assert path.name in str(error)
        else:
            loaded.append(place)
    path.write_bytes(data)
    assert equal(load_checkpoint(path)[0], tree)
    assert loaded == []


@pytest.mark.parametrize("saved, dimension", [((4,), 2**32 + 4), ((4,), 4.5), ((0, 4), 2**32 + 4)])
def test_no_other_shape_is_loaded(tmp_path, saved, dimension):
    """MLX makes 4 of both."""
    path = save_checkpoint(tmp_path, {"w": mx.ones(saved)}, 3)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["w"]["shape"][-1] = dimension
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(errors.InvalidArgument, match=rf"{path.name} is damaged: .*{dimension}[\])]"):
        load_checkpoint(path)


def test_a_file_of_an_older_version(tmp_path):
    """It had neither run nor CRC."""
    path = tmp_path / "step-00000007.safetensors"
    mx.save_safetensors(str(path), TREE, {"mlxdist_step": "7"})
    with pytest.raises(errors.InvalidArgument, match=r"has no mlxdist_run: .* older .* mx\.load"):
        load_checkpoint(path)
    with pytest.raises(errors.InvalidArgument, match="has no mlxdist_run: .* older .* choose another directory"):
        save(tmp_path, 8)


def save_in_another_process(directory, step):
    program = "import sys, mlx.core as mx, mlxdist\n"
    program += "mlxdist.save_checkpoint(sys.argv[1], {'weights': mx.zeros(2)}, int(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", program, str(directory), str(step)], check=True, timeout=60)
    return latest_checkpoint(directory)


def test_another_run_is_gone_on_with_only_on_purpose(tmp_path):
    """Without a launcher each process is a run."""
    path = save_in_another_process(tmp_path, 7)
    with pytest.raises(errors.InvalidArgument, match=r"of another run, [0-9a-f]{16}; .* other_run=True"):
        load_checkpoint(path)
    with pytest.raises(errors.InvalidArgument, match=r"step 7 of another run, [0-9a-f]{16}; .* other_run=True"):
        save(tmp_path, 8)
    assert list(tmp_path.iterdir()) == [path]
    assert load_checkpoint(path, other_run=True)[1] == 7
    assert load_checkpoint(*save(tmp_path, 8))[1] == 8
    assert path.exists(), "the one before stays"


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


def test_ranks_without_a_launcher_are_one_run(tmp_path):
    """Each of their processes has another name, and that of rank 0 counts."""
    program = (
        "import sys, mlx.core as mx, mlxdist\n"
        "if mlxdist.get_rank() == 0: mlxdist.save_checkpoint(sys.argv[1], {'w': mx.ones(1)}, 5)\n"
        "mlxdist.meet()\n"
        "print(mlxdist.load_checkpoint(mlxdist.latest_checkpoint(sys.argv[1]))[1])\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    job = {"MLXDIST_WORLD_SIZE": "2", "MLXDIST_RENDEZVOUS": address, "MLXDIST_SECRET": "ab" * 16}
    command = [sys.executable, "-c", program, str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env=os.environ | job | {"MLXDIST_RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == [b"5\n"] * 2


def test_a_process_without_a_job_is_a_run():
    assert Environment.read({}).run == Environment.read({}).run != ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error(tmp_path):
    """And the checkpoints before it stay."""
    (good,) = save(tmp_path, 1)
    (tmp_path / "limit.py").write_text(
        "import resource, sys, signal, mlx.core as mx, mlxdist\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "mlxdist.load_checkpoint(mlxdist.latest_checkpoint(sys.argv[1]), other_run=True)\n"
        "try: mlxdist.save_checkpoint(sys.argv[1], {'w': mx.zeros(100_000)}, 2)\n"
        "except mlxdist.ResourceError as error: print(error)\n"
    )
    command = [sys.executable, str(tmp_path / "limit.py"), str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "step-00000002.safetensors could not be written" in said.stdout, said.stderr
    assert latest_checkpoint(tmp_path) == good and not list(tmp_path.glob("writing-*"))
    shutil.rmtree(tmp_path)


def test_a_failed_collective_is_no_error_of_writing(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, mlx.core as mx, mlxdist\n"
        "other = mlxdist.init().rank()\n"
        "operation = mlxdist.all_max if other else mlxdist.all_sum\n"
        "try: mlxdist.save_checkpoint(f'{sys.argv[1]}/{other}', {'w': operation(mx.ones(2))}, 1)\n"
        "except mlxdist.Error as error: print(type(error).__name__)\n"
    )
    assert run_ranks(program, 2, tmp_path) == ["Mismatch\n"] * 2
    assert not list(tmp_path.glob("*/*"))


def test_a_model_that_is_cut_over_ranks(run_ranks, tmp_path):
    assert run_ranks("cut_checkpoints.py", 2, tmp_path) == ["done\n"] * 2
