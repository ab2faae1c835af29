"""How the ranks reach each other: rank 0 listens, the others connect and prove themselves."""

import contextlib
import errno
import hmac
import itertools
import os
import socket
import time

from mlxdist.base import local_network, logger
from mlxdist.base.environment import Environment, format_address
from mlxdist.base.errors import RendezvousError
from mlxdist.version import __version__

from .protocol import (
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Framing,
    Kind,
    WireError,
    knock,
    pack_json,
    proof,
    session_keys,
    unpack_json,
)
from .server import keep_alive, status_noted

__all__ = ["connect", "listen"]

# What MLXDIST_RENDEZVOUS_TIMEOUT can be.
MAX_SECONDS = 1e9

# For a try to connect. The kernel repeats a SYN after 1, 3 and 7 s: too rarely where strangers fill the queue of the
# listener, which has a free place every moment. So the first tries are short, and the others allow for a slow network.
SYN_SECONDS = 0.2
SHORT_TRIES = 20
CONNECT_SECONDS = 5.0


def listen(environment: Environment) -> socket.socket:
    """Rank 0: the socket that the launcher opened, or a new one at MLXDIST_RENDEZVOUS."""
    if environment.rendezvous_fd is not None:
        return _inherit(environment, environment.rendezvous_fd)
    host, port = environment.rendezvous
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
    raise RendezvousError(f"rendezvous: rank 0 on {socket.gethostname()} cannot listen on {where}: {advice}")


def _inherit(environment: Environment, descriptor: int) -> socket.socket:
    """A duplicate: the descriptor stays, for the world that may come after this one."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:
        sock = None
    if (
        sock is None
        or sock.family not in (socket.AF_INET, socket.AF_INET6)
        or (sock.getsockname()[1] != environment.rendezvous[1])
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


def _close_in_child() -> None:
    for descriptor, inode in _inherited.items():
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
    _inherited.clear()


os.register_at_fork(after_in_child=_close_in_child)


def connect(environment: Environment) -> tuple[socket.socket, Framing, dict]:
    """Other ranks: a connection on which both sides have proven to know the secret, and rank 0's welcome.

    Tries again until the deadline: rank 0 may start late.
    """
    deadline = time.monotonic() + environment.rendezvous_timeout
    pause = 0.02
    for number in itertools.count():
        started, patience = time.monotonic(), SYN_SECONDS if number < SHORT_TRIES else CONNECT_SECONDS
        sock, trouble = _connect_once(environment, min(patience, deadline - started))
        if sock is not None:
            try:
                return sock, *_greet(environment, sock, deadline)
            except TimeoutError:
                sock.close()
                trouble = "it is connected, but silent: rank 0 has not come to its rendezvous, or it is another program"
            except OSError as error:
                sock.close()
                trouble = error.strerror or str(error)
            except BaseException:
                sock.close()
                raise
        logger.trace("rendezvous", f"rank 0 at {format_address(*environment.rendezvous)}: {trouble}; trying again")
        if status := status_noted(environment, 0):
            raise RendezvousError(
                f"rendezvous: rank 0 has ended with exit status {status} before rank {environment.rank} reached it; "
                "all ranks of the job must call mlxdist.init(); see the output of rank 0 for the reason, if there is one"
            )
        if time.monotonic() + pause >= deadline:
            raise RendezvousError(
                f"rendezvous: rank {environment.rank} of {environment.world_size} on {socket.gethostname()} could not "
                f"reach rank 0 at {format_address(*environment.rendezvous)} for {environment.rendezvous_timeout:g} s "
                f"({trouble}); see the output of rank 0 for the reason"
            )
        if time.monotonic() - started < patience:
            time.sleep(pause)
            pause = min(2 * pause, 0.5)


def _connect_once(environment: Environment, patience: float) -> tuple[socket.socket | None, str]:
    host, port = environment.rendezvous
    trouble = ""
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return None, error.strerror
    for family, kind, protocol, _, address in candidates:
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(max(0.01, patience))
        try:
            sock.connect(address)
            # With no listener yet, a connection to a port of this machine can meet itself.
            if sock.getsockname() != sock.getpeername():
                keep_alive(sock)
                return sock, ""
            trouble = "connection refused"
        except OSError as error:
            trouble = (error.strerror or str(error)) + local_network.hint(error)
        sock.close()
    return None, trouble


def _greet(environment: Environment, sock: socket.socket, deadline: float) -> tuple[Framing, dict]:
    """The handshake of wire.py, with blocking reads.

    Raises:
        OSError: the connection broke or the deadline passed; another try may succeed.
        RendezvousError: refused for good.
    """
    framing, secret = Framing(), environment.secret
    where = format_address(*environment.rendezvous)
    try:
        sock.sendall(framing.frame(Kind.KNOCK, knock(secret, os.urandom(NONCE_BYTES))))
        kind, challenge = _read_frame(sock, framing, deadline)
        if kind != Kind.CHALLENGE or not challenge.startswith(MAGIC) or len(challenge) != len(MAGIC) + NONCE_BYTES:
            raise WireError(f"{challenge[:32]!r}")
        hub_nonce, nonce = challenge[len(MAGIC) :], os.urandom(NONCE_BYTES)
        greeting = pack_json(
            rank=environment.rank,
            world_size=environment.world_size,
            job=environment.job,
            version=__version__,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        hello = nonce + proof(secret, "rank", hub_nonce, nonce, greeting) + greeting
        sock.sendall(framing.frame(Kind.HELLO, hello))
        kind, answer = _read_frame(sock, framing, deadline)
        if kind == Kind.REFUSED:
            # Whoever answers has proven nothing yet: its text is shown, but cannot steer a terminal.
            text = "".join(c if c.isprintable() else "?" for c in answer.decode(errors="replace"))
            raise RendezvousError(
                f"rendezvous: rank {environment.rank} of {environment.world_size} on "
                f"{socket.gethostname()} was refused by rank 0 at {where}: {text}"
            )
        given, welcome = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
        if kind != Kind.WELCOME or not hmac.compare_digest(given, proof(secret, "rank 0", nonce, hub_nonce, welcome)):
            raise WireError("no proof that it knows MLXDIST_SECRET")
        fields = unpack_json(welcome, host=str, pid=int, seconds=float)
        if not 0 <= fields["seconds"] <= MAX_SECONDS:
            raise WireError(f"a welcome that leaves {fields['seconds']:g} s")
    except WireError as error:
        raise RendezvousError(
            f"rendezvous: what answers rank {environment.rank} at {where} is not rank 0 of this job (it sent {error}); "
            "check MLXDIST_RENDEZVOUS, and that all ranks have the same version of mlxdist"
        ) from None
    to_hub, from_hub = session_keys(secret, hub_nonce, nonce)
    framing.secure(send_key=to_hub, receive_key=from_hub)
    return framing, fields


def _read_frame(sock: socket.socket, framing: Framing, deadline: float) -> tuple[int, bytes]:
    while (frame := framing.next_frame()) is None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        sock.settimeout(remaining)
        data = sock.recv(4096)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed during the handshake")
        framing.feed(data)
    return frame
