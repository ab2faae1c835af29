"""A small virtual machine with two soft-RoCE devices that are joined by a cable: real verbs on any Linux machine.

    with Machine() as machine:
        print(machine.run("ibv_devinfo", seconds=60).output)

The machine sees this one's root, and forgets what it writes there; /exchange is `machine.exchange`, in which
files stay. It has no other network than the pair of its devices: rxe0 (10.0.0.1) and rxe1 (10.0.0.2), GID index 1.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from packages import HERE, Unavailable, boot_files

__all__ = ["HERE", "Machine", "MachineError", "Result", "Unavailable", "accelerator"]

PROCESSORS = 2  # two ranks that poll on one processor take turns of a few milliseconds
MEMORY_MIB = 3072
BOOT_SECONDS = 300  # 8 s on an idle machine
_GRACE_SECONDS = 60  # beyond a command's own limit, which the machine keeps itself
_KERNEL_ARGUMENTS = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr tsc=reliable audit=0"


class MachineError(Exception):
    """The machine did not boot, or has died."""


@dataclass(frozen=True)
class Result:
    """How a command ended: 124 is the status of one that was stopped at its time limit."""

    status: int
    output: str
    seconds: float


def accelerator() -> str:
    """What runs the machine: "kvm", or "tcg", which emulates a processor.

    A kernel that offers /dev/kvm without virtualization in its processor (pvm) cannot boot a stock kernel, and qemu
    stops there instead of failing, so that a second choice on its command line is never taken.
    """
    flags = re.search(r"^flags\s*:.*\b(vmx|svm)\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK) and not Path("/sys/module/kvm_pvm").exists()
    return "kvm" if usable and flags else "tcg"


class Machine:
    """Boots when entered, is gone when left, also where this process is killed.

    Args:
        plugin: qemu's option of that name. The processor is then emulated, and programs have the same addresses in
            each run.
    """

    def __init__(self, plugin: str = "") -> None:
        self._plugin = plugin

    def __enter__(self) -> Machine:
        kernel, initial = boot_files()
        self._directory = tempfile.TemporaryDirectory(prefix="mlxdist-rxe-", ignore_cleanup_errors=True)
        self.exchange = Path(self._directory.name)
        for script in ("network.sh", "commands.sh"):
            shutil.copy(HERE / script, self.exchange)
        self._qemu: subprocess.Popen | None = None
        self._control = socket.socket(socket.AF_UNIX)
        self._received = b""
        self._commands = 0
        try:
            self._boot(kernel, initial)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._control.close()
        if self._qemu:
            self._qemu.kill()
            self._qemu.wait()
        self._directory.cleanup()

    def run(self, command: str, seconds: float) -> Result:
        """Runs a command of bash as root.

        Raises:
            MachineError: the machine has died.
        """
        self._commands += 1
        encoded = base64.b64encode(command.encode()).decode()
        begin = time.monotonic()
        self._control.sendall(f"{self._commands} {seconds:.0f} {encoded}\n".encode())
        answer = self._line(begin + seconds + _GRACE_SECONDS, f"{command!r} to end")
        number, status = map(int, answer.split())
        if number != self._commands:
            raise MachineError(f"the machine ended command {number} instead of {self._commands}")
        output = (self.exchange / str(number)).read_text(errors="replace")
        return Result(status, output, time.monotonic() - begin)

    def pin(self, pinned: bool) -> None:
        """Whether all packets to one end of the pair are received by one processor, as when the machine boots. If not,
        packets overtake each other now and then, and UC drops their message."""
        for end in (0, 1):
            processors = 1 << end if pinned else 0
            self._set(f"echo {processors:x} > /sys/class/net/veth{end}/queues/rx-0/rps_cpus")

    def lose(self, percent: float) -> None:
        """How many of the packets of either direction are lost."""
        for end in (0, 1):
            self._set(f"tc qdisc del dev veth{end} root 2> /dev/null; true")
            if percent:
                self._set(f"tc qdisc add dev veth{end} root netem limit 100000 loss {percent:g}%")

    def _set(self, command: str) -> None:
        result = self.run(command, 60)
        if result.status:
            raise MachineError(f"{command!r} ended with {result.status}: {result.output}")

    def _boot(self, kernel: Path, initial: Path) -> None:
        control = self.exchange / "control"
        accel = "tcg" if self._plugin else accelerator()
        # qemu dies with this process, whatever ends it.
        command = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"]
        command += ["-nodefaults", "-no-user-config", "-display", "none", "-nic", "none", "-no-reboot"]
        command += ["-machine", "pc,hpet=off", "-smp", str(PROCESSORS), "-m", str(MEMORY_MIB)]
        command += ["-accel", "kvm", "-cpu", "host"] if accel == "kvm" else []
        if accel == "tcg":
            # Without erms the guest copies by vectors and words: rep movsb is emulated byte by byte.
            command += ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max,la57=off,erms=off,fsrm=off"]
        command += ["-plugin", self._plugin] if self._plugin else []
        arguments = f"{_KERNEL_ARGUMENTS} norandmaps" if self._plugin else _KERNEL_ARGUMENTS
        command += ["-kernel", str(kernel), "-initrd", str(initial), "-append", arguments]
        command += ["-serial", f"file:{self.exchange / 'console'}"]
        command += ["-chardev", f"socket,id=control,path={control},server=on,wait=off", "-device", "virtio-serial-pci"]
        command += ["-device", "virtserialport,chardev=control,name=control"]
        command += ["-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"]
        command += ["-virtfs", f"local,path={self.exchange},mount_tag=exchange,security_model=none"]
        with (self.exchange / "qemu").open("w") as log:
            self._qemu = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + BOOT_SECONDS
        while not control.exists():
            self._check(deadline, "qemu to start")
            time.sleep(0.05)
        self._control.connect(str(control))
        if self._line(deadline, "the machine to boot") != "ready":
            raise MachineError("the machine is not ready")
        self.pin(True)

    def _line(self, deadline: float, what: str) -> str:
        self._control.settimeout(1)
        while b"\n" not in self._received:
            self._check(deadline, what)
            try:
                part = self._control.recv(4096)
            except TimeoutError:
                continue
            if not part:
                raise self._died(f"the machine hung up while it was waited for {what}")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def _check(self, deadline: float, what: str) -> None:
        if self._qemu.poll() is not None:
            raise self._died(f"qemu has ended with {self._qemu.returncode} while it was waited for {what}")
        if time.monotonic() > deadline:
            raise self._died(f"waited in vain for {what}")

    def _died(self, what: str) -> MachineError:
        """The error, with the last lines of what qemu and the console of the machine have said."""
        lines = [what]
        for name in ("qemu", "console"):
            log = self.exchange / name
            if log.exists():
                lines += log.read_text(errors="replace").splitlines()[-20:]
        return MachineError("\n".join(lines))
