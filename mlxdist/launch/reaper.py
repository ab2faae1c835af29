"""Cleans up after a job, however its launcher ends: a small process of its own, not a module of the launcher.

It reads a pipe from the launcher: ``+123`` a rank's process group, ``-123`` its leader has ended, ``end`` the job is
over. When the pipe ends, by ``end`` or because the launcher was killed, it ends every process that is left of the job
(SIGTERM, then SIGKILL), removes the job's temporary directory, and the job's own directory (jobs.py) unless flight
recordings are in it. It holds the lock of that directory: where both are killed, the next launcher does the same.

Rejected: prctl(PR_SET_PDEATHSIG), which only Linux has, and which reaches the ranks but not their children; one such
process per rank, which doubles the processes to start; a fork of the launcher, which a `pkill -9 -f "mlxdist launch"`
kills together with it. Because of such a `pkill`, its command line has this file's path. With -I -S it starts in 10
ms, in parallel with the ranks. It imports nothing of mlxdist, and cannot.
"""

import os
import select
import signal
import sys
import time

__all__ = ["LOST_DOMAINS", "PROTECTION_DOMAINS", "Reaper", "clean_up", "closing_line", "main"]

# A helper process that a rank leaves behind often ends by itself once the rank is gone.
NATURAL_END = 0.5
# Seconds after SIGKILL. A process in an uninterruptible system call may need longer, and is left alone.
AFTER_KILL = 2.0
# Seconds after SIGTERM, for processes outside of a rank's group, and for those of a killed job, which delay the next.
# Longer on a Mac, where a killed process can cost kernel objects of RDMA until the restart.
AFTER_TERM = 15.0 if sys.platform == "darwin" else 2.0
STEP = 0.02
PROTECTION_DOMAINS = "AppleThunderboltRDMAProtectionDomain"  # macOS's class of kernel objects
# The same text is in native/verbs/explain.c.
LOST_DOMAINS = (
    "a Mac has 11 protection domains of RDMA and keeps those of killed programs until it is restarted (while no job "
    f"runs, `ioclasscount {PROTECTION_DOMAINS}` counts them)"
)


class ProcessGroup:
    """A rank's process group whose leader has ended, or has to end."""

    def __init__(self, number: int, grace: float, first_pause: float) -> None:
        self._number = number
        self._grace = grace
        self._signals = [signal.SIGTERM, signal.SIGKILL]
        self._next = time.monotonic() + first_pause
        self.was_killed = False

    def press(self) -> bool:
        """Sends the next signal when it is due. Returns False when no signal is left."""
        if time.monotonic() < self._next:
            return True
        if not self._signals:
            return False
        number = self._signals.pop(0)
        self._next = time.monotonic() + (self._grace if self._signals else AFTER_KILL)
        try:
            os.killpg(self._number, number)
        except (ProcessLookupError, PermissionError):
            return False
        self.was_killed = number == signal.SIGKILL
        return True


class Reaper:
    def __init__(self, job: str, temporary: str, directory: str, grace: float) -> None:
        self._job = job
        self._temporary = temporary
        self._directory = directory
        self._grace = grace
        self._living: set[int] = set()
        self._ending: dict[int, ProcessGroup] = {}
        self.orderly = False  # the launcher has said that the job is over
        self.killed = 0  # groups that SIGTERM did not end

    def serve(self, pipe: int) -> None:
        """Reads the launcher's lines and ends groups. Returns when the launcher has ended."""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        text = b""
        while True:
            if poll.poll(1000 * STEP if self._ending else None):
                data = os.read(pipe, 65536)
                if not data:
                    return
                *lines, text = (text + data).split(b"\n")
                for line in lines:
                    self.take(line.decode())
            self._step()

    def take(self, line: str) -> None:
        if line == "end":
            self.orderly = True
        elif line.startswith("+"):
            self._living.add(int(line))
        else:
            # Once the group is empty, the system may reuse its number. So the group is ended now, and then forgotten.
            group = -int(line)
            self._living.discard(group)
            self._ending[group] = ProcessGroup(group, self._grace, NATURAL_END)

    def _step(self) -> None:
        living = _with_living_members(self._ending)
        for number, group in list(self._ending.items()):
            if number not in living or not group.press():
                del self._ending[number]
                self.killed += group.was_killed

    def finish(self) -> int:
        """Ends the remaining groups, removes the directories, and returns how many ranks still ran."""
        running = len(self._living)
        self._ending.update((number, ProcessGroup(number, self._grace, 0)) for number in self._living)
        while self._ending:
            self._step()
            if self._ending:
                time.sleep(STEP)
        clean_up(self._job, self._temporary, self._directory)
        return running


