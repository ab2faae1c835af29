"""The version, apart from the package's other modules so that the launcher can read it without importing MLX."""

__all__ = ["__version__"]

__version__ = "0.1.0"
