"""What the documentation shows is what happens."""

import json
import re
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from fake_macs import Macs
from guides import program_of

from mlxdist.base.environment import ALGORITHMS, VARIABLES
from mlxdist.cli import commands
from mlxdist.runtime.native import ffi, lib

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES += DOCS


def test_the_program_of_the_readme(run_ranks, tmp_path):
    """Its code runs, and prints what is shown below it."""
    readme = ROOT / "README.md"
    for rank, output in enumerate(run_ranks(program_of(readme, tmp_path), 2)):
        assert f"    [{rank}] {output}" in readme.read_text()


def test_the_program_of_the_guide_to_tuning(run_ranks, tmp_path):
    """Its calls and bytes are those below it; the times are of the machine."""
    page = ROOT / "docs/tuning.md"
    shown = re.sub("[0-9]+ us", "N us", page.read_text())
    for rank, output in enumerate(run_ranks(program_of(page, tmp_path), 2)):
        lines = re.sub("[0-9]+ us", "N us", output).splitlines()
        assert len(lines) == 2 and all(f"    [{rank}] {line}\n" in shown for line in lines), output


def test_the_defaults_shown_are_those_of_the_engine():
    options = ffi.new("mlxdist_options *")
    lib.mlxdist_default_options(options)
    shown = {variable.name: variable.default for variable in VARIABLES}
    for name, _ in ffi.typeof("mlxdist_options").fields:
        default = getattr(options, name)
        if name in ("adjacency", "host", "hosts", "links"):
            assert default == ffi.NULL
            continue
        if name in ("reliable", "has_key", "key"):  # MLXDIST_QP_TYPE and MLXDIST_SECRET
            assert not any(bytes(ffi.buffer(ffi.addressof(options, name)))) and shown["MLXDIST_QP_TYPE"] == "uc"
            continue
        if name == "largest_message":  # of no variable: it is found, or as the devices say
            assert default == 0
            continue
        if name == "entry_timeout":  # MLXDIST_TIMEOUT is for both; the text below the table has this default
            assert default == 30 * 60
            continue
        if name == "soft_profile":
            assert shown["MLXDIST_SOFT_PROFILE"] == ffi.string(default).decode()
            continue
        text = ALGORITHMS[default] if name == "algo" else f"{default:.0f}"
        assert shown[f"MLXDIST_{name.upper()}"] == text, name


def mac_studio(number: int, count: int) -> str:
    """What `system_profiler` prints on one of ``count`` Mac Studios, each with a cable to every other one."""
    buses = []
    for port, other in enumerate((other for other in range(count) if other != number), 1):
        peer = {"_name": "Mac Studio", "device_name_key": "Mac15,14", "vendor_name_key": "Apple Inc."}
        peer["domain_uuid_key"] = f"studio-{other}-{number + (number < other)}"
        tag = {"current_speed_key": "80 Gb/s", "receptacle_id_key": f"{port}"}
        tag |= {"receptacle_status_key": "receptacle_connected"}
        buses.append({"_items": [peer], "domain_uuid_key": f"studio-{number}-{port}", "receptacle_1_tag": tag})
    return json.dumps({"SPThunderboltDataType": buses})


def test_the_picture_of_the_readme(tmp_path, monkeypatch):
    """It is what `mlxdist config` draws of four Macs with six cables."""
    monkeypatch.chdir(tmp_path)
    macs = Macs(tmp_path)
    names = [f"studio-{letter}" for letter in "abcd"]
    for number, name in enumerate(names):
        macs.add(name, "no_domains.json")
        macs.write(name, macs.read(name) | {"thunderbolt": mac_studio(number, len(names))})
    words = ["config", "--ssh", macs.ssh, "--hosts", ",".join(names), "--svg", "cluster.svg"]
    done = CliRunner().invoke(commands, words)
    assert done.exit_code == 0, done.output
    assert "6 cables, mesh" in done.stdout and "docs/cluster.svg" in (ROOT / "README.md").read_text()
    assert (tmp_path / "cluster.svg").read_text() == (ROOT / "docs" / "cluster.svg").read_text()


def test_the_navigation_has_every_page():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = re.findall(r"'([\w/-]+\.md)'", str(nav))
    generated = ["index.md", "contributing.md", "changelog.md"]  # from files outside docs/
    assert sorted(pages) == sorted(generated + [str(page.relative_to(ROOT / "docs")) for page in DOCS])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_links_exist(page):
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"make ([a-z][a-z-]*)`", text) + re.findall(r"^    make ([a-z-]+)", text, re.MULTILINE)
    for target in set(targets):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} shows make {target}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words after `mlxdist` name, and those that are left."""
    command: click.Command = commands
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0]) if words else None
        if found is None:
            break
        command, words = found, words[1:]
    return command, words


def shown_commands(text: str) -> list[str]:
    lines = re.findall(r"^    (?:\$ )?(mlxdist (?![\w-]+:).*?)(?:\s{2,}.*)?$", text, re.MULTILINE)
    return lines + [" ".join(words.split()) for words in re.findall(r"`(mlxdist [a-z][^`]*)`", text)]


def every_command(group: click.Group, name: str) -> dict[str, click.Command]:
    found = {f"{name} {of}": group.get_command(click.Context(group), of) for of in group.list_commands(None)}
    inner = [every_command(command, of) for of, command in found.items() if isinstance(command, click.Group)]
    return found | {of: command for part in inner for of, command in part.items()}


COMMANDS = every_command(commands, "mlxdist")
HELP = {name: command.help for name, command in COMMANDS.items()}


@pytest.mark.parametrize("where", [*(page.name for page in PAGES), *HELP])
def test_commands_and_options_exist(where):
    text = HELP[where] if where in HELP else next(page for page in PAGES if page.name == where).read_text()
    for shown in shown_commands(text):
        words = shown.split(" -- ")[0].removesuffix(" --").split()[1:]
        command, rest = find_command(words)
        assert command is not commands or words[0].startswith("--"), f"{where} shows {shown!r}"
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        unknown = [word for word in rest if re.match("--[a-z]", word) and re.split(r"[=,`|]", word)[0] not in options]
        assert not unknown, f"{where} shows {shown!r}, and there is no {unknown[0]}"


@pytest.mark.parametrize("name", HELP)
def test_every_command_has_a_help_text(name):
    assert HELP[name]


@pytest.mark.parametrize("name", HELP)
def test_help_is_shown_without_marks_and_describes_each_option(name):
    """The mark that keeps lines apart is for click, and words such as "See below" are about another place."""
    command = COMMANDS[name]
    shown = command.get_help(click.Context(command, info_name=name))
    assert not re.search(r"\\[a-z]|[\x00-\x09\x0b-\x1f]", shown), shown
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help and not re.match(r"see\b", option.help, re.IGNORECASE), option.opts
