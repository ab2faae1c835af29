"""What runs in the launcher, or in its agent on a host, runs here as on macOS, whose commands a test puts into PATH.

`as_on_a_mac.py launch ...` is `mlxdist launch ...`; `as_on_a_mac.py rpc-server` becomes the agent. The reaper and the
ranks are processes of their own, and of this system.
"""

import sys

from mlxdist.base import host_identity
from mlxdist.cli import main
from mlxdist.launch import agent, awake, hosts, run  # all that looks at the system while it is imported
from mlxdist.runtime import mpi_shim

__all__ = ["agent", "awake", "hosts", "run"]

if __name__ == "__main__":
    library = mpi_shim.find_library()
    mpi_shim.find_library = lambda: library  # ranks load it, and they are of this system
    sys.platform = "darwin"
    host_identity._boot_session = lambda: "since 2026"  # sysctlbyname(3)
    main()
