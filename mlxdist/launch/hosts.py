"""A job on several hosts: an agent on each starts the ranks there. The supervisor treats it like a local job."""

import contextlib
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxdist.base.environment import format_address, parse_address
from mlxdist.base.errors import ResourceError
from mlxdist.cluster.hostfile.hosts import Hostfile
from mlxdist.cluster.ssh.connection import CONNECT_SECONDS
from mlxdist.cluster.ssh.ssh import LOST, SshConfig
from mlxdist.cluster.ssh.this_machine import look_up
from mlxdist.version import __version__

from .executable import CannotRun
from .exit_status import FirstFailure
from .job_frames import JobFrame
from .local import allow_descriptors, keep_awake, new_secret, usual_grace
from .membership import Epoch
from .membership_socket import Question
from .remote import HostInput, RemoteHost, RemoteRank
from .restarts import name_of_start
from .wakeup import Interrupted, Wakeup

if TYPE_CHECKING:
    from .plan import LaunchPlan

__all__ = ["HostsJob", "address_for_launcher", "address_for_others"]

_STEP = 0.1  # between two looks at whether the user has given up
_PREPARE_SECONDS = 60.0  # a host may have to clean up first
# Seconds after the ranks' grace period in which agents report that no process is left.
_END_SECONDS = 15.0
# Without --control-grace. Ranks of mlxdist notice by themselves that a host is lost; those of other backends do not.
_CONTROL_GRACE, _CONTROL_GRACE_OF_OTHERS = 300.0, 15.0
# An agent ends its ranks that much later than ssh gives up. TCP repeats what was lost at intervals that double: a
# connection is back later than its network. A sleeping or stopped (Ctrl-Z) launcher sends nothing, too.
AGENT_SECONDS = 45.0
_PING_SECONDS = 5.0
_SILENT_SECONDS = 15.0  # without an answer, until the launcher says so


