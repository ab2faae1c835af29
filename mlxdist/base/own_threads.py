"""Threads of mlxdist itself, which call no operation of a group and run nothing of the program."""

import threading

__all__ = ["OwnThread"]


class OwnThread(threading.Thread):
    """Told from the program's by its class: a name may be anything."""
