"""What a job does, while it does it: `mlxdist top`."""

__all__: list[str] = []
