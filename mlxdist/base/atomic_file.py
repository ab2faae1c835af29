"""Files that are replaced atomically: readers see either the old or the new content."""

import os
from pathlib import Path

__all__ = ["atomic_write", "back_up", "replace_file"]


def replace_file(path: Path, content: str | bytes | memoryview, mode: int) -> None:
    """Replaces a file of mlxdist's own. A symbolic link in its place is replaced, and its target stays as it is: in a
    directory where other users may write, the target could be another user's file.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    # Not by tempfile, whose import a start of the launcher would notice.
    # Mode 0600 until fchmod: another user must not open the file before it has the mode of the one that it replaces.
    temporary = path.with_name(f".{path.name}-{os.urandom(8).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def atomic_write(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file that the user has named. A symbolic link stays one, and a file that is replaced keeps its mode.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    replace_file(path, text, path.stat().st_mode & 0o777 if path.exists() else 0o644)


def back_up(path: str | os.PathLike[str], text: str) -> str | None:
    """Renames a file with another text to PATH.old, before `atomic_write`. Returns that path; None without one."""
    path = Path(path)
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") == text:
        return None
    os.replace(path, f"{path}.old")
    return f"{path}.old"
