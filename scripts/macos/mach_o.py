"""The symbols of object files, libraries and archives of macOS on arm64 (<mach-o/loader.h>, <mach-o/nlist.h>)."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["MachO", "NotMachO", "read", "read_archive"]

_MAGIC, _ARM64 = 0xFEEDFACF, 0x0100000C
_SYMTAB, _RPATH, _ID_DYLIB = 0x2, 0x8000001C, 0xD
_LOAD_DYLIBS = {0xC, 0x80000018, 0x8000001F}  # plain, weak, re-exported
_STAB, _PRIVATE_EXTERN, _TYPE, _EXTERN = 0xE0, 0x10, 0x0E, 0x01


class NotMachO(ValueError):
    """Neither an object file nor a library of macOS on arm64."""


@dataclass
class MachO:
    """What a linker wants to know of a file. Names have the underscore in front that macOS gives them.

    Attributes:
        defined: names that other files of the same product may use.
        exported: those of them that other products may use.
        undefined: what it needs, and the library that this was linked to; none in an object file.
        install_name: under which others look for the library; empty for bundles and object files.
        dylibs: install names of the libraries that it was linked to.
        rpaths: where `@rpath` leads.
    """

    defined: set[str] = field(default_factory=set)
    exported: set[str] = field(default_factory=set)
    undefined: dict[str, str | None] = field(default_factory=dict)
    install_name: str = ""
    dylibs: list[str] = field(default_factory=list)
    rpaths: list[str] = field(default_factory=list)


def read(path: Path) -> MachO:
    """Reads an object file, a dynamic library or a bundle."""
    return _parse(path.read_bytes(), str(path))


def read_archive(path: Path) -> list[MachO]:
    """Reads the object files of a static library."""
    return [_parse(data, f"{path}({name})") for name, data in _members(path)]


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    data = path.read_bytes()
    if not data.startswith(b"!<arch>\n"):
        raise NotMachO(f"{path} is no static library")
    position = 8
    while position + 60 <= len(data):
        name, size = data[position : position + 16].decode().strip(), int(data[position + 48 : position + 58])
        body = data[position + 60 : position + 60 + size]
        if name.startswith("#1/"):  # BSD: the name comes before the file
            length = int(name[3:])
            name, body = body[:length].rstrip(b"\0").decode(), body[length:]
        if not name.startswith("__.SYMDEF"):
            yield name, body
        position += 60 + size + size % 2


def _parse(data: bytes, name: str) -> MachO:
    if len(data) < 32 or struct.unpack_from("<II", data) != (_MAGIC, _ARM64):
        raise NotMachO(f"{name} is no object file or library of macOS on arm64")
    found, table, position = MachO(), None, 32
    for _ in range(struct.unpack_from("<I", data, 16)[0]):
        command, size = struct.unpack_from("<II", data, position)
        text = data[position + struct.unpack_from("<I", data, position + 8)[0] : position + size].split(b"\0")[0]
        if command == _SYMTAB:
            table = struct.unpack_from("<IIII", data, position + 8)
        elif command == _ID_DYLIB:
            found.install_name = text.decode()
        elif command in _LOAD_DYLIBS:
            found.dylibs.append(text.decode())
        elif command == _RPATH:
            found.rpaths.append(text.decode())
        position += size
    if table:
        _read_symbols(data, table, found)
    return found


def _read_symbols(data: bytes, table: tuple[int, int, int, int], found: MachO) -> None:
    symbols, count, strings, strings_size = table
    names = data[strings : strings + strings_size]
    for index in range(count):
        at, kind, _, description, value = struct.unpack_from("<IBBHQ", data, symbols + 16 * index)
        if kind & _STAB or not kind & _EXTERN:
            continue
        name = names[at : names.index(b"\0", at)].decode()
        if kind & _TYPE or value:  # a value without a section is the size of a common symbol
            found.defined.add(name)
            if not kind & _PRIVATE_EXTERN:
                found.exported.add(name)
        else:  # a weak reference too: dyld may leave it empty, but the linker wants to know whose it is
            library = description >> 8  # from 1; 0, 254 and 255 are none, any and the program
            found.undefined[name] = found.dylibs[library - 1] if 0 < library <= len(found.dylibs) else None
