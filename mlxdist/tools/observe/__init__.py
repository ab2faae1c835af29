"""What the flight recorders of all ranks say together: `mlxdist dump`.

Reads files only, which may come from anywhere, and needs neither MLX nor the compiled half.
"""

__all__: list[str] = []
