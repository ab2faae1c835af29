"""Our declarations of the verbs interface (native/verbs/verbs_abi.h) against the system's <infiniband/verbs.h>.

One generated program, compiled with either header, prints all that a library and its caller must agree on: sizes and
alignments of structs, offsets and sizes of fields, values of enums and macros. Both must print the same.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_build import NATIVE, build_program, c_compiler, compile_source, run_program

HEADER = NATIVE / "verbs" / "verbs_abi.h"
SYSTEM = "<infiniband/verbs.h>"

# Structs that have grown and may grow on. The library gets the length of ours (ibv_port_attr, ibv_gid_entry), or finds
# its context by the end (verbs_context): offsets count from there.
GROWS_AT_END = {"struct ibv_port_attr", "struct ibv_gid_entry"}
GROWS_AT_FRONT = {"struct verbs_context"}
APPLE_ONLY = {"IBV_TRANSPORT_THUNDERBOLT", "IBV_LINK_LAYER_THUNDERBOLT"}  # no other system's header has them

_DECLARATION = re.compile(r"^(struct|union|enum)( \w+)? (\{[^\n]*\}|\{.*?^\});", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.long


# --- What a header declares


def declared(text: str) -> tuple[dict[str, list[str]], list[str]]:
    """Fields by struct or union ("wr.rdma.rkey" for one of a struct inside), and the names that have values."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    values = re.findall(r"^#define (\w+) +\S", text, re.MULTILINE)
    values = [name for name in values if not re.search(rf"^#undef {name}\b", text, re.MULTILINE)]
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    fields = {}
    for kind, name, body in _DECLARATION.findall(text):
        if kind == "enum":
            values += [value.split("=")[0].strip() for value in body.strip("{} \n,").split(",")]
        else:
            fields[kind + name] = list(_fields(body[1:-1]))
    return fields, values


def _fields(body: str) -> Iterator[str]:
    for declaration in _declarations(body):
        if inside := re.fullmatch(r"(?:struct|union) \{(.*)\} *(\w*)", declaration, re.DOTALL):
            yield from (f"{inside[2]}.{name}".lstrip(".") for name in _fields(inside[1]))
            continue
        name = re.search(r"\(\*(\w+)", declaration) or re.search(r"(\w+)(?:\[\w+\])?$", declaration)
        if not name[1].startswith("unused_"):  # what only libraries and their providers know
            yield name[1]


def _declarations(body: str) -> Iterator[str]:
    depth, begin = 0, 0
    for place, letter in enumerate(body):
        depth += (letter == "{") - (letter == "}")
        if letter == ";" and depth == 0:
            yield body[begin:place].strip()
            begin = place + 1


# --- What it says of them


def program(header: Path, without: set[str]) -> str:
    """The source of a program that prints what there is to compare, but nothing of the names in ``without``."""
    fields, values = declared(header.read_text())
    lines = ["#include HEADER", "#include <stdio.h>", "#define SAY(name, value) \\"]
    lines += ['  printf("%s = %lld\\n", name, (long long)(value))', "int main(void) {"]

    def say(name: str, value: str) -> None:
        lines.append(f'  SAY("{name}", {value});')

    for struct, names in fields.items():
        if struct.split()[1] in without:
            continue
        say(f"alignment of {struct}", f"_Alignof({struct})")
        if struct not in GROWS_AT_END | GROWS_AT_FRONT:
            say(f"size of {struct}", f"sizeof({struct})")
        for field in names:
            offset = f"offsetof({struct}, {field})"
            if struct in GROWS_AT_FRONT:
                offset = f"sizeof({struct}) - {offset}"
            say(f"offset of {struct}.{field}", offset)
            say(f"size of {struct}.{field}", f"sizeof((({struct} *)0)->{field})")
    for name in values:
        if name not in without and not name.startswith("MLXDIST_"):
            say(name, name)
    return "\n".join([*lines, "  return 0;", "}", ""])


def said(directory: Path, header: Path, by: str, without: set[str] = frozenset()) -> dict[str, str]:
    """What the program for ``header`` prints when it is compiled with the header ``by``."""
    directory.mkdir()
    (directory / "abi.c").write_text(program(header, without))
    output = run_program(build_program(directory / "abi", [directory / "abi.c"], [f"-DHEADER={by}"]))
    return dict(line.split(" = ") for line in output.splitlines())


def differences(directory: Path, header: Path) -> list[str]:
    """What is not as in the system's header: one sentence each."""
    system = system_header(directory)
    fields, values = declared(header.read_text())
    names = {struct.split()[1] for struct in fields} | set(values)
    absent = {name for name in names if not re.search(rf"\b{name}\b", system)}
    ours = said(directory / "ours", header, f'"{header}"', absent)
    theirs = said(directory / "theirs", header, SYSTEM, absent)
    assert ours.keys() == theirs.keys()
    wrong = [f"{name}: {ours[name]}, the system's is {theirs[name]}" for name in ours if ours[name] != theirs[name]]
    return wrong + [f"{name}: the system's header has no such name" for name in sorted(absent - APPLE_ONLY)]


