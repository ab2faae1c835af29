"""The limit of open descriptors of this process, and of those that it starts."""

import resource

__all__ = ["MAX_DESCRIPTORS", "raise_limit"]

MAX_DESCRIPTORS = 10240  # OPEN_MAX: macOS rejects more, also where it reports no limit


def raise_limit(wanted: int) -> int:
    """Raises the limit of open descriptors, if it is lower, and returns it. Some systems begin with 256 (macOS)."""
    wanted = min(wanted, MAX_DESCRIPTORS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_DESCRIPTORS
    if soft < wanted:
        soft = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
