"""`python -m mlxdist` is `mlxdist`."""

from .cli import main

main()
