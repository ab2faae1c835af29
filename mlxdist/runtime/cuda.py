"""NVIDIA's GPUs, on which some of MLX's kernels and submissions differ: docs/gpu.md."""

import mlx.core as mx

__all__ = ["computes_on_cuda"]


def computes_on_cuda() -> bool:
    """Whether MLX computes on an NVIDIA GPU unless it is given another device."""
    return mx.cuda.is_available() and mx.default_device() != mx.cpu
