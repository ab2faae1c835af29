"""What a report leaves out: secrets, serial numbers, hardware addresses, names; and what it must keep."""

import json
import re

import pytest
from fake_macs import fixture
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxdist.tools.doctor.diagnostics import redact
from mlxdist.tools.doctor.diagnostics.redact import Redactor

SECRET = "0f" * 32
few = settings(deadline=None, max_examples=40)  # each compiles the patterns
PROFILER = [
    "m5_max_to_m3_ultra.json",
    "m5_max_with_hub.json",
    "tb4_two_peers.json",
    "synthetic_displays.json",
    "m4_pro_mini.json",
]
HARDWARE = """Hardware:

    Hardware Overview:

      Model Name: Mac Studio
      Model Identifier: Mac15,14
      Serial Number (system): C02XK1ZZJGH5
      Hardware UUID: 6116A446-F34E-4AC1-85A0-B5F930B9BA1E
      Provisioning UDID: 00008103-001A2D0E3C08801E
"""

hexes = st.text("0123456789abcdef", min_size=2, max_size=2)
macs = st.lists(hexes, min_size=6, max_size=6).map(":".join)
uuids = st.uuids().map(str) | st.uuids().map(lambda uuid: str(uuid).upper())
serials = st.text("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789", min_size=10, max_size=12)
secrets = st.binary(min_size=16, max_size=128).map(bytes.hex)
public = st.ip_addresses(v=4).filter(lambda address: address.is_global and not address.is_multicast).map(str)
eui64 = st.lists(st.integers(0, 255), min_size=5, max_size=5).map(
    lambda b: f"fe80::{b[0] | 2:x}{b[1]:02x}:{b[2]:02x}ff:fe{b[3]:02x}:{b[4]:02x}01"
)
people = st.text("abcdefghijklmnopqrstuvwxyz", min_size=4, max_size=9).filter(
    lambda name: name not in ("home", "library", "models", *redact._COMMON)
)
around = st.sampled_from(["{}", " {} ", '"{}"', "[{}]", "at {},", "({})", "= {}\n", "\n{}\n", "x: {}"])


def redactor(hosts=(), **environ: str) -> Redactor:
    return Redactor(hosts, environ=environ)


@given(value=macs | uuids | secrets | public | eui64, around=around)
@example(value="0:1c:42:0:0:8", around="ether {}")
@example(value="80:00:02:08:fe:80:00:00:00:00:00:00:f4:52:14:03:00:7b:cb:a1", around="link/infiniband {} brd")
@example(value="2001:db8::1:2", around="{}")
@few
def test_what_identifies_is_nowhere(value, around):
    text = redactor().text(around.format(value))
    assert value not in text and "<" in text
    assert redactor().text(text) == text  # a placeholder is none of what is replaced


SERIAL_FORMS = ['"serial_number": "{}"', "Serial Number (system): {}", "IOPlatformSerialNumber = {}", "serial={}"]


@given(serial=serials, form=st.sampled_from(SERIAL_FORMS))
@few
def test_serial_numbers(serial, form):
    text = form.format(serial)
    assert serial not in redactor().text(text)
    found = redactor()
    found.learn(text)
    if any(map(str.isdigit, serial)):  # else it could be any word
        assert serial not in found.text(f"the machine {serial} of today")


@given(people, st.sampled_from(["/models/m", "", "/Library/x y"]), st.sampled_from(["/Users/", "/home/"]))
@few
def test_users(name, rest, directory):
    found = redactor()
    path = f"{directory}{name}{rest}"
    found.learn(path)
    text = found.text(f"{path} of {name}, {name}@10.0.0.2")
    assert not re.search(rf"\b{name}\b", text) and rest in text and text.endswith("@10.0.0.2")


@given(value=st.text("abcXYZ019+/=_-.", min_size=6, max_size=40).filter(lambda v: any(c.isalnum() for c in v)))
@few
def test_values_of_private_variables(value):
    found = redactor(HF_TOKEN=value, MY_PASSWORD="x" + value, VISIBLE="visible")
    for text in (value, f"token is {value}!", json.dumps({"said": value}), f"HF_TOKEN={value}"):
        assert value not in found.text(f"{text} visible").replace("removed", "")
    assert found.text("visible") == "visible"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.text(max_size=20) | macs | secrets | uuids,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | macs, inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
