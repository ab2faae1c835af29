"""What docs/security.md promises, line by line. What other files test, the page names there."""

import hmac
import json
import os
import re
import signal
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import nothing_left, running, shared_memory_names  # noqa: F401
from meeting import SECRET, Job, at_once, group, pose_as_rank_0
from waiting import wait_for

from mlxdist.base import errors
from mlxdist.base.environment import Environment
from mlxdist.launch.jobs import list_jobs
from mlxdist.runtime.rendezvous import Rendezvous
from mlxdist.runtime.rendezvous.authentication import NONCE_BYTES, PROOF_BYTES, proof
from mlxdist.runtime.rendezvous.protocol import GATHERED, MAGIC, Framing, Kind, pack_json, pack_message

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py|native/tests/\w+\.c)` `(\w+)`", PAGE)
    assert len(named) >= 12
    for file, test in named:
        assert re.search(rf'(def |"){test}\b', (ROOT / file).read_text()), f"{file} has no {test}"


# No join without the secret.


def read_frame(sock, framing):
    while (frame := framing.next_frame()) is None:
        framing.feed(sock.recv(4096))
    return frame


def response(given, rank=1):
    """What a process gets that answers rank 0's challenge with ``given(server_nonce, nonce, greeting)``."""
    job = Job(2, timeout=0.5)
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(Rendezvous, job.environment(0))
        with socket.create_connection(job.address, timeout=5) as sock:
            framing = Framing()
            server_nonce = read_frame(sock, framing)[1][len(MAGIC) :]
            nonce = b"n" * NONCE_BYTES
            greeting = pack_json(rank=rank, world_size=2, job="test", version="0", host="h", pid=1)
            sock.sendall(framing.frame(Kind.HELLO, nonce + given(server_nonce, nonce, greeting) + greeting))
            try:
                got = read_frame(sock, framing)
            finally:
                assert isinstance(forming.exception(10), errors.RendezvousError)
    return got


def right(server_nonce, nonce, greeting):
    return proof(SECRET, "rank", server_nonce, nonce, greeting)


WRONG_PROOFS = {
    "zeros": lambda *parts: bytes(PROOF_BYTES),
    "last bit": lambda *parts: right(*parts)[:-1] + bytes([right(*parts)[-1] ^ 1]),
    "first bit": lambda *parts: bytes([right(*parts)[0] ^ 128]) + right(*parts)[1:],
    "another secret": lambda *parts: proof(b"\x5f" * 32, "rank", *parts),
    "no secret": lambda *parts: proof(b"", "rank", *parts),
    "that of rank 0": lambda server_nonce, nonce, greeting: proof(SECRET, "rank 0", nonce, server_nonce, greeting),
    "for another greeting": lambda server_nonce, nonce, greeting: right(server_nonce, nonce, b"{}"),
    "for another challenge": lambda server_nonce, nonce, greeting: right(b"h" * NONCE_BYTES, nonce, greeting),
}


@pytest.mark.parametrize("given", WRONG_PROOFS.values(), ids=WRONG_PROOFS)
def test_no_join_without_the_secret(given):
    kind, text = response(given)
    assert kind == Kind.REFUSED and b"MLXDIST_SECRET is not this job's" in text


def test_the_right_proof_is_looked_at():
    """The refusals above come from the proof, not from something else in the greeting."""
    kind, text = response(right)
    assert kind == Kind.REFUSED and b"the version of mlxdist" in text


def test_the_challenge_is_new_every_time():
    job = Job(2, timeout=0.5)
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(Rendezvous, job.environment(0))
        socks = [socket.create_connection(job.address, timeout=5) for _ in range(20)]
        nonces = {read_frame(sock, Framing())[1] for sock in socks}
        assert len(nonces) == 20
        for sock in socks:
            sock.close()
        assert forming.exception(10)


def test_rank_0_has_to_prove_itself_too():
    """What the rank has sent does not help an impostor: the two proofs have different labels."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = Environment(rank=1, world_size=2, rendezvous=listener.getsockname(), secret=SECRET)

        def reflect():
            sock, _ = listener.accept()
            framing = Framing()
            sock.sendall(framing.frame(Kind.CHALLENGE, MAGIC + b"n" * NONCE_BYTES))
            assert read_frame(sock, framing)[0] == Kind.KNOCK
            hello = read_frame(sock, framing)[1]
            sock.sendall(framing.frame(Kind.WELCOME, hello[NONCE_BYTES:]))
            sock.recv(1)
            sock.close()

        _, refused = at_once(reflect, lambda: Rendezvous(environment))
    assert isinstance(refused, errors.RendezvousError)
    assert "no proof that it knows MLXDIST_SECRET" in str(refused)


def test_proofs_and_tags_are_compared_in_constant_time(monkeypatch):
    """With hmac.compare_digest: how long it takes does not tell how much of a guess is right."""
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(len(a)) or compare(a, b))
    with group(2) as members:
        at_once(*(lambda m=m: m.barrier("x") for m in members))
    assert compared.count(32) == 2, "the proof of each side"
    assert compared.count(64) == 1, "that a rank has knocked"
    assert compared.count(16) >= 4, "the tags of frames"


# The secret is in the environment of the ranks, and nowhere else.

PROGRAM = """
import os, signal, sys
import mlxdist, mlx.core as mx
group = mlxdist.init()
mx.eval(mlxdist.all_sum(mx.ones(4)))
print(os.environ["MLXDIST_SECRET"], flush=True)
print(group, repr(group), file=sys.stderr)
group.barrier()
mx.eval(mlxdist.all_sum(mx.ones(4)))
if rank == 0:
    mx.eval(mlxdist.all_sum(mx.ones(4)))  # rank 1 does not come
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_secret_is_in_no_command_line_file_or_output(tmp_path):
    """Of a job that runs, and of one that has lost a rank: errors, recordings, what the launcher says."""
    options = ["--verbose", "--env", "MLXDIST_FLIGHT_DIR=" + str(tmp_path / "flight")]
    (tmp_path / "flight").mkdir()
    with running(2, PROGRAM, options=options) as job:
        secrets = {line.split()[1] for line in job.first_lines}
        assert len(secrets) == 1
        (secret,) = secrets
        leaks = (secret.encode(), secret.upper().encode(), bytes.fromhex(secret))
        (found,) = list_jobs()
        command_lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if is_readable(path)]
        assert any(b"reaper.py" in line for line in command_lines)
        files = read_all(tmp_path)
        assert len(files) >= 3
        others = [read_environment(pid) for pid in (job.pid, reaper_of(job.pid))]
        os.kill(found.pids[1], signal.SIGKILL)
        out, err = job.communicate(timeout=60)
    assert "rank 1 failed first" in err and "[0] " in err
    texts = {"command lines": command_lines, "files": files + read_all(tmp_path), "environments": others}
    # The last lines of the rank that has failed, its own print of the secret among them, are said again, indented.
    said = [line for line in err.splitlines() if not line.startswith("    ")]
    texts["output"] = [out.encode(), "\n".join(said).encode()]
    for where, content in texts.items():
        assert not any(leak in text for text in content for leak in leaks), where


def is_readable(path):
    try:
        return path.read_bytes() is not None
    except OSError:
        return False


def read_all(directory):
    return [path.read_bytes() for path in directory.rglob("*") if path.is_file() and is_readable(path)]


def read_environment(pid):
    return Path(f"/proc/{pid}/environ").read_bytes()


def reaper_of(launcher):
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next(pid for pid in children if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.parametrize("secret", ["5e" * 16 + "xy", "5e" * 15, "5e" * 200, "5e" * 16 + " "])
def test_a_malformed_secret_is_not_repeated(secret):
    with pytest.raises(errors.EnvironmentVariableError) as caught:
        Environment.read({"MLXDIST_SECRET": secret})
    assert "MLXDIST_SECRET must be" in str(caught.value) and "5e5e" not in str(caught.value)


# Shared memory cannot be guessed.


@pytest.mark.skipif(sys.platform != "linux", reason="macOS shows no files of shared memory")
def test_shared_memory_is_the_user_s_alone():
    names = shared_memory_names()
    with running(2, PROGRAM) as job:
        (found,) = list_jobs()
        for pid in found.pids.values():
            links = [path for path in Path(f"/proc/{pid}/fd").iterdir() if "memfd:mlxdist" in os.readlink(path)]
            assert links and all(path.stat().st_mode & 0o7777 == 0o600 for path in links)
        assert shared_memory_names() <= names
        job.terminate()
        job.communicate(timeout=20)


# Lengths and indices are bounded before they are used.


def reply_of_rank_0(*frames):
    """What a rank does whose rank 0, although it knows the secret, sends these."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = Environment(rank=1, world_size=2, rendezvous=listener.getsockname(), secret=SECRET)

        def rank_0():
            sock, framing, welcome = pose_as_rank_0(listener)
            sock.sendall(welcome + framing.frame(Kind.FORMED, b"{}"))
            for kind, payload in frames:
                sock.sendall(framing.frame(kind, payload))
            sock.settimeout(5)
            try:
                while sock.recv(4096):
                    pass
            except OSError:
                return
            finally:
                sock.close()

        thread = threading.Thread(target=rank_0)
        thread.start()
        member = Rendezvous(environment)
        with pytest.raises(errors.Error) as caught:
            member.barrier("x")
        member.close(linger=0)
        thread.join(10)
        return str(caught.value)


@pytest.mark.parametrize("rank", [2, 2**32 - 1])
def test_a_blob_of_a_rank_that_is_none(rank):
    assert f"a frame about rank {rank} of 2" in reply_of_rank_0((Kind.GATHERED, GATHERED.pack(0, rank) + b"x"))


@pytest.mark.parametrize("rank", [-1, 2, 10**30])
@pytest.mark.parametrize("kind", [Kind.FAILURE, Kind.DEPARTED])
def test_a_report_about_an_unknown_rank(kind, rank):
    assert f"a frame about rank {rank} of 2" in reply_of_rank_0((kind, pack_json(rank=rank, error="Error", text="t")))


@pytest.mark.parametrize(
    "payload, words",
    [
        (pack_message(7, "t", b""), "about rank 7 of 2"),
        (struct.pack(">IH", 0, 60000), "truncated tag"),
        (b"\0", "truncated message"),
        (struct.pack(">IH", 0, 2) + b"\xff\xff", "no text"),
    ],
)
def test_messages_that_are_none(payload, words):
    assert words in reply_of_rank_0((Kind.MESSAGE, payload))


@pytest.mark.parametrize(
    "payload", [b"{", b"[]", b'{"rank": "1"}', b'{"rank": true, "error": "", "text": ""}', b"[" * 9999]
)
def test_nothing_but_the_expected_fields(payload):
    assert "a frame with" in reply_of_rank_0((Kind.FAILURE, payload))


def test_a_record_of_a_job_has_only_what_it_needs():
    """job.json is read by other programs of this user: nothing of the environment is in it."""
    with running(1, "print('start', flush=True); stay()") as job:
        (found,) = list_jobs()
        assert set(json.loads((found.directory / "job.json").read_text())) == {
            "launcher",
            "temporary",
            "flight",
            "command",
            "ranks",
            "members",
            "name",
            "started",
            "hosts",
            "ssh",
            "python",
        }
        job.terminate()
        assert wait_for(lambda: job.poll() is not None)
