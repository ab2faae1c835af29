"""A job on this machine: the environment of its ranks, and how they are started and ended."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mlxdist.base.atomic_file import replace_file
from mlxdist.base.descriptors import raise_limit
from mlxdist.base.environment import OF_JOB, format_address, parse_address
from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.base.gpus import gpu_of_rank, visible_gpus
from mlxdist.base.rank_listener import listen_for_ranks
from mlxdist.runtime import mpi_shim

from .backends import Exports
from .exit_status import FirstFailure, of_process
from .jit_cache import JitCache
from .jobs import JobDirectory
from .restarts import name_of_start
from .standard_input import Pipe

if TYPE_CHECKING:  # only Macs, and elastic jobs, load them
    from .awake import Awake
    from .membership import Epoch
    from .membership_socket import MembershipSocket, Question

__all__ = [
    "LocalJob",
    "LocalRank",
    "allow_descriptors",
    "base_environment",
    "check_fast_synch",
    "keep_awake",
    "new_name",
    "new_secret",
    "start_with_pipes",
    "usual_grace",
]

_Rank = TypeVar("_Rank")

# Python caches the bytecode of a module, but compiles a script at each start: so the reaper is imported. Its directory
# comes last in the path, so that no file there shadows a module of Python.
_REAPER = "import sys, os; sys.path.append(os.path.dirname(sys.argv[1])); import reaper; reaper.main(*sys.argv[2:])"


def base_environment(environ: Mapping[str, str], with_mpi_shim: bool = True) -> dict[str, str]:
    """The environment that all ranks inherit from the launcher, without variables of another job, with the MPI shim.

    ``with_mpi_shim``: False where the ranks use a backend of MLX's own.

    Raises:
        ResourceError: mlxdist has not been built.
    """
    variables = {name: value for name, value in environ.items() if name not in OF_JOB and not mpi_shim.diverts(name)}
    if with_mpi_shim:
        variables |= mpi_shim.variables()
    elif "MLXDIST_JOB" in environ:
        variables.pop(mpi_shim.VARIABLE, None)  # that of the outer job
    if "MLXDIST_JOB" in environ:
        variables.pop("MLXDIST_FLIGHT_DIR", None)  # the launcher of the outer job has set it
    # Unbuffered, so that lines reach the launcher when they are printed, and none is lost with a killed rank.
    variables.setdefault("PYTHONUNBUFFERED", "1")
    if sys.prefix != sys.base_prefix:
        # Like an activated virtual environment of this mlxdist, so that `python` is one that can import it.
        scripts = os.path.dirname(sys.executable)
        path = variables.get("PATH", os.defpath).split(os.pathsep)
        if scripts not in path:
            variables["PATH"] = os.pathsep.join([scripts, *path])
    return variables


def check_fast_synch(variables: Mapping[str, str], ranks: int) -> None:
    """Rejects a setting of MLX's Metal backend that can lock up a GPU. ``ranks``: the number of ranks on this machine.

    Raises:
        InvalidArgument: several ranks on one Mac would use it.
    """
    value = variables.get("MLX_METAL_FAST_SYNCH", "")
    if sys.platform == "darwin" and ranks > 1 and value not in ("", "0"):
        raise InvalidArgument(
            f"MLX_METAL_FAST_SYNCH={value} with {ranks} ranks on one Mac has locked up GPUs until a restart: their "
            "kernels wait for each other on the same GPU; set MLX_METAL_FAST_SYNCH=0 (--env, the hostfile's envs, the "
            "start files of the host's shell), or start one rank on each Mac"
        )


def usual_grace(on_mac: bool) -> float:
    """The grace period in seconds where the user gives none.

    Killing a rank on a Mac costs a protection domain of RDMA until the Mac restarts. A rank that waits in GPU work can
    react to a signal only after macOS has ended that work, after about 5 s.
    """
    return 15.0 if on_mac else 5.0


def keep_awake(pid: int) -> "Awake | None":
    """Keeps this Mac awake until the process has ended. None on other systems."""
    if sys.platform != "darwin":
        return None
    from .awake import Awake

    return Awake(pid)


def _random_hex(size: int) -> str:
    return os.urandom(size).hex()  # as secrets.token_hex, whose module takes as long to import as all of socket


def new_secret() -> str:
    return _random_hex(32)


@dataclass
class LocalRank:
    """A running rank. Its process leads a session of its own, so that its children are signalled with it."""

    rank: int
    process: subprocess.Popen
    is_mpirun: bool = False

    def __str__(self) -> str:
        name = "mpirun" if self.is_mpirun else f"rank {self.rank}"
        return f"{name} (pid {self.process.pid})"

    def poll(self) -> int | None:
        """The exit status as a shell has it (128 + signal), or None while it runs."""
        return of_process(self.process.poll())

    def signal(self, number: signal.Signals) -> None:
        """Signals all processes of the rank, only while it runs: later, another process may get its number."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):  # it is just ending; macOS has the latter for zombies
            return


