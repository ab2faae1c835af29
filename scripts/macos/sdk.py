"""A directory of stubs in place of Apple's SDK: which names the system's libraries export.

libSystem: the stub that ziglang has of Apple's (lib/libc/darwin/libSystem.tbd; of a newer SDK, so that the headers'
availability, which the compiler checks, says what an older macOS lacks). libc++ and the frameworks: what MLX's own
libraries for that macOS import of them, so what it has, and for libc++ the names in libcxx.txt.
"""

from pathlib import Path

import mach_o
import ziglang
from stubs import read_stub, write_stub

__all__ = ["make_sdk"]

_LIBCXX = Path(__file__).with_name("libcxx.txt")
_LIBSYSTEM = Path(ziglang.__file__).parent / "lib/libc/darwin/libSystem.tbd"


def make_sdk(directory: Path, libraries: list[Path]) -> None:
    """Writes stubs of ``libraries`` and of the system's libraries that they import from."""
    exports: dict[str, set[str]] = {}
    for library in libraries:
        found = mach_o.read(library)
        write_stub(directory / f"{library.stem}.tbd", found.install_name, found.exported)
        for source in found.dylibs:
            if source.startswith("/"):
                exports.setdefault(source, set()).update(n for n, origin in found.undefined.items() if origin == source)
    lines = _LIBCXX.read_text().splitlines()
    exports["/usr/lib/libc++.1.dylib"] |= {line.split()[0] for line in lines if line and not line.startswith("#")}
    exports["/usr/lib/libSystem.B.dylib"] = read_stub(_LIBSYSTEM)[1]
    for install_name, names in exports.items():
        write_stub(directory / _stub_path(install_name), install_name, names)


def _stub_path(install_name: str) -> Path:
    """Where a linker looks: usr/lib/libc++.tbd; System/Library/Frameworks/Metal.framework/Metal.tbd."""
    path = Path(install_name.lstrip("/"))
    if path.parts[0] == "usr":
        return path.with_name(path.name.split(".")[0] + ".tbd")
    return path.parents[2] / f"{path.name}.tbd"
