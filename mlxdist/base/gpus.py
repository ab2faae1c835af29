"""The NVIDIA GPUs of this machine, as far as the system shows them without CUDA: no process has to open one for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["VISIBLE", "Gpu", "gpu_of_rank", "visible_gpus"]

VISIBLE = "CUDA_VISIBLE_DEVICES"  # of CUDA: the GPUs of a process, by number or UUID, separated by commas
_PROC = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Gpu:
    """A GPU. ``index``: as in nvidia-smi, by the order of the PCI bus. ``uuid``: empty where the driver hides it."""

    index: int
    name: str
    uuid: str = ""

    def __str__(self) -> str:
        return f"{self.index}: {self.name}" + (f" ({self.uuid})" if self.uuid else "")


def visible_gpus(proc: Path = _PROC, dev: Path = Path("/dev")) -> list[Gpu]:
    """All GPUs of this machine, whatever CUDA_VISIBLE_DEVICES says."""
    found = []
    for index, folder in enumerate(sorted(proc.glob("*"))):
        lines = _read(folder / "information").splitlines()
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        found.append(Gpu(index, fields.get("Model", "NVIDIA GPU"), fields.get("GPU UUID", "")))
    if not found:  # containers often have the devices and not the driver's files
        numbers = sorted(int(path.name[6:]) for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit())
        found = [Gpu(number, "NVIDIA GPU") for number in numbers]
    return found


def gpu_of_rank(variables: Mapping[str, str], local_rank: int, gpus: Sequence[Gpu]) -> dict[str, str]:
    """The variables by which CUDA shows a rank one GPU, chosen round-robin from the job's GPUs; none without GPUs.

    ``variables``: the job's. Its CUDA_VISIBLE_DEVICES lists the GPUs that the job may use; an empty value lists none.
    """
    listed = variables.get(VISIBLE)
    names = [str(gpu.index) for gpu in gpus] if listed is None else [name for name in listed.split(",") if name]
    if not gpus or not names:
        return {}
    # The order of nvidia-smi, in which users count GPUs; CUDA's default order is by speed.
    return {
        VISIBLE: names[local_rank % len(names)],
        "CUDA_DEVICE_ORDER": variables.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
