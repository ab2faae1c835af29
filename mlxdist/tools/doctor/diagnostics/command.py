"""Makes the report, section after section, each with a time limit. After Ctrl-C the finished sections are written."""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click
from rich.progress import Progress, TaskID

from mlxdist.base.errors import Error
from mlxdist.base.output_file import is_written

from ...bench.runner import progress_bar
from .document import Section, write_document
from .redact import Redactor
from .sections import SECTIONS, Context, Step

__all__ = ["FORM", "make_report"]

FORM = ("First contact with Macs", ".github/ISSUE_TEMPLATE/first-contact.yml")
_INTERRUPTED = 130


class _TooLong(BaseException):
    """The time limit of a section. It is no Exception, so that no handler between here and there catches it."""


def make_report(context: Context, path: Path, steps: Sequence[Step] = SECTIONS) -> int:
    """Writes the report. Returns the exit status: 0; 1 if it is not written; 130 after Ctrl-C, if sections are."""
    sections: list[Section] = []
    notes: list[str] = []
    redactor = Redactor(context.hosts)
    with progress_bar() as bars:
        task = bars.add_task("starting", total=len(steps))
        for step in steps:
            section = Section(step.name, step.title)
            sections.append(section)
            context.show = partial(_show, bars, task, step.title)
            context.show("")
            try:
                _fill(section, step, context)
            except KeyboardInterrupt:
                section.error = "stopped by Ctrl-C"
                notes.append(f"Ctrl-C stopped this report in section {step.title!r}; what follows it is missing.")
                break
            bars.advance(task)
    redactor.learn_hosts(context.own_names)
    if context.cluster is not None:
        redactor.learn_hosts(str(who.get("host", "")) for _, who in context.cluster.each("who"))
    text = write_document(sections, redactor, notes)
    if not is_written(path, text):
        return 1
    _print_summary(path, sections)
    return _INTERRUPTED if notes else 0


def _show(bars: Progress, task: TaskID, title: str, doing: str) -> None:
    bars.update(task, description=f"{title}: {doing}" if doing else title)


def _fill(section: Section, step: Step, context: Context) -> None:
    begin = time.monotonic()
    try:
        with _within(step.seconds + step.seconds_a_host * (len(context.hosts) - 1)) as seconds:
            step.fill(section, context)
    except _TooLong:
        section.error = f"{section.error} it was given up after {seconds:g} s".strip()
    except Error as error:
        section.error = f"{section.error} {error}".strip()
    except Exception:  # a defect of this code; the other sections are worth having
        section.error = f"{section.error} {traceback.format_exc()}".strip()
    finally:
        section.seconds = time.monotonic() - begin


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[float]:
    """Raises _TooLong in the main thread after ``seconds``; that thread waits for processes and responses."""

    def give_up(*_: object) -> None:
        raise _TooLong

    # Not a thread with a time limit: nothing ends a thread that waits in a system call.
    former = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield seconds
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def _print_summary(path: Path, sections: Sequence[Section]) -> None:
    incomplete = [section.title for section in sections if section.error]
    if incomplete:
        click.echo(f"incomplete or failed, which is worth reporting: {'; '.join(incomplete)}", err=True)
    click.echo(f"wrote {path}: {os.path.getsize(path) / 1000:.0f} kB, {len(sections)} sections", err=True)
    click.echo(
        "Names of hosts and users, secrets, serial numbers and hardware addresses were replaced. Look through the file "
        f"before you share it, then attach it to an issue of mlxdist by the form {FORM[0]!r} ({FORM[1]}).",
        err=True,
    )