def clean_up(job: str, temporary: str, directory: str) -> None:
    """Ends processes that have left their rank's process group, such as daemons, and removes the job's directories."""
    for number, seconds in ((signal.SIGTERM, AFTER_TERM), (signal.SIGKILL, AFTER_KILL)):
        deadline = time.monotonic() + seconds
        signaled: set[int] = set()
        while processes := _of_job(job):
            if time.monotonic() >= deadline:
                break
            for process in processes - signaled:
                try:
                    os.kill(process, number)
                except ProcessLookupError:
                    continue
            signaled |= processes
            time.sleep(STEP)
        else:
            break
    if os.path.isdir(temporary):
        _remove_tree(temporary)
    _remove_job_directory(directory)


def _remove_tree(directory: str) -> None:
    """Removes a tree as far as possible. Importing shutil would take as long as the rest of the end of a short job."""
    try:
        for _, directories, files, descriptor in os.fwalk(directory, topdown=False):
            for remove, names in ((os.unlink, files), (_remove_directory, directories)):
                for name in names:
                    try:
                        remove(name, dir_fd=descriptor)
                    except OSError:
                        continue
        os.rmdir(directory)
    except (OSError, RecursionError):  # it cannot be read, something in it cannot be removed, or it is too deep
        return


def _remove_directory(name: str, *, dir_fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except NotADirectoryError:  # a link to one
        os.unlink(name, dir_fd=dir_fd)


def _remove_job_directory(directory: str) -> None:
    """Removes first the files that make it a running job, then the directory, unless it has recordings of the ranks."""
    for remove, name in (
        (os.unlink, "job.json"),
        (os.unlink, "job.new"),
        (os.unlink, "lock"),
        (os.rmdir, "flight"),
        (os.rmdir, ""),
    ):
        try:
            remove(os.path.join(directory, name))
        except OSError:
            continue


def _with_living_members(groups: dict[int, ProcessGroup]) -> set[int]:
    existing = set()
    for group in groups:
        try:
            os.killpg(group, 0)
            existing.add(group)
        except (ProcessLookupError, PermissionError):  # macOS has the latter for zombies
            continue
    if not existing:
        return existing
    # An orphan that has ended stays a member until init reaps it, which the init of some containers never does.
    return existing & {group for _, group, _ in _processes(with_variables=False)}


def _of_job(job: str) -> set[int]:
    """The processes whose environment has the name of the job, or of a job that was started inside it."""
    marker = b"MLXDIST_JOB=" + job.encode()
    of_job = set()
    for process, _, variables in _processes(with_variables=True):
        before, found, after = variables.partition(marker)
        if found and before[-1:] in b"\0 " and after[:1] in b".\0 " and process != os.getpid():
            of_job.add(process)
    return of_job


def _processes(with_variables: bool) -> list[tuple[int, int, bytes]]:
    """Process, group and environment of every running process whose environment this user may read."""
    if sys.platform != "linux":
        return _processes_by_ps(with_variables)
    processes = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            # The command's name may contain anything. State, parent and group follow it.
            state, _, group = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()[:3]
            if state not in (b"Z", b"X") and group != b"0":  # neither ended nor a thread of the kernel
                variables = _read(f"/proc/{name}/environ") if with_variables else b""
                processes.append((int(name), int(group), variables))
        except OSError:  # ended meanwhile, or another user's
            continue
    return processes


def _read(path: str) -> bytes:
    # os.open takes half the time of open(), and there may be thousands of processes.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _processes_by_ps(with_variables: bool) -> list[tuple[int, int, bytes]]:
    import subprocess

    options = ["-axww", *(["-E"] if with_variables else []), "-o", "pid=,pgid=,state=,command="]
    processes = []
    for line in subprocess.run(["ps", *options], stdout=subprocess.PIPE, check=True).stdout.splitlines():
        process, group, state, *command = line.split(None, 3)
        if not state.startswith(b"Z"):
            processes.append((int(process), int(group), b"".join(command)))
    return processes


def main(job: str, temporary: str, directory: str, grace: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    reaper = Reaper(job, temporary, directory, float(grace))
    reaper.serve(0)
    running = reaper.finish()
    if not reaper.orderly:  # last: the reader of this may be gone too
        print(f"mlxdist launch: {closing_line(running, reaper.killed)}", file=sys.stderr, flush=True)
    os._exit(0)  # the launcher waits, and to take the interpreter down takes as long as to remove the directories


def closing_line(running: int, killed: int) -> str:
    text = f"the launcher was killed, so its {running} running ranks were ended"
    if not killed or sys.platform != "darwin":
        return text
    return f"{text}, {killed} of them by SIGKILL: {LOST_DOMAINS}"
