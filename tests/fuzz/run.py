"""Runs one of the fuzz targets in Python under atheris: run.py TARGET [what libFuzzer takes]."""

import gc
import sys
import types

import atheris
import of_models
import of_rendezvous
import of_settings


def instrument() -> None:
    """Not with atheris' import hook: it does not see what an editable installation imports."""
    for found in gc.get_objects():
        if isinstance(found, types.FunctionType) and (found.__module__ or "").startswith("mlxdist."):
            atheris.instrument_func(found)


def main() -> None:
    target = (of_models.TARGETS | of_rendezvous.TARGETS | of_settings.TARGETS)[sys.argv[1]]
    instrument()
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
    atheris.Fuzz()


main()