@dataclass(eq=False, repr=False)
class LocalJob:
    """The ranks of a job on this machine, and what they share. A context manager: its exit leaves nothing of the job.

    The launcher opens the socket of the rendezvous itself and hands it to rank 0: no other program can take the port
    in between. The secret travels in the environment; a command line could be read by every user.

    Where ranks run on other hosts, too, the caller sets ``address`` before it starts a rank, and also ``exports``: the
    settings of a backend of MLX's own.

    Attributes:
        restart: the number of earlier starts of the job. Each start has a name, secret and address of its own.
        first: the lowest rank on this machine.
        secret: the secret that the ranks on all hosts share.
        interface, port: the address where rank 0 listens, with port 0 for any free one.
        follower: the address where rank 0 listens for the `Follower` on another host, at any free port; empty for none.
        follower_port: that port.
        numbered: False where the only process started here is mpirun, which starts the ranks and numbers them.
        stdin: the ranks that have a standard input, "all" or "0".
        piped: whether that input is a pipe, see `readers`. Else it is the launcher's own: a terminal stays a terminal.
        emulated_node: the virtual host of a rank, or None; see `LaunchPlan`.
    """

    name: str
    restart: int
    size: int
    command: list[str]
    variables: dict[str, str]
    grace: float
    first: int = 0
    secret: str = field(default_factory=new_secret)
    interface: str = "127.0.0.1"
    port: int = 0
    follower: str = ""
    numbered: bool = True
    stdin: str = "all"
    piped: bool = False
    emulated_node: Callable[[int], int | None] = lambda rank: None

    def __post_init__(self) -> None:
        self.job = name_of_start(self.name, self.restart)
        self.exports = Exports()
        self._started: dict[int, int] = {}
        self._running: set[int] = set()
        self._pipes: list[Pipe] = []
        self._sockets: dict[str, socket.socket] = {}  # of rank 0, by the variables that name their descriptors
        self.members: tuple[int, ...] = tuple(range(self.size))  # in the order of their ranks; see `Membership`
        self._membership: MembershipSocket | None = None
        self._tokens: dict[int, str] = {}  # by which it knows its ranks
        self._epoch: dict[str, str] = {}  # variables of its members
        self.succeeded = False
        allow_descriptors(self.size)
        # A short name, because ranks make Unix sockets inside, whose paths may have about 100 characters at most.
        self.directory = Path(self.variables.get("TMPDIR") or "/tmp", f"mlxdist-{_random_hex(4)}").absolute()
        self.first_failure = self.directory / "first_failure"
        with contextlib.ExitStack() as undo:
            flight = self.variables.get("MLXDIST_FLIGHT_DIR")
            self._record = JobDirectory.of_ranks(self.job, self.directory, self.command, flight)
            undo.callback(self._record.remove)
            undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
            try:
                self.directory.mkdir(mode=0o700)
                self._cache = JitCache(self.directory, has_gpus=bool(visible_gpus()))
                self.address, self.follower_port = "", 0
                if self.first == 0:
                    listener = self._sockets["MLXDIST_RENDEZVOUS_FD"] = _listen(self.interface, self.port, self.size)
                    self.address = format_address(*listener.getsockname()[:2])
                if self.follower:
                    bound = self._sockets["MLXDIST_FOLLOWER_FD"] = _bind(self.follower)
                    self.follower_port = bound.getsockname()[1]
                self._start_reaper()
            except OSError as error:
                raise ResourceError(f"the job cannot be prepared in {self.directory}: {error}") from None
            self._awake = keep_awake(self.reaper.pid)  # the reaper ends last
            undo.pop_all()

    def __enter__(self) -> "LocalJob":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        if self.reaper.wait() != 0:
            from .reaper import clean_up  # it was killed itself

            clean_up(self.job, str(self.directory), str(self._record.path))
        if self._membership is not None:
            self._membership.close()
        if self._awake is not None:
            self._awake.close()
        self._record.close()
        self._close_sockets()
        self._cache.close()

    def place_of_rank_0(self) -> Path:
        """Its temporary directory."""
        return self.directory / "0"

    def start(self, rank: int, stdout: int, stderr: int, joins: bool = False) -> LocalRank:
        """Starts one rank, which writes to these two descriptors.

        ``joins``: it takes the place of one that is lost, in a job that runs.
        """
        temporary = self.directory / str(rank)
        if joins:
            shutil.rmtree(temporary, ignore_errors=True)  # that of the lost rank
        temporary.mkdir()
        local_rank = rank - self.first
        variables = (
            self._cache.link(temporary, local_rank)
            | self.variables
            | {
                "MLXDIST_RENDEZVOUS": self.address,
                "MLXDIST_SECRET": self.secret,
                "MLXDIST_JOB": self.job,
                "MLXDIST_RESTART_COUNT": str(self.restart),
                "MLXDIST_ERROR_FILE": str(self.first_failure),
                "MLXDIST_FLIGHT_DIR": self._record.job.flight,
                "TMPDIR": str(temporary),
            }
        )
        if self._membership is not None:
            self._tokens[rank] = _random_hex(8)
            variables["MLXDIST_MEMBERSHIP"] = f"{self._membership_path}:{self._tokens[rank]}"
        if joins:
            variables["MLXDIST_JOIN"] = "1"
        variables |= self.exports.variables | dict.fromkeys(self.exports.by_local_rank, str(local_rank))
        for name, text in self.exports.files.items():
            (temporary / name).write_text(text)
            variables[name] = str(temporary / name)
        if self.numbered:
            variables |= _numbers(rank, self.size)
            variables["MLX_LOCAL_RANK"] = str(local_rank)
            variables |= gpu_of_rank(self.variables, local_rank, visible_gpus())
            if (node := self.emulated_node(rank)) is not None:
                before = sum(self.emulated_node(other) == node for other in range(rank))
                variables |= {"MLXDIST_EMULATED_NODE": str(node), "MLX_LOCAL_RANK": str(before)}
        if not self.numbered:
            self._close_sockets()  # the rank that is 0 will listen there
        passed = {name: sock.fileno() for name, sock in self._sockets.items()} if rank == 0 else {}
        variables |= {name: str(descriptor) for name, descriptor in passed.items()}
        stdin = subprocess.DEVNULL if joins else self._standard_input(rank)
        try:
            process = subprocess.Popen(
                self.command,
                env=variables,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=tuple(passed.values()),
                start_new_session=True,
            )
        finally:
            if self.piped and stdin != subprocess.DEVNULL:
                os.close(stdin)
        self._started[rank] = process.pid
        self._running.add(rank)
        self._notify_reaper(f"+{process.pid}")
        if rank == 0:
            self._close_sockets()  # rank 0 has them now; its end has to close the ports
        return LocalRank(rank, process, is_mpirun=not self.numbered)

    def _close_sockets(self) -> None:
        while self._sockets:
            self._sockets.popitem()[1].close()

    def _standard_input(self, rank: int) -> int:
        if rank and self.stdin != "all":
            return subprocess.DEVNULL
        if not self.piped:
            return 0
        source, target = os.pipe()
        self._pipes.append(Pipe(f"rank {rank}", target))
        return source

    def readers(self, wake: Callable[[], None]) -> list[Pipe]:
        """The pipes to the ranks' standard input, where it is piped."""
        return self._pipes

    def ended(self, rank: int, status: int) -> None:
        self._notify_reaper(f"-{self._started[rank]}")
        self._running.discard(rank)
        if self._running:
            self.note_end(rank, status)

    def note_end(self, rank: int, status: int) -> None:
        """Records that a rank has ended, for ranks that wait for it in mlxdist.init()."""
        if rank not in self.members:  # of an epoch before
            return
        with contextlib.suppress(OSError):  # the disk is full: they wait until their time is over
            number = self.members.index(rank)
            note = self.first_failure.with_name(f"{self.first_failure.name}.ended-{number}")
            replace_file(note, str(status), 0o600)

    @property
    def _membership_path(self) -> Path:
        return self.directory / "membership"

    def let_shrink(self, wake: Callable[[], None]) -> None:
        """Lets ranks ask for the next epoch, before the first is started. ``wake()``: there are `questions`."""
        from .membership_socket import MembershipSocket

        try:
            self._membership = MembershipSocket(self._membership_path, wake)
        except OSError as error:
            raise ResourceError(f"--elastic: {self._membership_path} cannot be made: {error}; set TMPDIR") from None

    def questions(self) -> "list[tuple[Question, str]]":
        """The questions of ranks here since the last call, each with the address where its rank listens."""
        if self._membership is None:
            return []
        host = parse_address(self.address)[0] if self.address else ""
        found = [each for each in self._membership.questions() if each.member in self._running]
        return [(each, format_address(host, each.port)) for each in found if each.token == self._tokens[each.member]]

    def begin_epoch(self, epoch: "Epoch", secret: str, variables: Mapping[str, str]) -> None:
        """Answers the members here: their new world. ``variables``: those that depend on who the ranks are."""
        self.members = epoch.members
        self.first_failure = self.directory / f"first_failure-{epoch.number}"
        self._record.note_ranks(self._started, self.members)
        self._epoch = {
            "MLXDIST_RENDEZVOUS": epoch.address,
            "MLXDIST_SECRET": secret,
            "MLXDIST_EPOCH": str(epoch.number),
            "MLXDIST_ERROR_FILE": str(self.first_failure),
            **variables,
        }
        for member in self.members:
            self.answer(member)

    def answer(self, member: int) -> None:
        """Answers a member here that waits for the epoch that has begun."""
        if member in self._running and self._membership is not None:
            own = {"MLXDIST_MEMBER": str(member), **_numbers(self.members.index(member), len(self.members))}
            self._membership.answer(member, {"members": self.members, "variables": self._epoch | own})

    def show_joining(self, some: bool) -> None:
        """Shows the ranks here whether processes wait to join."""
        if self._membership is not None:
            self._membership.show_joining(some)

    def refuse(self, member: int, why: str) -> None:
        """Answers a member here that waits for another epoch: there will be none with it."""
        if self._membership is not None:
            self._membership.answer(member, {"error": why})

    def all_started(self) -> None:
        if self.numbered:
            self._record.note_ranks(self._started)

    def awake(self) -> dict[str, str]:
        """The reason why this Mac may fall asleep, or ""; nothing on other systems."""
        return {} if self._awake is None else {"this Mac": self._awake.error}

    def is_on_mac(self, rank: int) -> bool:
        return sys.platform == "darwin"

    def interrupts(self) -> list[tuple[signal.Signals, str]]:
        """An empty list: only the launcher gets signals, because no other host has a part in the job."""
        return []

    def remove_recordings(self) -> None:
        self._record.remove_recordings()

    def first_failed(self) -> FirstFailure | None:
        """The first failure, as noted by ranks here that use mlxdist; None if they could not note it."""
        try:
            noted = FirstFailure.parse(self.first_failure.read_text())
            return noted._replace(rank=self.members[noted.rank])
        except (OSError, ValueError, IndexError):
            return None

    def recordings(self) -> str | None:
        """The directory of the ranks' recordings, or None."""
        return self._record.recordings()

    def has_ended(self) -> bool:
        """Whether nothing of the job is left, after `end`."""
        return self.reaper.poll() is not None

    def end(self) -> None:
        """Makes the reaper end what is left of the job, remove its directories and exit."""
        if not self._pipe.closed:
            if self.succeeded:
                self._cache.keep()
            self._notify_reaper("end")
            self._pipe.close()

    def _start_reaper(self) -> None:
        source, target = os.pipe()
        self._pipe = os.fdopen(target, "wb", buffering=0)
        reaper, grace = Path(__file__).with_name("reaper.py"), str(self.grace)
        directories = [str(self.directory), str(self._record.path)]
        self.reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _REAPER, str(reaper), self.job, *directories, grace],
            # Without the name of an outer job, whose cleanup would kill this reaper before it has ended its own job.
            env={name: value for name, value in os.environ.items() if not name.startswith("MLXDIST_")},
            stdin=source,
            stdout=subprocess.DEVNULL,
            pass_fds=self._cache.pass_on() + self._record.pass_on(),
            start_new_session=True,
        )
        os.close(source)

    def _notify_reaper(self, line: str) -> None:
        try:
            self._pipe.write(f"{line}\n".encode())
        except BrokenPipeError:
            return  # killed; __exit__ cleans up in its place


