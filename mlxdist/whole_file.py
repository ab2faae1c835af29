"""Files that are replaced as a whole: whoever reads one meanwhile finds the old one or the new one."""

import os
import tempfile
from pathlib import Path

__all__ = ["keep_former", "write_whole"]


def write_whole(path: str | os.PathLike[str], text: str, mode: int = 0o644) -> None:
    """``mode``: of a file that is new; one that is replaced keeps its own, and a link stays one.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    mode = path.stat().st_mode & 0o777 if path.exists() else mode
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, mode)
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def keep_former(path: str | os.PathLike[str], text: str) -> str | None:
    """Before `write_whole`: a file with another text is renamed to PATH.old, which is returned."""
    path = Path(path)
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") == text:
        return None
    os.replace(path, f"{path}.old")
    return f"{path}.old"
