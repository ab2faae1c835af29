"""How much memory MLX may use."""

import mlx.core as mx

__all__ = ["device_limit"]


def device_limit() -> int:
    """Bytes of MLX's device that its arrays may take in this process."""
    limit = mx.get_memory_limit()
    recommended = mx.device_info().get("max_recommended_working_set_size")  # of a Mac's GPU; MLX's limit is above it
    return min(limit, recommended) if isinstance(recommended, int) else limit
