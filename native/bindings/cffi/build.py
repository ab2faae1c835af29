"""Writes the C source of the extension module mlxdist._native: `python build.py _native.c`.

cffi is given the part of mlxdist.h between its two marks, so every function and struct is declared once. In API mode
the compiler checks those declarations against the header, and each call releases the GIL.
"""

import sys
from pathlib import Path

import cffi

HEADER = Path(__file__).resolve().parents[2] / "include" / "mlxdist.h"
# Functions of Python that the engine calls; mlxdist/runtime/group/world.py defines them.
CALLBACKS = 'extern "Python" void send_through_side_channel(void *, int32_t, const void *, uint64_t);'
BEGIN, END = "/* cffi begins */", "/* cffi ends */"


def declarations(header: str) -> str:
    """The part of the header that cffi can parse."""
    if header.count(BEGIN) != 1 or header.count(END) != 1:
        raise SystemExit(f"{HEADER}: needs exactly one line {BEGIN} and one line {END}")
    return header.split(BEGIN)[1].split(END)[0]


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python build.py OUTPUT.c")
    ffi = cffi.FFI()
    ffi.cdef(declarations(HEADER.read_text(encoding="utf-8")))
    ffi.cdef(CALLBACKS)
    ffi.set_source("mlxdist._native", '#include "mlxdist.h"')
    ffi.emit_c_code(sys.argv[1])


if __name__ == "__main__":
    main()
