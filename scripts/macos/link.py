"""Stands in for Apple's linker: `link.py SDK COMMAND...`, where COMMAND is clang's, as CMake writes it for a Mac.

Every name that the product leaves undefined must be one that a library on the command line exports, or one of Python's
that the command lets it leave undefined; and dyld must find the libraries. Then ld64.lld links, where there is one.
SDK is a directory of stubs; see sdk.py.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import mach_o
from stubs import is_stub, read_stub, write_stub

__all__ = ["Link", "audit", "main", "parse"]

# Where each product lies in site-packages; see native/CMakeLists.txt.
_INSTALLED = "mlxdist"
_WITH_VALUE = ("-o", "-install_name", "-rpath", "-framework", "-U", "-undefined", "-force_load")
_NO_EFFECT = ("-bundle", "-dylib", "-dead_strip", "-x", "-S", "-headerpad_max_install_names")  # on what is undefined
# The linker itself makes these.
_LINKER_MAKES = {"___dso_handle", "__mh_dylib_header", "__mh_bundle_header"}


@dataclass
class Link:
    """A command that links a product. ``arguments`` are the linker's, ``lists`` its files of names it may not find."""

    output: Path = Path()
    install_name: str = ""
    inputs: list[Path] = field(default_factory=list)
    frameworks: list[str] = field(default_factory=list)
    rpaths: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    may_be_undefined: set[str] = field(default_factory=set)
    dynamic_lookup: bool = False
    libraries: list[str] = field(default_factory=lambda: ["System"])
    arguments: list[str] = field(default_factory=list)


def parse(command: list[str]) -> Link:
    """Reads clang's command line. What it does not know is an error: an option could change what is undefined."""
    link, words = Link(), iter(_linker_words(command))
    if "c++" in command:
        link.libraries.append("c++")
    for word in words:
        value = next(words) if word in _WITH_VALUE else None
        if word.startswith("@"):
            link.lists.append(word[1:])
            lines = Path(word[1:]).read_text().splitlines()
            link.may_be_undefined |= {line.split()[1] for line in lines if line.startswith("-U ")}
        elif value is not None:
            _set(link, word, value)
        elif word.startswith("-l"):
            link.libraries.append(word[2:])
        elif word.endswith((".o", ".a", ".dylib")) and not word.startswith("-"):
            link.inputs.append(Path(word))
        elif word not in _NO_EFFECT:
            raise SystemExit(f"scripts/macos/link.py does not know {word}: teach it what Apple's linker does with it")
        link.arguments += [word] if value is None else [word, value]
    return link


def _linker_words(command: list[str]) -> list[str]:
    """What clang hands to the linker."""
    start = next(i for i, word in enumerate(command) if word in ("cc", "c++")) + 1
    words = []
    rest = iter(command[start:])
    for word in rest:
        if word == "-target":
            next(rest)
        elif word == "-Xlinker":
            words.append(next(rest))
        elif word.startswith("-Wl,"):
            words += word[4:].split(",")
        elif word == "-dynamiclib":
            words.append("-dylib")
        elif not word.startswith(("-D", "-F", "-O", "-U")):
            words.append(word)
    return words


def _set(link: Link, option: str, value: str) -> None:
    if option == "-o":
        link.output = Path(value)
    elif option == "-install_name":
        link.install_name = value
    elif option == "-rpath":
        link.rpaths.append(value)
    elif option == "-framework":
        link.frameworks.append(value)
    elif option == "-force_load":  # all of an archive; audit() reads all of each one anyway
        link.inputs.append(Path(value))
    elif option == "-U":
        link.may_be_undefined.add(value)
    elif option == "-undefined":
        link.dynamic_lookup = value == "dynamic_lookup"


def audit(link: Link, sdk: Path) -> tuple[list[str], set[str]]:
    """What is wrong with a product, and what it exports. Says how many names it has looked up."""
    own = [one for path in link.inputs for one in _objects(path)]
    defined = set().union(*(one.defined for one in own))
    exported = set().union(*(one.exported for one in own))
    provided, errors = set(_LINKER_MAKES), []
    for path in [*(path for path in link.inputs if path.suffix == ".dylib"), *_system_stubs(link, sdk)]:
        install_name, names = _library(path)
        provided |= names
        if install_name.startswith("@rpath/") and not _is_found(link, path, install_name):
            errors.append(f"dyld finds {install_name} in none of the rpaths {', '.join(link.rpaths) or '(none)'}")
    users = {}
    for path in link.inputs:
        for one in _objects(path):
            for name in one.undefined.keys() - defined:
                users.setdefault(name, path.name)
    missing = [name for name in sorted(users.keys() - provided) if not _is_pythons(link, name)]
    errors += [_why(link, name, users[name]) for name in missing]
    print(f"{link.output.name} needs {len(users)} names from outside, {len(missing)} of them are nowhere")
    return [f"{link.output.name}: {error}" for error in errors], exported


