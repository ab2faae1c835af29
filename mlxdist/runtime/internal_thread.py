"""Threads of mlxdist itself, which call no operation of a group and run no code of the program."""

import threading

__all__ = ["InternalThread"]


class InternalThread(threading.Thread):
    """The class distinguishes it from the program's threads: a name may be anything."""
