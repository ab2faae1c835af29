"""The command `mlxdist`. Each subcommand is a module, imported when it is used: `mlxdist launch` must start fast."""

import gc

COLLECTS_GARBAGE = gc.isenabled()
gc.disable()  # imports leave no garbage, and to look for it takes a tenth of their time

import errno
import importlib
import io
import os
import sys
from typing import Any

import click

from mlxdist.base.environment import VARIABLES, Environment
from mlxdist.base.errors import EnvironmentVariableError, InvalidArgument, Mismatch, ResourceError
from mlxdist.base.validation import nearest
from mlxdist.version import __version__

if COLLECTS_GARBAGE:
    gc.enable()

__all__ = ["main"]

COMMANDS = {
    "bench": "mlxdist.tools.bench:bench",
    "calibrate": "mlxdist.cli.calibrate:calibrate",
    "chat": "mlxdist.cli.chat:chat",
    "checkpoint": "mlxdist.cli.checkpoint:checkpoint",
    "config": "mlxdist.cli.config:config",
    "devices": "mlxdist.cli.devices:devices",
    "doctor": "mlxdist.cli.doctor:doctor",
    "dump": "mlxdist.cli.dump:dump",
    "env": "mlxdist.cli:show_environment",
    "hostfile": "mlxdist.cli.hostfile:hostfile",
    "launch": "mlxdist.cli.launch:launch",
    "logs": "mlxdist.cli.logs:logs",
    "models": "mlxdist.cli.models:models",
    "ps": "mlxdist.cli.ps:ps",
    "pull": "mlxdist.cli.pull:pull",
    "record": "mlxdist.cli.record:record",
    "rpc-server": "mlxdist.cli.rpc_server:rpc_server",
    "serve": "mlxdist.cli.serve:serve",
    "shard": "mlxdist.cli.shard:shard",
    "stop": "mlxdist.cli.stop:stop",
    "tiny-model": "mlxdist.cli.tiny_model:tiny_model",
    "top": "mlxdist.cli.top:top",
    "train": "mlxdist.cli.train:train",
    "watch": "mlxdist.cli.watch:watch",
}


class Commands(click.Group):
    """Finds subcommands in the table above. Their modules must be cheap to import: --help imports all."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name].split(":")
        # The launcher starts faster: a collection during an import finds no garbage, only modules that stay.
        collects_garbage = gc.isenabled()
        gc.disable()
        try:
            return getattr(importlib.import_module(module), attribute)
        finally:
            if collects_garbage:
                gc.enable()

    def resolve_command(self, context: click.Context, args: list[str]) -> tuple:
        if args[0] not in COMMANDS:
            # click suggests only commands that it holds itself.
            if close := nearest(args[0], COMMANDS):
                context.fail(f"No such command {args[0]!r}. Did you mean {close!r}?")
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> Any:
        """Ends every command with status 2 for a wrong option, file or variable, and with 1 if a host fails."""
        try:
            return super().invoke(context)
        except (InvalidArgument, EnvironmentVariableError, Mismatch) as error:
            raise click.UsageError(str(error)) from None
        except (ResourceError, OSError) as error:
            if isinstance(error, BrokenPipeError):  # the reader of the output has gone: click's part
                raise
            raise click.ClickException(str(error)) from None


@click.group(cls=Commands)
@click.version_option(__version__, message="mlxdist %(version)s")
def commands() -> None:
    """The distributed runtime for MLX."""


@click.command("env")
def show_environment() -> None:
    """Show the MLXDIST_* variables: meaning, default, and what is set here."""
    for variable in VARIABLES:
        value = os.environ.get(variable.name)
        shown = "not set" if value is None else "set" if variable.is_secret else repr(value)
        click.echo(f"{variable.name}: {shown}")
        click.echo(f"    {variable.meaning} (default: {variable.default})")
    Environment.read()


class _StandardOutput(io.FileIO):
    """Standard output. A write that fails ends every command with the same error, and no command handles it itself."""

    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno == errno.EPIPE:  # its reader has gone: click's part
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # what is left is not tried again
            raise click.ClickException(f"the standard output cannot be written: {error.strerror}") from None


def main() -> None:
    if sys.stdout is not None:  # closed
        written = io.BufferedWriter(_StandardOutput(sys.stdout.fileno(), "w", closefd=False))
        like = {name: getattr(sys.stdout, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        sys.stdout = io.TextIOWrapper(written, **like)
    commands(prog_name="mlxdist")
