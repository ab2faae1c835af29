"""The standard streams of a process that ssh has started, as a connection that nothing else in it can disturb."""

import os

__all__ = ["claim_streams"]


def claim_streams() -> tuple[int, int]:
    """Descriptors to read from and to write to. What else is printed in this process goes to the standard error."""
    target = os.dup(1)
    os.dup2(2, 1)
    source = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return source, target
