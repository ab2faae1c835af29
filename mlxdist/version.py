"""The version, apart from the package's other modules so that the launcher can read it without importing MLX."""

__all__ = ["HOW_TO_BUILD", "__version__"]

__version__ = "0.1.0"

# For messages about a compiled half that is missing or another version's.
HOW_TO_BUILD = (
    "in mlxdist's source folder, `make setup`, or `pip install --no-build-isolation --no-deps --force-reinstall .`"
)
