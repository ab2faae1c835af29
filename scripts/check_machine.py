"""What `make setup` needs of a machine, checked before it starts: run with the Python that is to be used.

Written so that a Python that is too old can still read it.
"""

import os
import shutil
import sys
import sysconfig


def missing():
    """What is missing, and how to get it; None if all is there."""
    this = "%s (Python %d.%d.%d)" % ((sys.executable,) + tuple(sys.version_info[:3]))
    if sys.version_info < (3, 11):
        return "mlxdist needs Python 3.11 or newer, not %s; name another: make PYTHON=/path/to/python3.12 setup" % this
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return "%s cannot make virtual environments; install that (Debian, Ubuntu: apt install python3-venv)" % this
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return (
            "%s has no C headers; install them (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install "
            "python3-devel)" % this
        )
    for variable, default in (("CC", "cc"), ("CXX", "c++")):
        compiler = os.environ.get(variable, default)
        if not shutil.which(compiler.split()[0]):
            return (
                "the compiler %s was not found; install it (Debian, Ubuntu: apt install g++; Fedora: dnf install "
                "gcc-c++; macOS: xcode-select --install), or name another in %s" % (compiler, variable)
            )
    return None


if __name__ == "__main__":
    sys.exit(missing())
