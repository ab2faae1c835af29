"""What the virtual machine is made of: programs of this machine, and a kernel and a busybox from Debian packages.

The kernel is Debian's generic one: that for clouds has neither rdma_rxe nor 9p. It is never installed, only
unpacked, as busybox is, which is all that the first seconds of a boot need.
"""

from __future__ import annotations

import fcntl
import gzip
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["HERE", "Unavailable", "boot_files", "unpacked"]

HERE = Path(__file__).parent
CACHE = HERE.parent.parent / "build" / "rxe"

# What must be installed: the package, and the program that it has.
_PROGRAMS = {
    "qemu-system-x86": "qemu-system-x86_64",
    "cpio": "cpio",
    "iproute2": "rdma",
    "ibverbs-utils": "ibv_devinfo",
    "perftest": "ib_send_lat",
}
_DRIVERS = "/etc/libibverbs.d/rxe.driver"
_KERNEL = "linux-image-amd64"

# Loaded in this order, each behind what it needs. The kernel takes the best CRC32 that it finds: crc32_pclmul, which is
# slower than the plain one where a processor is emulated, is not among them.
_MODULES = [
    "crc32_generic", "crc32c_generic", "virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "veth",
    "sch_netem", "ib_uverbs", "rdma_ucm", "rdma_rxe",
]  # fmt: skip


class Unavailable(Exception):
    """The virtual machine cannot be had here; the text says what is missing."""


def boot_files() -> tuple[Path, Path]:
    """The kernel and the initial file system, made on first use and kept in build/rxe.

    Raises:
        Unavailable: a package is missing, or could not be fetched.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Unavailable(f"the virtual machine is for Linux on x86-64, not {platform.system()} {platform.machine()}")
    if missing := _missing():
        raise Unavailable(
            f"missing: {', '.join(missing)}; on Debian: apt-get install --no-install-recommends {' '.join(missing)}"
        )
    kernel, busybox = unpacked(_kernel_package()), unpacked("busybox-static") / "bin" / "busybox"
    with _locked():
        return next((kernel / "boot").glob("vmlinuz-*")), _initial_files(kernel, busybox)


def _missing() -> list[str]:
    packages = [package for package, program in _PROGRAMS.items() if not shutil.which(program)]
    return packages if Path(_DRIVERS).exists() else [*packages, "ibverbs-providers"]


@contextmanager
def _locked() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _kernel_package() -> str:
    """The package with the image that the metapackage depends on; one that is here already is used as it is."""
    if present := sorted(CACHE.glob("linux-image-*")):
        return present[-1].name
    depends = _apt("apt-cache", "depends", _KERNEL)
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if not found:
        raise Unavailable(f"apt knows no package {_KERNEL}: this needs a Debian, after apt-get update")
    return found[1]


def unpacked(package: str) -> Path:
    """The directory with the contents of a package, fetched and unpacked if it is not there yet.

    Raises:
        Unavailable: it could not be fetched.
    """
    directory = CACHE / package
    with _locked():
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as work:
                _apt("apt-get", "download", "--quiet", package, cwd=Path(work))
                _call("dpkg", "-x", str(next(Path(work).glob("*.deb"))), f"{work}/root")
                Path(work, "root").rename(directory)
    return directory


def _initial_files(kernel: Path, busybox: Path) -> Path:
    """A cpio archive with busybox, the modules that the machine needs, and init.sh."""
    archive = CACHE / "initial.cpio.gz"
    newest = max(file.stat().st_mtime for file in (HERE / "init.sh", Path(__file__), kernel))
    if archive.exists() and archive.stat().st_mtime > newest:
        return archive
    root = CACHE / "initial"
    shutil.rmtree(root, ignore_errors=True)
    for directory in ("bin", "dev", "lower", "modules", "proc", "root", "sys", "upper"):
        (root / directory).mkdir(parents=True)
    shutil.copy(busybox, root / "bin" / "busybox")
    (root / "bin" / "sh").symlink_to("busybox")
    shutil.copy(HERE / "init.sh", root / "init")
    (root / "init").chmod(0o755)
    order = _modules(kernel, busybox)
    for module in order:
        shutil.copy(module, root / "modules")
    (root / "modules" / "order").write_text("".join(f"{module.name}\n" for module in order))
    names = "".join(f"{path.relative_to(root)}\n" for path in sorted(root.rglob("*")))
    command = ["cpio", "--create", "--format=newc", "--quiet"]
    cpio = subprocess.run(command, cwd=root, input=names.encode(), stdout=subprocess.PIPE, check=True)
    partial = archive.with_suffix(".partial")
    partial.write_bytes(gzip.compress(cpio.stdout, 1))
    partial.rename(archive)
    shutil.rmtree(root)
    return archive


def _modules(kernel: Path, busybox: Path) -> list[Path]:
    """The files of _MODULES and of all that these depend on, in the order of loading. Some may be built in."""
    directory = next((kernel / "lib" / "modules").iterdir())
    if not (directory / "modules.dep").exists():
        _call(str(busybox), "depmod", "-b", str(kernel), directory.name)
    depends = {}
    for line in (directory / "modules.dep").read_text().splitlines():
        module, _, needs = line.partition(":")
        depends[module] = needs.split()
    by_name = {_module_name(module): module for module in depends}
    built_in = {_module_name(line) for line in (directory / "modules.builtin").read_text().splitlines()}
    order: list[str] = []

    def add(module: str) -> None:
        for needed in depends[module]:
            add(needed)
        if module not in order:
            order.append(module)

    for name in _MODULES:
        if name in by_name:
            add(by_name[name])
        elif name not in built_in:
            raise Unavailable(f"{kernel.name} has no module {name}")
    return [directory / module for module in order]


def _module_name(path: str) -> str:
    return Path(path).name.removesuffix(".ko").replace("-", "_")


def _apt(*command: str, cwd: Path | None = None) -> str:
    try:
        return _call(*command, cwd=cwd)
    except FileNotFoundError:
        raise Unavailable(f"there is no {command[0]}: the kernel comes from a package of Debian") from None
    except subprocess.CalledProcessError as failed:
        raise Unavailable(f"{' '.join(command)} failed: {failed.stderr.strip()}; try apt-get update") from None


def _call(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout
