"""How the ranks reach each other: rank 0 listens, the others connect and authenticate."""

import contextlib
import errno
import os
import socket
import threading
import time

from mlxdist.base import local_network, logger
from mlxdist.base.environment import Environment, format_address
from mlxdist.base.errors import RendezvousError
from mlxdist.version import __version__

from .authentication import Refused, authenticate
from .protocol import Framing, ProtocolError, pack_json, unpack_json
from .server import exit_status_of, keep_alive

__all__ = ["close_inherited", "connect", "listen", "reconnect"]

# What MLXDIST_RENDEZVOUS_TIMEOUT can be.
MAX_SECONDS = 1e9

# For an attempt to connect. The kernel retransmits a SYN after 1, 3 and 7 s: too rarely where a flood of connections
# fills the listener's queue, which has a free slot every moment. So the first attempts are short, and the others allow
# for a slow network.
SYN_SECONDS = 0.2
SHORT_ATTEMPTS = 20
CONNECT_SECONDS = 5.0
# Between two attempts to connect again.
RECONNECT_SECONDS = 0.5


def listen(environment: Environment) -> socket.socket:
    """Returns rank 0's listening socket: the one that the launcher opened, or a new one at MLXDIST_RENDEZVOUS."""
    if environment.rendezvous_fd is not None:
        return _inherit(environment, environment.rendezvous_fd)
    host, port = environment.address
    where = format_address(host, port)
    failures = []
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise RendezvousError(
            f"rendezvous: rank 0 cannot look up {where} ({error.strerror}); "
            "set MLXDIST_RENDEZVOUS to an address of rank 0's machine"
        ) from None
    for family, kind, protocol, _, address in candidates:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(max(128, environment.world_size))
            return sock
        except OSError as error:
            sock.close()
            failures.append(error)
    if failures[0].errno == errno.EADDRINUSE:
        advice = "another process listens there; choose another port"
    elif failures[0].errno == errno.EADDRNOTAVAIL:
        advice = "that address is not this machine's; MLXDIST_RENDEZVOUS must name the machine of rank 0"
    else:
        advice = f"{failures[0].strerror}; set MLXDIST_RENDEZVOUS to another address of this machine"
    raise RendezvousError(f"rendezvous: rank 0 on {environment.host_name} cannot listen on {where}: {advice}")


def _inherit(environment: Environment, descriptor: int) -> socket.socket:
    """Returns a duplicate of the launcher's socket: the descriptor stays for a world that may come after this one."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:
        sock = None
    if (
        sock is None
        or sock.family not in (socket.AF_INET, socket.AF_INET6)
        or (sock.getsockname()[1] != environment.address[1])
    ):
        if sock is not None:
            sock.detach()
        raise RendezvousError(
            f"rendezvous: descriptor {descriptor} (MLXDIST_RENDEZVOUS_FD) of rank 0 is not the launcher's listening "
            "socket: a wrapper between `mlxdist launch` and this program has closed it, as subprocess.run does; "
            "launch the program directly, or let the wrapper exec it or pass the descriptor on"
        )
    try:
        sock.set_inheritable(False)
        _inherited[descriptor] = os.fstat(descriptor).st_ino
        return sock.dup()
    finally:
        sock.detach()


# Of the launcher, with their inodes: the program may have closed one. A forked child closes them, or the port would
# outlive rank 0.
_inherited: dict[int, int] = {}


def close_inherited(descriptor: int) -> None:
    """Closes a listening socket, when another world has another one."""
    inode = _inherited.pop(descriptor, None)
    with contextlib.suppress(OSError):  # the program has closed it
        if os.fstat(descriptor).st_ino == inode:
            os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in list(_inherited):
        close_inherited(descriptor)


os.register_at_fork(after_in_child=_close_in_child)


def connect(environment: Environment) -> tuple[socket.socket, Framing, dict]:
    """Connects a rank other than 0: returns an authenticated connection, and rank 0's welcome.

    Retries until the deadline: rank 0 may start late.
    """
    deadline = time.monotonic() + environment.rendezvous_timeout
    where, rank = format_address(*environment.address), f"rank {environment.rank} of {environment.world_size}"
    pause, attempts = 0.02, 0
    while True:
        started, limit = time.monotonic(), SYN_SECONDS if attempts < SHORT_ATTEMPTS else CONNECT_SECONDS
        try:
            return _attempt(environment, min(limit, deadline - started), deadline)
        except OSError as error:
            problem = (error.strerror or str(error)) + local_network.hint(error)
        attempts += 1
        logger.trace("rendezvous", f"rank 0 at {where}: {problem}; retrying")
        if status := exit_status_of(environment, 0):
            raise RendezvousError(
                f"rendezvous: rank 0 has ended with exit status {status} before rank {environment.rank} reached it; "
                "all ranks of the job must call mlxdist.init(); see the output of rank 0"
            )
        if time.monotonic() + pause >= deadline:
            raise RendezvousError(
                f"rendezvous: {rank} on {environment.host_name} could not reach rank 0 at {where} for "
                f"{environment.rendezvous_timeout:g} s ({problem}); see the output of rank 0 for the reason"
            )
        if time.monotonic() - started < limit:
            time.sleep(pause)
            pause = min(2 * pause, 0.5)


def reconnect(
    environment: Environment, epoch: int, received: int, stopped: threading.Event
) -> tuple[socket.socket, Framing, dict] | None:
    """Connects a rank again that an outage has cut off; None once ``stopped`` is set. It retries without a deadline.

    ``epoch``: of the last connection, 0 for the first; that of the new one is ``welcome["epoch"]``. ``received``: the
    reliable frames that this rank has processed.

    Raises:
        RendezvousError: rank 0 has refused this rank, or does not listen any more.
    """
    while not stopped.is_set():
        epoch += 1
        started = time.monotonic()
        try:
            sock, framing, welcome = _attempt(
                environment, CONNECT_SECONDS, started + 2 * CONNECT_SECONDS, epoch, received
            )
            return sock, framing, welcome | {"epoch": epoch}
        except ConnectionRefusedError:
            raise RendezvousError(
                f"rendezvous: rank 0 does not listen at {format_address(*environment.address)} any more"
            ) from None
        except OSError as error:
            logger.trace("rendezvous", f"rank 0: {error.strerror or error}; connecting again")
        stopped.wait(RECONNECT_SECONDS)
    return None


def _attempt(
    environment: Environment, seconds: float, deadline: float, epoch: int = 0, received: int = 0
) -> tuple[socket.socket, Framing, dict]:
    """Connects once, within ``seconds``, and authenticates.

    Raises:
        OSError: another attempt may succeed.
        RendezvousError: no other attempt can.
    """
    where = format_address(*environment.address)
    sock = socket.create_connection(environment.address, max(0.01, seconds))
    try:
        # With no listener yet, a connection to a port of this machine can meet itself.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        keep_alive(sock)
        return sock, *_authenticate(environment, sock, deadline, epoch, received)
    except Refused as refusal:
        sock.close()
        rank = f"rank {environment.rank} of {environment.world_size}"
        raise RendezvousError(
            f"rendezvous: rank 0 at {where} refused {rank} on {environment.host_name}: {refusal}"
        ) from None
    except ProtocolError as error:
        sock.close()
        raise RendezvousError(
            f"rendezvous: what responds to rank {environment.rank} at {where} is not rank 0 of this job (it "
            f"sent {error}); check MLXDIST_RENDEZVOUS, and that all ranks have the same version of mlxdist"
        ) from None
    except BaseException:
        sock.close()
        raise


def _authenticate(
    environment: Environment, sock: socket.socket, deadline: float, epoch: int, received: int
) -> tuple[Framing, dict]:
    """Authenticates this rank. Raises what ``authenticate`` raises; after an OSError another attempt may succeed."""
    greeting = pack_json(
        rank=environment.rank,
        world_size=environment.world_size,
        job=environment.job,
        version=__version__,
        host=environment.host_name,
        pid=os.getpid(),
        epoch=epoch,
        received=received,
    )
    try:
        framing, welcome = authenticate(sock, environment.secret, "rank", greeting, deadline)
    except TimeoutError:
        silent = "it is connected, but silent: rank 0 has not come to its rendezvous, or it is another program"
        raise TimeoutError(errno.ETIMEDOUT, silent) from None
    fields = unpack_json(welcome, host=str, pid=int, seconds=float, received=int)
    if not 0 <= fields["seconds"] <= MAX_SECONDS:
        raise ProtocolError(f"a welcome that leaves {fields['seconds']:g} s")
    return framing, fields
