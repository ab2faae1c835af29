"""What one all_reduce costs on two ranks, counted by callgrind: the functions that it passes, and the instructions of
header and acknowledgement work.

Instructions are attributed by source line, so what the compiler has inlined counts where it was written. `WORK` is
everything that is done because a connection loses messages and the peer has finite room: headers written and
checked, sequence numbers, credits, acknowledgements, their timers, and what looks whether any of this is due. It is not
what every transport does: posting and polling work requests, copying and reducing payload, finding the operation that
a message belongs to, starting and ending operations. Copies are counted with vector instructions: valgrind would count
every byte of `rep movsb`, and so make the share of all else smaller than it is.
"""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from native_build import NATIVE, build_program, layer_includes, layer_sources, with_simulated_clock

# File: its functions; None for all.
WORK = {
    "transport/wire.h": None,
    "transport/checksum.c": None,
    "transport/acknowledgement.h": None,
    "transport/acknowledgement.c": None,
    "transport/retransmission.c": None,
    "transport/failover.c": None,
    "transport/keepalive.c": None,
    "transport/credit.h": None,
    "transport/recv_desc.h": None,
    "transport/endpoint.h": None,
    "transport/endpoint.c": {"endpoint_flush", "endpoint_tick", "endpoint_is_settled", "retransmit_late"},
    "transport/channel.h": None,
    "transport/channel.c": {"advance", "channel_send", "channel_oldest_slot", "channel_seal"},
    "transport/receive.h": None,
    "transport/receive.c": {
        "message_bytes", "is_damaged", "is_garbled", "fail_garbled", "process_acks", "discard",
        "request_retransmission", "on_ack", "accept", "receive_complete",
    },
    "transport/transport.h": None,
    "transport/transport.c": {"transport_flush_pending", "transport_tick", "transport_is_settled"},
    "engine/timers.c": None,
    "engine/deadline.c": None,
    "engine/abort.c": {"abort_receive"},
    "engine/progress.c": {"on_ack", "fill_ack"},
    "engine/matching.c": {"matching_on_cts", "matching_take_early_cts", "matching_send_cts"},
    "engine/transfer.h": {"transfer_is_acked"},
    "engine/transfer.c": {"describes", "check_first", "next_piece", "may_send"},
}  # fmt: skip
FLAGS = ["-std=gnu11", "-g", "-O3", "-ffp-contract=off", '-DMLXDIST_VERSION="0.0.0"', *layer_includes()]
# With -O1 a static function of one caller counts as a part of that, and inline functions of headers as their callers'.
WALK_FLAGS = ["-std=gnu11", "-g", "-O1", "-ffp-contract=off", '-DMLXDIST_VERSION="0.0.0"', *layer_includes()]
WALK_LAYERS = ("collectives", "reduce", "engine", "transport")
MAX_WALK = 40
NO_REP_MOVSB = "GLIBC_TUNABLES=glibc.cpu.hwcaps=-ERMS,-FSRM"


def functions(file):
    """The function that each line of a C file belongs to."""
    found, name, body = {}, None, False
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if name is None and (start := re.match(r"[a-z][\w *]*?(\w+)\(", line)):
            name, body = start[1], False
        body = body or "{" in line
        if name and body:
            found[number] = name
        if line.startswith("}") or (not body and line.endswith(";")) or (line[:1].isalpha() and line.endswith("}")):
            name = None
    return found


def is_work(path, line, cache={}):
    name = "/".join(Path(path).parts[-2:])
    if name not in WORK:
        return False
    if WORK[name] is None:
        return True
    if name not in cache:
        cache[name] = functions(NATIVE / name)
    return cache[name].get(line) in WORK[name]


def callgrind(program, profile, *arguments):
    """The lines of what callgrind has counted while the program was in `measured`."""
    if not shutil.which("valgrind"):
        pytest.skip("there is no valgrind: apt-get install valgrind")
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={profile}", "--toggle-collect=measured"]
    command += ["--compress-strings=no", "--compress-pos=no", str(program), *map(str, arguments)]
    run = subprocess.run(["env", NO_REP_MOVSB, *command], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "exact" in run.stdout, run.stdout + run.stderr
    return profile.read_text().splitlines()


def count(program, directory, nbytes):
    """Instructions, by (file, line)."""
    costs, file, skip = Counter(), "", False
    for line in callgrind(program, directory / f"callgrind.{nbytes}", nbytes):
        if match := re.match(r"(fl|fi|fe)=(.*)", line):
            file = match[2]
        elif line.startswith("calls="):
            skip = True  # the next line is what the call cost, and is counted in the function that was called
        elif match := re.match(r"(\d+) (\d+)$", line):
            if not skip:
                costs[file, int(match[1])] += int(match[2])
            skip = False
    return costs


@pytest.mark.long
def test_header_and_acknowledgement_work(tmp_path, capsys):
    for name, listed in WORK.items():
        assert (NATIVE / name).exists(), name
        assert set(listed or ()) <= set(functions(NATIVE / name).values()), f"no longer all there: {name}"
    sources = [NATIVE / "tests/instructions.c", *with_simulated_clock(layer_sources())]
    program = build_program(tmp_path / "instructions", sources, FLAGS)
    shares = {}
    for nbytes in (4 << 10, 64 << 10):
        costs = count(program, tmp_path, nbytes)
        work = sum(cost for (file, line), cost in costs.items() if is_work(file, line))
        shares[nbytes] = work / costs.total()
        with capsys.disabled():
            print(
                f"\n{nbytes >> 10} KiB: {work / 100:.0f} of {costs.total() / 100:.0f} instructions for each all_reduce "
                f"of a rank are header and acknowledgement work, {shares[nbytes]:.1%}"
            )
    assert shares[64 << 10] <= 0.02
    assert shares[4 << 10] <= 0.08


def walk(program, profile):
    """The functions that were entered, by their files."""
    found, file = {}, ""
    for line in callgrind(program, profile):
        if match := re.match(r"fl=(.*)", line):
            file = "/".join(Path(match[1]).parts[-2:])
        elif line.startswith("fn=") and file.partition("/")[0] in WALK_LAYERS:
            found.setdefault(file, set()).add(line[3:])
    return found


@pytest.mark.long
def test_the_walk_of_an_all_reduce(tmp_path, capsys):
    """From mlxdist_all_reduce to post_send and back, on both ranks. docs/architecture.md draws it."""
    program = build_program(tmp_path / "walk", [NATIVE / "tests/walk.c", *layer_sources()], WALK_FLAGS)
    passed = walk(program, tmp_path / "callgrind.walk")
    names = {name for found in passed.values() for name in found}
    with capsys.disabled():
        print(f"\na 4 KiB all_reduce passes {len(names)} functions in {len(passed)} files")
    assert {"mlxdist_all_reduce", "operation_start", "engine_progress", "transport_poll", "channel_send"} <= names
    assert len(names) <= MAX_WALK, passed
    page = (NATIVE.parent / "docs" / "architecture.md").read_text()
    assert [name for name in sorted(names) if f"{name}" not in page and name not in ("post",)] == []
