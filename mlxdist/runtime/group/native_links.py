"""The links of a rank, as the engine reads them."""

from collections.abc import Sequence
from typing import Any

from ..devices.links import Link
from ..native import ffi, lib

__all__ = ["native_links"]


def native_links(links: Sequence[Sequence[Link]]) -> list[Any]:
    """The engine's list of a rank's links to each rank; and the texts that it points to, which must live as long."""
    each = lib.MLXDIST_MAX_LINKS
    array = ffi.new("mlxdist_link[]", len(links) * each)
    kept = [array]
    for rank, to_rank in enumerate(links):
        for number, link in enumerate(to_rank):
            provider, device = (ffi.new("char[]", name.encode()) for name in (link.provider, link.device))
            array[rank * each + number] = {"provider": provider, "device": device, "gid_index": link.gid_index}
            kept += [provider, device]
    return kept