class HostsJob:
    """A job on several hosts. A context manager: its exit ends all of the job on every host that can be reached."""

    def __init__(
        self,
        plan: "LaunchPlan",
        hostfile: Hostfile,
        name: str,
        restart: int,
        wakeup: Wakeup,
        say: Callable[[str], None],
        has_follower: bool = False,
    ) -> None:
        """Prepares the job. ``plan``: its variables are set for all ranks, in addition to those of their host.

        ``has_follower``: whether rank 0 gets a socket for the follower, if it is on another host; see `Follower`.
        """
        self.job = name_of_start(name, restart)
        self.secret = new_secret()
        self.succeeded = False
        self._hostfile = hostfile
        self._backend = plan.backend
        self.grace = usual_grace(False) if plan.options.grace_period is None else plan.options.grace_period
        self._is_grace_usual = plan.options.grace_period is None
        self._changed = threading.Condition()
        self._wakeup = wakeup
        look_up(host.name for host in hostfile.hosts)
        usual = _CONTROL_GRACE if plan.backend.name == "mlxdist" else _CONTROL_GRACE_OF_OTHERS
        self._control_grace = usual if plan.options.control_grace is None else plan.options.control_grace
        self._agent_silence = self._control_grace + AGENT_SECONDS
        ssh_config = replace(plan.ssh_config or SshConfig(), silence=self._control_grace)
        self._hosts = [RemoteHost(host, ssh_config, self._changed) for host in hostfile.hosts]
        self._host_of = [host for host, entry in zip(self._hosts, hostfile.hosts) for _ in range(entry.slots)]
        self._ends_at = math.inf
        self._say = say
        self._has_follower = has_follower
        self._reported: list[RemoteHost] = []  # hosts whose failure has been printed
        self._silent: dict[RemoteHost, float] = {}  # the time of the last answer
        self._is_over = threading.Event()
        self._pings = threading.Thread(target=self._ping, name="mlxdist pings", daemon=True)
        self._stopped: list[tuple[signal.Signals, str]] = []  # signals that have come to hosts
        self._fields = {
            "variables": plan.variables,
            "directory": plan.directory,
            "mpi_shim": plan.backend.name == "mlxdist",
            "silence": self._agent_silence,
            "elastic": plan.options.elastic is not None,
        }
        self._start = {  # of `LocalJob`, on each host
            "name": name,
            "restart": restart,
            "size": hostfile.ranks,
            "command": plan.command,
            "secret": self.secret,
            "port": plan.backend.rendezvous_port,
            "stdin": plan.options.stdin,
        }

    def __enter__(self) -> "HostsJob":
        allow_descriptors(len(self._host_of), len(self._hosts))
        # Where this machine is one of the hosts, its agent keeps it awake.
        self._awake = None if any(host.is_local for host in self._hosts) else keep_awake(os.getpid())
        with contextlib.ExitStack() as undo:
            if self._awake is not None:
                undo.callback(self._awake.close)
            for host in self._hosts:
                host.connect(self._wakeup.wake)
                undo.callback(self._close, host)
            self._pings.start()
            undo.callback(self._stop_pings)
            self._connect()
            self._prepare()
            self._found_at = self._address()
            if self._fields["elastic"]:  # any host may become that of rank 0
                self._addresses = {host: self._address_of(host) for host in self._hosts}
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        self._undo.close()

    def _close(self, host: RemoteHost) -> None:
        if host in self._silent and not host.closed:
            self._say(f"{host.name} is silent still: its ranks are ended after {self._agent_silence:g} s of silence")
        if self._ends_at < math.inf:
            host.close(max(0.0, self._ends_at - time.monotonic()))
        else:  # the job has not begun
            host.close(self.grace + _END_SECONDS if host.hello else 0.0)

    def _ping(self) -> None:
        seconds = min(_PING_SECONDS, self._agent_silence / 12)
        while True:
            for host in self._hosts:
                host.ping()
                self._note_silence(host, host.unanswered * seconds)
            if self._is_over.wait(seconds):
                return

    def _note_silence(self, host: RemoteHost, seconds: float) -> None:
        """Says once that a host is silent, and once that it is back.

        ``seconds``: the time in which pings were sent. A launcher that was stopped has sent none.
        """
        if host.unanswered <= 1 and host in self._silent:
            away = time.monotonic() - self._silent.pop(host)
            self._say(f"{host.name} answers again, after {away:.0f} s")
        elif seconds >= _SILENT_SECONDS and host not in self._silent and not host.closed:
            self._silent[host] = time.monotonic() - seconds
            kept = f"its ranks are kept for {self._control_grace:g} s of silence (--control-grace)"
            self._say(f"{host.name} has not answered for {seconds:.0f} s; {kept}")

    def _stop_pings(self) -> None:
        """Stops the pings before a connection is closed: another file may then get its descriptor's number."""
        self._is_over.set()
        self._pings.join()

    def place_of_rank_0(self) -> Path | tuple[str, int]:
        """Its temporary directory, if it is on this machine; else where it listens for the follower."""
        first = self._hosts[0]
        if first.is_local:
            return Path(first.ready["directory"], "0")
        return self._address_for_follower(), int(first.ready["follower_port"])

    def start(self, rank: int, stdout: int, stderr: int, joins: bool = False) -> RemoteRank:
        """Adds a rank. Ranks run once all have been added; see `all_started`. `readers` give them standard input.

        ``joins``: see `LocalJob.start`; it is started at once.
        """
        host = self._host_of[rank]
        if joins and host.closed:
            raise OSError(f"{host.name} is lost")
        added = host.add_rank(rank, os.dup(stdout), os.dup(stderr))
        if joins:
            host.send(JobFrame.JOIN, rank)
        return added

    def all_started(self) -> None:
        exports = self._backend.exports([host.ready["ports"] for host in self._hosts])
        fields = {"address": self._found_at, "exports": asdict(exports)}
        for host in self._hosts:
            host.say = self._say
            host.send_json(JobFrame.START, fields)

    def readers(self, wake: Callable[[], None]) -> list[HostInput]:
        """The hosts' readers of the standard input. ``wake`` is called when one may take more."""
        return [HostInput(host, wake) for host in (self._hosts if self._start["stdin"] == "all" else self._hosts[:1])]

    def ended(self, rank: int, status: int) -> None:
        of_rank = self._host_of[rank]
        lost = status == LOST and of_rank.closed
        if of_rank not in self._reported and (lost or of_rank.failed is not None):
            self._reported.append(of_rank)
            self._say(of_rank.why_lost() if lost else f"{of_rank.name}: {of_rank.failed}")
        # In the rendezvous rank 0 waits for all others, and they wait for rank 0: no other host has to be notified.
        for host in self._hosts if rank == 0 else self._hosts[:1]:
            if host is not of_rank:
                host.send_json(JobFrame.GONE, {"status": status}, rank)

    def awake(self) -> dict[str, str]:
        """The reason why each Mac in the job may fall asleep, by name; "" where it stays awake."""
        found = {} if self._awake is None else {"this Mac": self._awake.error}
        return found | {host.name: error for host in self._hosts for error in host.ready["awake"].values()}

    def is_on_mac(self, rank: int) -> bool:
        return self._host_of[rank].is_mac

    def interrupts(self) -> list[tuple[signal.Signals, str]]:
        """Signals that have come to agents since the last call, each with its host: a user ends the job there."""
        found = [(host.stopped, host.name) for host in self._hosts if host.stopped is not None]
        new = [interrupt for interrupt in found if interrupt not in self._stopped]
        self._stopped += new
        return new

    def first_failed(self) -> FirstFailure | None:
        """The first failure, as noted on its host. If several hosts noted one, the first host decides."""
        return next((host.first_failed for host in self._hosts if host.first_failed is not None), None)

    def questions(self) -> list[tuple[Question, str]]:
        """The questions of ranks since the last call, each with the address at which others reach its rank."""
        with self._changed:
            found = [(host, question) for host in self._hosts for question in host.questions]
            for host in self._hosts:
                host.questions.clear()
        return [
            (question, format_address(self._addresses[host], question.port))
            for host, question in found
            if self._host_of[question.member : question.member + 1] == [host]
        ]

    def begin_epoch(self, epoch: Epoch, secret: str, variables: Mapping[str, str]) -> None:
        """See `LocalJob.begin_epoch`; the agents of the members do it."""
        fields = epoch._asdict() | {"secret": secret, "variables": dict(variables)}
        members = [self._host_of[member] for member in epoch.members]
        for host in self._hosts:
            host.first_failed = None  # one of the epoch before
            if host in members:
                host.send_json(JobFrame.EPOCH, fields)

    def answer(self, member: int) -> None:
        """See `LocalJob.answer`."""
        self._host_of[member].send(JobFrame.ANSWER, member)

    def show_joining(self, some: bool) -> None:
        """See `LocalJob.show_joining`; any rank may be rank 0."""
        for host in self._hosts:
            host.send(JobFrame.JOINING, payload=bytes([some]))

    def refuse(self, member: int, why: str) -> None:
        """See `LocalJob.refuse`."""
        self._host_of[member].send_json(JobFrame.REFUSED, {"why": why}, member)

    def recordings(self) -> str | None:
        return ", ".join(f"{host.recordings} on {host.name}" for host in self._hosts if host.recordings) or None

    def remove_recordings(self) -> None:
        """Does nothing: an agent removes the recordings itself where all of its ranks have succeeded."""

    def end(self) -> None:
        if self._ends_at == math.inf:
            self._ends_at = time.monotonic() + 2 * self.grace + _END_SECONDS
            for host in self._hosts:
                host.send(JobFrame.END)

    def has_ended(self) -> bool:
        return all(host.closed for host in self._hosts) or time.monotonic() > self._ends_at

    def _connect(self) -> None:
        self._wait(lambda host: bool(host.hello), CONNECT_SECONDS, "does not respond")
        names: dict[Any, str] = {}
        for host in self._hosts:
            theirs = host.hello.get("mlxdist")
            if theirs != __version__:
                raise ResourceError(
                    f"{host.name} has mlxdist {theirs!r:.40}, and this machine {__version__}; install the same version"
                )
            # Two agents on one machine would use the same directory of the job.
            first = names.setdefault(host.hello.get("identity"), host.name)
            if first != host.name:
                raise ResourceError(
                    f"{first} and {host.name} are the same machine; name it once, with as many slots as it has ranks"
                )

    def _prepare(self) -> None:
        if self._is_grace_usual:
            self.grace = max(usual_grace(host.is_mac) for host in self._hosts)
        first = 0
        for host, entry, ports in zip(self._hosts, self._hostfile.hosts, self._backend.ports()):
            start = self._start | {"first": first, "interface": self._interface(self._hosts[0]), "grace": self.grace}
            if first == 0 and self._has_follower and not host.is_local:
                start["follower"] = self._address_for_follower()
            host.prepare(self._fields | {"start": start, "ranks": entry.slots, "ports": ports})
            first += entry.slots
        self._wait(lambda host: bool(host.ready), _PREPARE_SECONDS, "cannot prepare the job in time")

    def _wait(self, condition: Callable[[RemoteHost], bool], seconds: float, late: str) -> None:
        """Waits until ``condition`` holds for all hosts. Raises one error for all hosts where it cannot."""

        def waiting() -> list[RemoteHost]:
            return [host for host in self._hosts if not (condition(host) or host.failed or host.closed)]

        deadline = time.monotonic() + seconds
        with self._changed:
            # In short steps, because a signal does not interrupt the wait for a condition.
            while not self._changed.wait_for(lambda: not waiting(), _STEP) and time.monotonic() < deadline:
                self._wakeup.require_none()
                for interrupt in self.interrupts():
                    raise Interrupted(*interrupt)
            problems = [f"{host.name} {late} within {seconds:g} s" for host in waiting()]
        for host in self._hosts:
            if host.failed is not None:
                problems.append(f"{host.name}: {host.failed}")
            elif host.closed:
                problems.append(host.why_lost())
        if problems:
            failed = [host.exit_code for host in self._hosts if host.failed is not None]
            text = "; ".join(problems)
            raise CannotRun(text, failed[0]) if failed else ResourceError(text)

    def _interface(self, host: RemoteHost) -> str:
        """The address where a rank of a host listens: that in the hostfile; empty for all addresses."""
        if len(self._hosts) == 1 or all(host.is_local for host in self._hosts):
            return "127.0.0.1"
        ips = self._hostfile.hosts[self._hosts.index(host)].ips
        return ips[0] if ips else ""

    def _address_for_follower(self) -> str:
        first = self._hosts[0]
        names = [first.name, str(first.hello.get("host"))]
        return address_for_launcher(self._hostfile.hosts[0].ips, names, first.hello.get("ssh") or [])

    def _address(self) -> str:
        """The address at which the other ranks reach rank 0."""
        listens, port = parse_address(self._hosts[0].ready["address"])
        is_known = listens not in ("0.0.0.0", "::")
        return format_address(listens if is_known else self._address_of(self._hosts[0]), port)

    def _address_of(self, host: RemoteHost) -> str:
        """The address at which the ranks of other hosts reach one: that in the hostfile, or by which ssh has."""
        if (interface := self._interface(host)) != "":
            return interface
        others = [other.hello.get("ssh") or [] for other in self._hosts if other is not host]
        names = [host.name, str(host.hello.get("host"))]
        return address_for_others(names, [host.hello.get("ssh") or [], *others])


