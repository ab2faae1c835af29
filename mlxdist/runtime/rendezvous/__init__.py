"""The side channel of a job: an authenticated TCP connection from every rank to rank 0.

Over it the ranks find each other, exchange the addresses of their queue pairs (all at once, or two of them when they
need it), and learn when one of them has died, failed or left. The payload of collectives never travels here.

    rendezvous.py   what a rank calls
    step.py         a step that fails on all ranks where it fails on one
    connect.py      rank 0 listens, the others connect; the handshake as they see it
    hub.py          rank 0's service for all: the handshake as it sees it, blobs, messages, failures, deadlines
    messages.py     from one rank to another
    wire.py         frames and proofs
    loop.py         the thread
"""

from .rendezvous import Rendezvous

__all__ = ["Rendezvous"]
