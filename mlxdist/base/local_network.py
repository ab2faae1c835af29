"""macOS 15 and later lets a program use the local network only where the user has agreed (Apple's technote TN3179).

Programs that Terminal or an ssh server has started have access. An editor's terminal has none, nor has a process that
a closed ssh connection has left running: its connections fail with errno 65 (EHOSTUNREACH), as without a route.
"""

import errno
import sys

__all__ = ["REMEDY", "hint"]

REMEDY = (
    "in System Settings > Privacy & Security > Local Network switch on the terminal or editor, Python, "
    "sshd-keygen-wrapper"
)
_NO_ROUTE = "No route to host"  # EHOSTUNREACH, as ssh prints it


def hint(failure: OSError | str) -> str:
    """The advice to append to a failed connection to another host; empty where this cannot be the cause.

    ``failure``: the error of the connection, or the text that ssh printed about it.
    """
    is_unreachable = _NO_ROUTE in failure if isinstance(failure, str) else failure.errno == errno.EHOSTUNREACH
    if sys.platform != "darwin" or not is_unreachable:
        return ""
    return f"; if /usr/bin/nc or ping reaches it, macOS keeps this program from the local network (errno 65): {REMEDY}"
