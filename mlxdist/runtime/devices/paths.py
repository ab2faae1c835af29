"""How good the path between two ranks is."""

from enum import IntEnum

__all__ = ["Path"]


class Path(IntEnum):
    """The larger, the better."""

    NONE = 0  # only messages by way of other ranks: see MLXDIST_TOPOLOGY and device maps
    TCP = 1
    RDMA = 2
    SHARED_MEMORY = 3

    @property
    def label(self) -> str:
        return ("no link", "TCP", "RDMA", "shared memory")[self]