@few
def test_the_shape_of_json_stays(value):
    found = redactor()
    found.learn(value)
    text = json.dumps(found.value(value))
    assert json.loads(text) is not None or value is None
    assert not re.search(r"[0-9a-f]{32}|(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", text)


@given(st.text())
@few
def test_any_text_is_taken(text):
    found = redactor(["node-1"])
    found.learn({"text": text})
    assert isinstance(found.text(text), str)


def test_equal_values_have_equal_placeholders():
    found = redactor(["anna-studio.local"])
    a, b = "a1:b2:c3:d4:e5:f6", "a1:b2:c3:d4:e5:f7"
    assert found.text(f"{a} {b} {a.upper()}") == "<mac-1> <mac-2> <mac-1>"
    assert found.text("fe80::a1 to fe80::b2 to fe80::a1%en2") == (
        "<ipv6-link-local-1> to <ipv6-link-local-2> to <ipv6-link-local-1>%en2"
    )
    assert found.text("anna-studio, ANNA-STUDIO.local and Anna’s-Studio") == "<host-1>, <host-1> and Anna’s-Studio"


def test_hosts_that_only_their_domains_tell_apart():
    found = redactor(["node7.a.com", "node7.b.com", "disk.a.com", "disk.local"])
    assert found.value({"node7.a.com": 1, "node7.b.com": 2}) == {"<host-1>": 1, "<host-2>": 2}
    assert found.text("node7.b.com disk disk.local disk.a.com") == "<host-2> <host-3> <host-3> <host-3>"
    assert found.value({"disk": 1, "disk.a.com": 2, "disk.local": 3}) == {
        "<host-3>": 1,
        "<host-3> (2)": 2,
        "<host-3> (3)": 3,
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "ssh: connect to host disk.schmidt-family.de port 22: No route to host",
            "ssh: connect to host <host-1> port 22: No route to host",
        ),
        ("ssh: Could not resolve hostname mac.corp.internal: no", "ssh: Could not resolve hostname <host-1>: no"),
        ("Connection closed by disk.corp port 22", "Connection closed by <host-1> port 22"),
        ("Connection timed out by 10.0.0.2 port 22", "Connection timed out by 10.0.0.2 port 22"),
        ("read: Connection reset by peer", "read: Connection reset by peer"),
        ("Connection closed by remote host", "Connection closed by remote host"),
        ("connect to host <host-1> port 22", "connect to host <host-1> port 22"),
        ("_ssh._tcp. at Bobs-Mini.local, port 22", "_ssh._tcp. at <host-1>, port 22"),
        ("~/.local/bin, threading.local()", "~/.local/bin, threading.local()"),
    ],
)
def test_hosts_that_only_messages_name(text, shown):
    assert redactor().text(text) == shown


def test_a_computers_name_in_all_its_forms():
    found = redactor(["Annas-Mac-Studio.local"])
    for name in ("Annas-Mac-Studio", "annas-mac-studio.local", "Anna's Mac Studio", "Anna’s Mac Studio"):
        assert found.text(f"[{name}]") == "[<host-1>]", name


@pytest.mark.parametrize(
    "text",
    [
        "20:02:55.952438 mlxdist rank 0 pid 14417",
        "192.168.1.7/24, 10.0.0.1, 169.254.3.4, 127.0.0.1, ::1, ::ffff:10.0.0.2, 255.255.255.0",
        "macOS 26.3.1 (25D125), Darwin 25.3.0, MLX 0.32.4",
        "modify_qp(qp 0x41, to RTR, mask 0x101181, path_mtu 5, dest_qp 0x40) = 22 (Invalid argument), errno 0",
        "rank 0 waited 30.0 s in all_sum #413 at train.py:90",
        "Mac15,14 with rdma_en2, Up to 80 Gb/s x1, receptacle_connected",
        "MLXDIST_PROVIDER=soft mlxdist launch -n 2 -- python train.py",
        "train.py --tokens 10 --max-tokens 2048 --steps 3",
    ],
)
def test_what_a_maintainer_needs_stays(text):
    assert redactor().text(text) == text