def address_for_others(names: Sequence[str], connections: Sequence[Sequence[str]]) -> str:
    """The address of the first host, which has ``names``. ``connections``: SSH_CONNECTION of each host, split.

    Raises:
        ResourceError: no address is known that others can reach.
    """
    if not any(len(words) == 4 for words in connections):
        return "127.0.0.1"
    if len(connections[0]) == 4:
        found = [connections[0][2]]  # by which ssh has reached it
    else:
        # The first host is the launcher's machine: its addresses are those from which ssh reached the others.
        found = [words[0] for words in connections if len(words) == 4]
    # A link-local address is valid only with an interface of the host that uses it, such as %en0. Names of Macs
    # (.local) often resolve to one first.
    found = [address for address in found if not re.match("fe[89ab]", address, re.IGNORECASE)]
    found = found or [address for name in names for address in _ipv4_addresses(name.rpartition("@")[2])]
    if not found:
        raise ResourceError(
            f"ssh has reached {names[0]} by a link-local IPv6 address, which leads nowhere from other hosts: give "
            '"ips" of that host in the hostfile; `mlxdist config` finds them'
        )
    return found[0]


def address_for_launcher(ips: Sequence[str], names: Sequence[str], connection: Sequence[str]) -> str:
    """The address at which this machine reaches another host: that which ssh has used, if it has said so.

    ``ips`` of the hostfile come after it: they may be of a network between the hosts that this machine is not in.
    ``names``, ``connection``: as of `address_for_others`.

    Raises:
        ResourceError: no address is known that this machine can reach.
    """
    if ips and len(connection) != 4:
        return ips[0]
    return address_for_others([*ips, *names], [connection])


def _ipv4_addresses(name: str) -> list[str]:
    try:
        found = [str(where[0]) for *_, where in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except (OSError, UnicodeError):  # ssh knows it by other means
        return []
    return [address for address in found if not address.startswith("127.")]
