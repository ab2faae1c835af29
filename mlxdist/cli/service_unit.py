"""The text that `mlxdist serve --print-service` prints: the command line as a service of systemd or launchd."""

import json
import math
import plistlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlxdist.base.child_process import module_command
from mlxdist.base.environment import VARIABLES
from mlxdist.base.errors import InvalidArgument

__all__ = ["service_unit"]

_OPTION, _KEY = "--print-service", "--api-key"
_KEY_VARIABLE = "MLXDIST_API_KEY"
_LABEL = "io.github.mlxdist.serve"
# Paths of downloaded models: a service has none of the user's variables.
_OF_MODELS = ("HF_HOME", "HF_HUB_CACHE")
_END_SECONDS = 60  # that ranks may take after the last request, to save the prefix cache

_SYSTEMD = """\
# For one user, on Linux:
#   mkdir -p ~/.config/systemd/user
#   put this into ~/.config/systemd/user/mlxdist-serve.service
#   systemctl --user daemon-reload && systemctl --user enable --now mlxdist-serve
#   loginctl enable-linger                 starts it with the machine, and not with the first login
# For the machine: put it into /etc/systemd/system, say in User= who runs it, and leave --user and the last line out.
# What it prints: journalctl --user -u mlxdist-serve
{about_key}[Unit]
Description=mlxdist serve
Documentation=https://mlxdist.github.io/mlxdist/serve/
Wants=network-online.target
After=network-online.target

[Service]
#User=
# RDMA locks its buffers in memory.
LimitMEMLOCK=infinity
WorkingDirectory={directory}
{environment}ExecStart={command}
# The launcher ends its ranks after the running requests, so the signal is for it alone.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={seconds}
Restart=on-failure
RestartSec=5
# 130 and 143: ended by a signal. 2: the options are wrong, and would be again.
SuccessExitStatus=130 143
RestartPreventExitStatus=2

[Install]
WantedBy=default.target
"""
_SYSTEMD_KEY = """\
# The key is in a file, which it does not start without:
#   mkdir -p ~/.config/mlxdist && (umask 077; echo MLXDIST_API_KEY=... > ~/.config/mlxdist/serve.env)
#   for the machine: /etc/mlxdist/serve.env
"""
_LAUNCHD = """\
For one user, on macOS:
  put this into {path}
  launchctl bootstrap gui/$(id -u) {path}
It starts when the user logs in. What it prints: ~/Library/Logs/mlxdist-serve.log
"""
_LAUNCHD_KEY = """\
The key is in a file, which it does not start without:
  mkdir -p ~/.config/mlxdist && (umask 077; echo MLXDIST_API_KEY=... > ~/.config/mlxdist/serve.env)
"""


def service_unit(
    kind: Literal["systemd", "launchd"],
    argv: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    *,
    drain: float = 30.0,
) -> str:
    """The text of a unit that runs a command line of `mlxdist` in the directory ``cwd``.

    The unit has the MLXDIST_* variables of the user in ``environment``, but neither those of a job nor the key, which a
    file has. It ends without an error from --drain seconds and a minute on.

    Args:
        argv: the words after `mlxdist`, with or without --print-service; the key is left out.
        environment: os.environ; `HOME` is needed for launchd.
        drain: seconds for running requests, of --drain.

    Raises:
        InvalidArgument: a word, a variable or the directory has a character that a unit cannot have.
    """
    words = _without(argv, _OPTION)
    command = _without(words, _KEY, takes_all=True)
    has_key = len(command) < len(words) or bool(environment.get(_KEY_VARIABLE))
    kept = {variable.name for variable in VARIABLES if not (variable.of_job or variable.is_secret)} | set(_OF_MODELS)
    variables = {name: environment[name] for name in sorted(kept & set(environment))}
    for text in (*command, *variables.values(), str(cwd)):
        if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text):
            raise InvalidArgument(f"serve: {text!r:.80} has a character that a unit cannot have; leave it out")
    seconds = math.ceil(drain) + _END_SECONDS
    program = module_command("mlxdist", *command)
    if kind == "systemd":
        return _systemd(program, variables, cwd, has_key, seconds)
    return _launchd(program, variables, cwd, has_key, seconds, Path(environment["HOME"]))


def _without(words: Sequence[str], option: str, takes_all: bool = False) -> list[str]:
    """The words without an option and its value, which begins with - only if the option ``takes_all``, as in click."""
    left: list[str] = []
    waits = False
    for word in words:
        is_value, waits = waits and (takes_all or not word.startswith("-")), not waits and word == option
        if not (is_value or waits or word.startswith(f"{option}=")):
            left.append(word)
    return left


def _systemd(program: Sequence[str], variables: Mapping[str, str], cwd: Path, has_key: bool, seconds: int) -> str:
    lines = [f"Environment={_quoted(f'{name}={value}')}\n" for name, value in variables.items()]
    if has_key:
        lines.append("EnvironmentFile=%E/mlxdist/serve.env\n")  # %E: ~/.config, or /etc for the machine
    # systemd expands variables in all words but the first.
    command = [_quoted(program[0]), *(_quoted(word).replace("$", "$$") for word in program[1:])]
    return _SYSTEMD.format(
        about_key=_SYSTEMD_KEY if has_key else "",
        directory=str(cwd).replace("%", "%%"),
        environment="".join(lines),
        command=" ".join(command),
        seconds=seconds,
    )


def _quoted(word: str) -> str:
    """A word as systemd reads it back."""
    text = word.replace("%", "%%")
    return text if re.fullmatch(r"[\w%+,./:=@-]+", text, re.ASCII) else json.dumps(text, ensure_ascii=False)


def _launchd(
    program: Sequence[str], variables: Mapping[str, str], cwd: Path, has_key: bool, seconds: int, home: Path
) -> str:
    file, log = home / ".config/mlxdist/serve.env", str(home / "Library/Logs/mlxdist-serve.log")
    if has_key:  # launchd reads no file of variables
        program = ["/bin/sh", "-c", 'set -a && . "$0" && exec "$@"', str(file), *program]
    unit: dict[str, Any] = {
        "Label": _LABEL,
        "ProgramArguments": list(program),
        "WorkingDirectory": str(cwd),
        "EnvironmentVariables": dict(variables),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ProcessType": "Interactive",  # launchd slows others down
        "ExitTimeOut": seconds,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    about = _LAUNCHD.format(path=f"~/Library/LaunchAgents/{_LABEL}.plist")
    about += _LAUNCHD_KEY if has_key else ""
    head, doctype, body = plistlib.dumps(unit).decode().partition('PropertyList-1.0.dtd">\n')
    return f"{head}{doctype}<!--\n{about}-->\n{body}"