def system_header(directory: Path) -> str:
    """The text of the system's header, after the preprocessor, and its macros."""
    (directory / "include.c").write_text(f"#include {SYSTEM}\n")
    command = [*c_compiler(), "-E", "-dD", str(directory / "include.c")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if result.returncode:
        hint = "apt-get install libibverbs-dev" if sys.platform == "linux" else "it is in the SDK of macOS 26.2"
        pytest.skip(f"there is no {SYSTEM} ({hint}): {result.stderr.splitlines()[0]}")
    return result.stdout


# --- The tests


def test_declarations_are_the_system_s(tmp_path):
    wrong = differences(tmp_path, HEADER)
    if sys.platform == "darwin":  # Apple's header may leave out what its library does not have, and nothing else
        print(*(line for line in wrong if line.endswith("no such name")), sep="\n")
        wrong = [line for line in wrong if not line.endswith("no such name")]
    assert not wrong, "\n".join(wrong)


# What is written in our header, what a copy has instead, and how the difference must be reported.
WRONG = {
    "enum value": ("IBV_WR_SEND,\n", "IBV_WR_SEND = 7,\n", "IBV_WR_SEND: 7, the system's is 2"),
    "flag": ("IBV_SEND_SIGNALED = 1 << 1", "IBV_SEND_SIGNALED = 1", "IBV_SEND_SIGNALED: 1, the system's is 2"),
    "lost enum value": ("IBV_QPT_RC = 2, ", "", "IBV_QPT_UC: 0, the system's is 3"),
    "macro": ("UINTPTR_MAX", "1", "__VERBS_ABI_IS_EXTENDED: 1, the system's is -1"),
    "name": ("IBV_GID_TYPE_IB,", "IBV_GID_TYPE_X,", "IBV_GID_TYPE_X: the system's header has no such name"),
    "order": ("max_cq;\n  int max_cqe;", "max_cqe;\n  int max_cq;", "offset of struct ibv_device_attr.max_cq:"),
    "lost field": ("uint32_t max_inline_data;", "", "size of struct ibv_qp_cap: 16, the system's is 20"),
    "type": ("uint16_t port_cap_flags2;", "uint32_t port_cap_flags2;", "size of struct ibv_port_attr.port_cap_"),
    "struct inside": ("uint32_t remote_qpn;", "uint64_t remote_qpn;", "offset of struct ibv_send_wr.wr.ud."),
    "front": ("void* unused_1[37];", "void* unused_1[36];", "offset of struct verbs_context.query_port: 640,"),
    "nothing that counts": ("(*unused_13[12])(void);", "(*unused_13[1][12])(int);", None),
}


@pytest.mark.parametrize("declaration", WRONG)
def test_wrong_declarations_are_found(tmp_path, declaration):
    ours, wrong, found = WRONG[declaration]
    text = HEADER.read_text()
    assert text.count(ours) == 1, ours
    header = tmp_path / "verbs_abi.h"
    header.write_text(text.replace(ours, wrong))
    lines = differences(tmp_path, header)
    assert any(line.startswith(found) for line in lines) if found else not lines, "\n".join(lines)


def test_nothing_is_overlooked():
    """All that has a name and a body is compared: counted in another way."""
    text = HEADER.read_text()
    fields, values = declared(text)
    assert len(fields) == len(re.findall(r"^(?:struct|union) \w+ \{", text, re.MULTILINE))
    assert set(re.findall(r"\bIBV_\w+", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))) <= set(values)
    inside = {"invalidate_rkey", "wr.ud.remote_qkey", "qp_type.xrc.remote_srqn", "bind_mw.bind_info.mr", "tso.mss"}
    assert inside | {"wr_id", "send_flags"} <= set(fields["struct ibv_send_wr"])
    assert fields["struct ibv_context_ops"] == ["poll_cq", "req_notify_cq", "post_send", "post_recv"]
    assert fields["union ibv_gid"] == ["raw", "global.subnet_prefix", "global.interface_id"]


def test_functions_have_the_system_s_types(tmp_path):
    """The verbs table filled with the system's functions: others do not compile. ibv_query_port is a macro there."""
    system_header(tmp_path)
    names = re.findall(r"\bSYMBOL\((\w+)\)[,}]", (NATIVE / "verbs" / "library.c").read_text())
    assert len(names) == 18
    members = "\n".join(f"    .{name} = ibv_{name}," for name in names if name != "query_port")
    source = tmp_path / "functions.c"
    source.write_text(
        f'#include {SYSTEM}\n#define MLXDIST_VERBS_VERBS_ABI_H\n#include "{NATIVE}/verbs/verbs.h"\n'
        f"const struct verbs functions = {{\n{members}\n}};\n"
    )
    compile_source(source, c_compiler(), ())