@pytest.mark.parametrize("file", PROFILER)
def test_recordings_of_system_profiler(file):
    """As text and as JSON: no UUID and no number of a switch is left, and cables are still to be seen."""
    found, text = redactor(), fixture(file)
    found.learn(text)
    plain, value = found.text(text), json.dumps(found.value(json.loads(text)))
    identifying = re.findall(r"[0-9A-F]{8}(?:-[0-9A-F]{4}){3}-[0-9A-F]{12}|0x[0-9A-F]{16}", text)
    assert identifying
    for number in identifying:
        assert number not in plain and number not in value
    for kept in ("receptacle_id_key", "Gb/s"):
        assert kept in plain and kept in value


@pytest.mark.parametrize("file", ["ifconfig.txt", "ports_studio.txt", "ports_m5_max.txt", "ibv_devices.txt"])
def test_recordings_of_interfaces(file):
    text = fixture(file)
    identifying = re.findall(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b|fe80::[0-9a-f:]+|\b[0-9a-f]{16}\b", text)
    assert identifying
    shown = redactor().text(text)
    assert not any(address in shown for address in identifying)
    for kept in re.findall(r"\ben\d\b|\bbridge0\b|inet 10\.\S+|inet 192\.168\.\S+", text):
        assert kept in shown


def test_hardware_overview():
    found = redactor()
    found.learn(HARDWARE)
    text = found.text(HARDWARE)
    for private in ("C02XK1ZZJGH5", "6116A446", "00008103-001A2D0E3C08801E"):
        assert private not in text
    assert "Model Name: Mac Studio" in text and "Mac15,14" in text


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\ndef\n-----END OPENSSH PRIVATE KEY-----\nafter", "def"),
        ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJxyz anna@studio", "AAAAC3"),
        ("Authorization: Bearer abc.def-123456", "abc.def"),
        ("https://anna:pa55word@huggingface.co/x", "pa55word"),
        ("hf_abcdefghijklmnopqrstuv", "hf_abc"),
        ("MLXDIST_SECRET=" + SECRET, SECRET),
        ("OPENAI_API_KEY='two words'", "two words"),
        ("/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T/x", "zyxvpxvq"),
        ("0x05AC7A8CAAAD1E03", "05AC7A8C"),
        ("guid 0001:0203:0405:0607", "0203"),
        ("python t.py --password hunter2abc --steps 3", "hunter2abc"),
        ("['t.py', '--api-key', 'abcd1234efgh']", "abcd1234efgh"),
        ("ghr_abcdefghijklmnopqrst", "ghr_"),
        ("npm_abcdefghijklmnopqrstuvwxyz0123456789", "npm_"),
        ("pypi-AgEIcHlwaS5vcmcabcdef", "AgEI"),
        ("DB_PWD=hunter2abc", "hunter2abc"),
        ("https://x.blob.core/y?sv=2&sig=abcd1234%3D", "abcd1234"),
        ("https://s3/y?X-Amz-Signature=abcd1234", "abcd1234"),
        ("Authorization: Token abcd1234", "abcd1234"),
        ("Proxy-Authorization: Basic abcd1234", "abcd1234"),
    ],
)
def test_other_secrets(text, private):
    assert private not in redactor().text(text)
    assert private not in json.dumps(redactor().value({"output": [text]}))


def test_words_of_a_command():
    """The value of a private option is in an element of its own; and learned, as it may stand elsewhere."""
    found = redactor()
    words = ["t.py", "--password", "hunter2abc", "--max-tokens", "100", "--tokens", "--api-key", "abcd1234efgh"]
    found.learn(words)
    removed = {2: "<removed>", 7: "<removed>"}
    assert found.value(words) == [removed.get(number, word) for number, word in enumerate(words)]
    assert found.text("is hunter2abc right") == "is <removed> right"
