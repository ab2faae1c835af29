"""Chromium for the tests of the page: Debian's, or the one that Playwright has downloaded."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Visit", "chromium", "visit"]


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser. The test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser is driven by playwright")
    with playwright.sync_playwright() as started:
        own = started.chromium.executable_path
        path = shutil.which("chromium") or (own if Path(own).exists() else None)
        if path is None:
            pytest.skip("there is no chromium: apt-get install chromium, or playwright install chromium")
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A visit of the page, in a context of its own.

    Attributes:
        page: Playwright's.
        problems: errors of the console, exceptions, violations of its policy, dialogs, and requests to other places.
    """

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.address = address
        self.context = browser.new_context(**{"viewport": {"width": 1100, "height": 760}} | options)
        self.problems: list[str] = []
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        self.page.on("dialog", self._dialog)
        self.context.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.accept()

    def _request(self, request: Any) -> None:
        if not request.url.startswith(self.address + "/"):
            self.problems.append(f"request: {request.url}")

    def open(self, path: str = "/") -> "Visit":
        self.page.goto(self.address + path)
        self.page.wait_for_selector("#state:not([data-state='waiting']), dialog[open]")
        return self

    def say(self, text: str) -> None:
        """Sends a message by the keyboard."""
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def answer(self) -> str:
        """The text of the last answer, once it is complete."""
        self.page.wait_for_selector("#send:not([hidden])", state="visible")
        return self.page.inner_text("#messages > .assistant:last-child .content")

    def messages(self) -> list[str]:
        return self.page.locator("#messages > li .content").all_inner_texts()

    def states(self) -> list[str]:
        """The words that are at the ranks."""
        return self.page.locator("#ranks .badge").all_inner_texts()


@contextlib.contextmanager
def visit(browser: Any, address: str, **options: Any) -> Iterator[Visit]:
    """A visit, which has no problem."""
    visited = Visit(browser, address, **options)
    try:
        yield visited
        assert visited.problems == []
    finally:
        visited.context.close()