def _objects(path: Path) -> list[mach_o.MachO]:
    if path.suffix == ".dylib":
        return []
    return mach_o.read_archive(path) if path.suffix == ".a" else [mach_o.read(path)]


def _library(path: Path) -> tuple[str, set[str]]:
    if is_stub(path):
        return read_stub(path)
    found = mach_o.read(path)
    return found.install_name, found.exported


def _system_stubs(link: Link, sdk: Path) -> list[Path]:
    frameworks = [sdk / "System/Library/Frameworks" / f"{name}.framework" / f"{name}.tbd" for name in link.frameworks]
    return frameworks + [sdk / "usr/lib" / f"lib{name}.tbd" for name in link.libraries]


def _is_found(link: Link, library: Path, install_name: str) -> bool:
    """Whether an rpath leads from the installed product to the installed library: MLX's, or another product."""
    place = Path("mlx", "lib") if library.is_absolute() else Path(_INSTALLED)
    directories = [os.path.normpath(rpath.replace("@loader_path", _INSTALLED)) for rpath in link.rpaths]
    return str(place) in directories and library.name == install_name.removeprefix("@rpath/")


def _is_pythons(link: Link, name: str) -> bool:
    return (link.dynamic_lookup or name in link.may_be_undefined) and _python_has(name)


def _python_has(name: str) -> bool:
    """By the Python that runs here: what else is in its process, the C library above all, macOS may lack."""
    return name.startswith(("_Py", "__Py")) and hasattr(ctypes.pythonapi, name[1:])


def _why(link: Link, name: str, user: str) -> str:
    if link.dynamic_lookup or name in link.may_be_undefined:
        why = "the linker lets it be, but no library and no Python that is known here has it: dyld would not find it"
    elif _python_has(name):
        why = (
            f"Python has it, but the linker must not leave it undefined: it is not in "
            f"{', '.join(link.lists) or 'any list'}. "
            f"Use a function that is, or link with LINKER:-U,{name}"
        )
    elif name.startswith("__Z"):
        why = (
            "neither MLX's libraries nor scripts/macos/libcxx.txt use it of libc++. Is it in macOS's libc++ (LLVM's "
            "libcxx/lib/abi/arm64-apple-darwin*.abilist)? Then add it there"
        )
    else:
        why = "none of the libraries on the command line has it"
    return f"{name} is undefined (needed by {user}): {why}"


def find_lld() -> list[str]:
    """The command that links as Apple's linker does, or none."""
    if path := shutil.which("ld64.lld"):
        return [path]
    path = shutil.which("lld")  # Debian's, which gives the linker for macOS no name of its own
    return [path, "-flavor", "darwin"] if path else []


def _readable(word: str, sdk: Path) -> str:
    """lld 14 cannot read what Apple's linker of today writes: a stub in place of a library of MLX's wheel."""
    is_mlx = word.startswith("/") and word.endswith(".dylib")
    return str(sdk / Path(word).with_suffix(".tbd").name) if is_mlx else word


def main(arguments: list[str]) -> int:
    sdk, version, command = Path(arguments[0]), arguments[1], arguments[2:]
    link = parse(command)
    errors, exported = audit(link, sdk)
    print(*errors, sep="\n", end="\n" if errors else "")
    lld = find_lld()
    if lld and not errors:
        words = [_readable(word, sdk) for word in link.arguments if word != "-x"]  # which lld 14 does not know
        system = ["-arch", "arm64", "-platform_version", "macos", version, version, "-syslibroot", sdk, "-L/usr/lib"]
        libraries = [f"-l{name}" for name in link.libraries]
        return subprocess.run([*lld, *system, *words, *libraries], check=False).returncode
    if not errors:
        write_stub(link.output, link.install_name, exported)
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
