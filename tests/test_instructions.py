"""What header and acknowledgement work costs: instructions of an all_reduce on two ranks, counted by callgrind.

Instructions are attributed by source line, so what the compiler has inlined counts where it was written. `WORK` is
everything that the endpoint does because a connection loses messages and the peer has finite room: headers written and
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
from native_build import NATIVE, build_program, layer_sources

# File: its functions; None for all.
WORK = {
    "wire.h": None,
    "checksum.c": None,
    "cable.c": None,
    "timers.c": None,
    "deadline.c": None,
    "channel.c": {
        "channel_send", "send_slot", "advance", "channel_oldest_slot", "channel_is_clear", "write_news",
        "channel_room", "has_request", "channel_can_send", "channel_acknowledge",
        "channel_resend", "channel_forward", "seal", "channel_on_sent", "channel_owes_news",
    },
    "channel.h": None,
    "channel_receive.c": {
        "message_bytes", "is_damaged", "fail_garbled", "check_message", "read_news", "take_abort", "ask_again",
        "in_sequence", "channel_hear", "channel_on_received",
    },
    "matching.c": {"matching_read_ready"},
    "peer.c": {"peer_acknowledge", "peer_tell_ready", "peer_is_settled"},
    "engine.c": {"acknowledge", "engine_is_settled"},
    "exchange.c": {"is_confirmed", "describes", "check_first", "next_piece", "may_send"},
}  # fmt: skip
FLAGS = [
    "-std=gnu11", "-g", "-O3", "-ffp-contract=off", '-DMLXDIST_VERSION="0.0.0"',
    *(f"-I{NATIVE / folder}" for folder in ("include", "verbs", "endpoint", "reduce", "collectives")),
]  # fmt: skip
NO_REP_MOVSB = "GLIBC_TUNABLES=glibc.cpu.hwcaps=-ERMS,-FSRM"


def functions(file):
    """The function that each line of a C file of native/endpoint belongs to."""
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
    file = NATIVE / "endpoint" / Path(path).name
    if file.name not in WORK or not path.endswith(f"endpoint/{file.name}"):
        return False
    if WORK[file.name] is None:
        return True
    if file not in cache:
        cache[file] = functions(file)
    return cache[file].get(line) in WORK[file.name]


def count(program, folder, nbytes):
    """Instructions: of all, and of WORK, by (file, line)."""
    profile = folder / f"callgrind.{nbytes}"
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={profile}", "--toggle-collect=measured"]
    command += ["--compress-strings=no", "--compress-pos=no", str(program), str(nbytes)]
    run = subprocess.run(["env", NO_REP_MOVSB, *command], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "exact" in run.stdout, run.stdout + run.stderr
    costs, file, skip = Counter(), "", False
    for line in profile.read_text().splitlines():
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
    if not shutil.which("valgrind"):
        pytest.skip("there is no valgrind: apt-get install valgrind")
    known = {name for file in NATIVE.glob("endpoint/*.[ch]") for name in functions(file).values()}
    listed = {name for names in WORK.values() for name in names or ()}
    assert listed <= known, f"no longer there: {listed - known}"
    layers = layer_sources("verbs", "providers/soft", "endpoint", "reduce", "collectives")
    program = build_program(tmp_path / "instructions", [NATIVE / "tests/instructions.c", *layers], FLAGS)
    shares = {}
    for nbytes in (4 << 10, 64 << 10):
        costs = count(program, tmp_path, nbytes)
        work = sum(cost for (file, line), cost in costs.items() if is_work(file, line))
        shares[nbytes] = work / costs.total()
        with capsys.disabled():
            print(f"\n{nbytes >> 10} KiB: {work / 100:.0f} of {costs.total() / 100:.0f} instructions for each all_reduce "
                  f"of a rank are header and acknowledgement work, {shares[nbytes]:.1%}")  # fmt: skip
    assert shares[64 << 10] <= 0.05
    assert shares[4 << 10] <= 0.25  # so that a change for the worse is seen
