"""The side channel of a job: an authenticated TCP connection from every rank to rank 0.

Over it the ranks find each other, exchange the addresses of their queue pairs (all at once, or two of them when they
need it), and learn when one of them has died, failed or left. A connection that the network has lost is made again. The
payload of collectives never travels here.

    rendezvous.py       what a rank calls
    startup_step.py     a step that fails on all ranks where it fails on one
    connect.py          rank 0 listens, the others connect
    authentication.py   the handshake, of both sides
    member.py           a rank, as rank 0 knows it
    server.py           rank 0's service for all: all_gather, messages, failures, deadlines
    heartbeat.py        the position of every rank, once a second
    outage.py           whether a rank that is cut off is lost
    observer.py         `mlxdist top` and `mlxdist dump` read what rank 0 knows
    protocol.py         frames and their payloads
    event_loop.py       the thread
"""

from .rendezvous import Rendezvous

__all__ = ["Rendezvous"]
