"""Files that are replaced as a whole: whoever reads one meanwhile finds the old one or the new one."""

import os
import tempfile
from pathlib import Path

__all__ = ["keep_former", "replace_file", "write_whole"]


def replace_file(path: Path, text: str, mode: int) -> None:
    """For a file of our own. A link in its place is replaced, and what it leads to stays as it is: in a folder where
    others may write it could be somebody else's.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, mode)
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """For a file that the user has named: a link stays one, and one that is replaced keeps its mode.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    replace_file(path, text, path.stat().st_mode & 0o777 if path.exists() else 0o644)


def keep_former(path: str | os.PathLike[str], text: str) -> str | None:
    """Before `write_whole`: a file with another text is renamed to PATH.old, which is returned."""
    path = Path(path)
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") == text:
        return None
    os.replace(path, f"{path}.old")
    return f"{path}.old"
