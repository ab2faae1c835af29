"""`make check-macos`: what stands in for Apple's linker finds what that would refuse. The files are made by hand."""

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "macos"))
import mach_o
from link import audit, main, parse
from stubs import read_stub, write_stub

# n_type of <mach-o/nlist.h>: N_EXT, with N_SECT where it is defined, and N_PEXT where only its own product sees it.
UNDEFINED, DEFINED, PRIVATE, LOCAL, DEBUG = 0x01, 0x0F, 0x1F, 0x0E, 0x24
ID_DYLIB, LOAD_DYLIB, RPATH = 0xD, 0xC, 0x8000001C
WEAK = 0x40


def make_mach_o(path: Path, *symbols: tuple, commands: tuple = ()) -> Path:
    """A file with ``symbols``, of (name, type) or (name, type, description), and ``commands``, of (number, text)."""
    loads = b""
    for number, text in commands:
        start = 12 if number == RPATH else 24
        body = text.encode() + b"\0" * (8 - len(text) % 8)
        loads += struct.pack("<III", number, start + len(body), start) + b"\0" * (start - 12) + body
    entries, names = b"", b"\0"
    for name, kind, *description in symbols:
        entries += struct.pack("<IBBHQ", len(names), kind, 0, *(description or [0]), 0)
        names += name.encode() + b"\0"
    begin = 32 + len(loads) + 24
    table = struct.pack("<6I", 0x2, 24, begin, len(symbols), begin + len(entries), len(names))
    header = struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 1, len(commands) + 1, len(loads) + 24, 0, 0)
    path.write_bytes(header + loads + table + entries + names)
    return path


@pytest.fixture
def sdk(tmp_path):
    write_stub(tmp_path / "sdk/usr/lib/libSystem.tbd", "/usr/lib/libSystem.B.dylib", ["_malloc"])
    write_stub(tmp_path / "sdk/usr/lib/libc++.tbd", "/usr/lib/libc++.1.dylib", ["__ZdlPvm"])
    frameworks = tmp_path / "sdk/System/Library/Frameworks"
    write_stub(frameworks / "Metal.framework/Metal.tbd", "/System/Library/Frameworks/Metal", [])
    return tmp_path / "sdk"


def errors(sdk, tmp_path, *options, compiler="c++", needs=(), makes=()):
    """What is wrong with a bundle of one object file that needs ``needs`` and has ``makes``."""
    symbols = [(name, UNDEFINED) for name in needs] + [(name, DEFINED) for name in makes]
    source = make_mach_o(tmp_path / "a.o", *symbols)
    command = ["clang", compiler, "-target", "aarch64-macos", "-O3", "-bundle", "-o", "_bridge.so", str(source)]
    return audit(parse([*command, *map(str, options)]), sdk)[0]


def test_symbols_of_an_object_file(tmp_path):
    symbols = [("_a", DEFINED), ("_b", PRIVATE), ("_c", UNDEFINED), ("_d", UNDEFINED, WEAK)]
    found = mach_o.read(make_mach_o(tmp_path / "a.o", *symbols, ("_e", LOCAL), ("_f", DEBUG)))
    assert found.defined == {"_a", "_b"} and found.exported == {"_a"} and found.undefined == {"_c": None, "_d": None}


def test_libraries_and_paths_of_a_library(tmp_path):
    commands = (ID_DYLIB, "@rpath/liba.dylib"), (LOAD_DYLIB, "/usr/lib/libb.dylib"), (RPATH, "@loader_path")
    found = mach_o.read(make_mach_o(tmp_path / "liba.dylib", ("_malloc", UNDEFINED, 1 << 8), commands=commands))
    assert found.install_name == "@rpath/liba.dylib" and found.dylibs == ["/usr/lib/libb.dylib"]
    assert found.undefined == {"_malloc": "/usr/lib/libb.dylib"} and found.rpaths == ["@loader_path"]


def test_members_of_an_archive(tmp_path):
    members = b"!<arch>\n"
    for name, symbol in (b"#1/8", "_first"), (b"b.o/", "_second"):
        body = make_mach_o(tmp_path / "member", (symbol, DEFINED)).read_bytes()
        body = (b"a.o\0\0\0\0\0" if name == b"#1/8" else b"") + body
        members += name.ljust(48) + str(len(body)).encode().ljust(10) + b"`\n" + body + b"\n" * (len(body) % 2)
    (tmp_path / "a.a").write_bytes(members)
    assert [member.defined for member in mach_o.read_archive(tmp_path / "a.a")] == [{"_first"}, {"_second"}]


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + bytes(60)])
def test_a_file_that_is_not_for_macos(tmp_path, content):
    (tmp_path / "a.o").write_bytes(content)
    with pytest.raises(mach_o.NotMachO, match=r"a\.o is no object file"):
        mach_o.read(tmp_path / "a.o")


