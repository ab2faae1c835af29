"""The GPUs of a machine, and which one a rank is given."""

from mlxdist.base.gpus import Gpu, gpu_of_rank, visible_gpus

TWO = [Gpu(0, "NVIDIA H100"), Gpu(1, "NVIDIA H100")]


def test_what_the_driver_says(tmp_path):
    for bus, uuid in (("0000:41:00.0", "GPU-b"), ("0000:06:00.0", "GPU-a")):
        folder = tmp_path / "proc" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 11\nGPU UUID: \t {uuid}\n")
    found = visible_gpus(tmp_path / "proc", tmp_path)
    assert found == [Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-a"), Gpu(1, "NVIDIA H100 80GB HBM3", "GPU-b")]
    assert str(found[1]) == "1: NVIDIA H100 80GB HBM3 (GPU-b)"


def test_a_container_with_devices_alone(tmp_path):
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert [gpu.index for gpu in visible_gpus(tmp_path / "none", tmp_path)] == [0, 2, 10]
    assert str(visible_gpus(tmp_path / "none", tmp_path)[0]) == "0: NVIDIA GPU"


def test_ranks_take_the_gpus_in_turn():
    shown = [gpu_of_rank({}, rank, TWO) for rank in range(3)]
    assert shown == [{"CUDA_VISIBLE_DEVICES": name, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} for name in "010"]


def test_those_that_the_job_may_use():
    job = {"CUDA_VISIBLE_DEVICES": "GPU-b,3", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert [gpu_of_rank(job, rank, TWO)["CUDA_VISIBLE_DEVICES"] for rank in range(3)] == ["GPU-b", "3", "GPU-b"]
    assert gpu_of_rank(job, 0, TWO)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    assert gpu_of_rank({"CUDA_VISIBLE_DEVICES": ""}, 0, TWO) == {}
    assert gpu_of_rank({}, 0, []) == {}