def _numbers(rank: int, size: int) -> dict[str, str]:
    """mlxdist's variables, and those that programs and MLX's backends read."""
    variables = dict.fromkeys(("MLXDIST_RANK", "MLX_RANK", "MLX_GLOBAL_RANK"), str(rank))
    return variables | dict.fromkeys(("MLXDIST_WORLD_SIZE", "MLX_WORLD_SIZE"), str(size))


def new_name() -> str:
    """A name for a job. A job inside a rank of another one carries both names, so the outer job's cleanup finds it."""
    outer = os.environ.get("MLXDIST_JOB")
    return (f"{outer}." if outer else "") + _random_hex(8)


def _listen(interface: str, port: int, size: int) -> socket.socket:
    """A listening socket. ``interface``: an address, or empty for all addresses, also of IPv6."""
    try:
        return listen_for_ranks(interface, port, size)
    except OSError as error:
        where = format_address(interface or "0.0.0.0", port)
        raise ResourceError(f"rank 0 cannot listen at {where}: {error.strerror}") from None


def _bind(address: str) -> socket.socket:
    """A socket with a port of its own, at which nothing listens yet: a connection is refused until rank 0 does."""
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        bound.bind((address, 0))
    except OSError as error:
        bound.close()
        raise ResourceError(
            f"rank 0 cannot listen at {address} for this job's launcher: {error.strerror}; with --max-restarts 0 it "
            "listens for clients itself"
        ) from None
    return bound


def start_with_pipes(start: Callable[[int, int, int], _Rank], rank: int) -> tuple[_Rank, int, int]:
    """Calls ``start`` with two new pipes. Returns the rank and the descriptors that its streams are read from."""
    (out, stdout), (err, stderr) = os.pipe(), os.pipe()
    try:
        return start(rank, stdout, stderr), out, err
    finally:
        os.close(stdout)
        os.close(stderr)


def allow_descriptors(ranks: int, hosts: int = 0) -> None:
    """Raises the limit of open descriptors: a rank needs pipes, their copies and log files, a host a connection."""
    raise_limit(8 * ranks + 8 * hosts + 64)