def test_a_stub_for_arm64_only(tmp_path):
    write_stub(tmp_path / "a.tbd", "/usr/lib/a.dylib", {"_b", "$x"})
    assert read_stub(tmp_path / "a.tbd") == ("/usr/lib/a.dylib", {"_b", "$x"})
    intel = "  - targets: [ x86_64-macos ]\n    symbols: [ _intel ]\n"
    intel += "  - targets: [ arm64e-macos ]\n    symbols: [ _e ]\n"
    (tmp_path / "a.tbd").write_text((tmp_path / "a.tbd").read_text().replace("...\n", intel))
    assert read_stub(tmp_path / "a.tbd")[1] == {"_b", "$x", "_e"}


def test_a_product_that_is_whole(sdk, tmp_path):
    needs = ["_malloc", "__ZdlPvm", "_PyList_New", "_own", "___dso_handle"]
    options = "-Wl,-U,_PyList_New", "-framework", "Metal"
    assert errors(sdk, tmp_path, *options, needs=needs, makes=["_own"]) == []


def test_a_function_of_python_that_the_list_lacks(sdk, tmp_path):
    """What no Mac could link: nanobind's list lets the linker leave some functions of Python undefined, not all."""
    listed = tmp_path / "python.sym"
    listed.write_text("-U _PyList_New\n")
    options = f"-Wl,@{listed}", "-Wl,-rpath,@loader_path"
    (error,) = errors(sdk, tmp_path, *options, needs=["_PyList_New", "_PyFrame_GetLasti"])
    assert error.startswith("_bridge.so: _PyFrame_GetLasti is undefined (needed by a.o): Python has it")
    assert f"not in {listed}. " in error and "LINKER:-U,_PyFrame_GetLasti" in error
    assert errors(sdk, tmp_path, "-Wl,-U,_PyFrame_GetLasti", needs=["_PyFrame_GetLasti"]) == []


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("_memfd_create", [], "none of the libraries on the command line has it"),
        ("__ZNSt3__15otherEv", [], "scripts/macos/libcxx.txt"),
        ("_PyNever_Was", ["-Wl,-U,_PyNever_Was"], "dyld would not find it"),
        ("_mlxdist_typo", ["-Xlinker", "-undefined", "-Xlinker", "dynamic_lookup"], "dyld would not find it"),
    ],
)
def test_a_symbol_that_is_nowhere(sdk, tmp_path, name, options, why):
    (error,) = errors(sdk, tmp_path, *options, needs=[name])
    assert f"{name} is undefined (needed by a.o)" in error and why in error


def test_a_program_in_c_gets_no_libcxx(sdk, tmp_path):
    assert errors(sdk, tmp_path, needs=["__ZdlPvm"]) == []
    assert len(errors(sdk, tmp_path, compiler="cc", needs=["__ZdlPvm"])) == 1


def test_a_library_that_dyld_would_not_find(sdk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_mach_o(tmp_path / "libown.dylib", ("_own", DEFINED), commands=((ID_DYLIB, "@rpath/libown.dylib"),))
    mlx = make_mach_o(tmp_path / "libmlx.dylib", commands=((ID_DYLIB, "@rpath/libmlx.dylib"),))
    both = "libown.dylib", mlx, "-Wl,-rpath,@loader_path"
    (error,) = errors(sdk, tmp_path, *both, needs=["_own"])
    assert "dyld finds @rpath/libmlx.dylib in none of the rpaths @loader_path" in error
    assert errors(sdk, tmp_path, *both, "-Wl,-rpath,@loader_path/../mlx/lib", needs=["_own"]) == []


def test_an_option_that_is_not_known(sdk, tmp_path):
    with pytest.raises(SystemExit, match="does not know -all_load"):
        errors(sdk, tmp_path, "-Wl,-all_load")


def test_without_a_linker_the_product_is_a_stub(sdk, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    source, output = make_mach_o(tmp_path / "a.o", ("_a", DEFINED), ("_b", PRIVATE)), tmp_path / "liba.dylib"
    command = ["c++", "-dynamiclib", "-install_name", "@rpath/liba.dylib", "-o", str(output), str(source)]
    assert main([str(sdk), "14.0", *command]) == 0 and read_stub(output) == ("@rpath/liba.dylib", {"_a"})
    output.unlink()
    make_mach_o(source, ("_missing", UNDEFINED))
    assert main([str(sdk), "14.0", *command]) == 1 and not output.exists()
    assert "liba.dylib: _missing is undefined" in capsys.readouterr().out


@pytest.mark.long  # when ziglang is there
@pytest.mark.parametrize(("statuses", "result"), [((0, 0), 0), ((-9, 0), 1), ((0, 1), 1)])
def test_a_check_that_is_killed_has_failed(monkeypatch, statuses, result):
    pytest.importorskip("ziglang", reason="`make check-macos` installs it")
    import check

    given = dict(zip(("14.0", "26.0"), statuses, strict=True))
    monkeypatch.setattr(check, "check", given.pop)
    assert check.main() == result and not given, "all are checked"
