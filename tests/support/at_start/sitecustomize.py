"""Python runs this file when it starts, in each process that the tests start: `import transformers` takes 1.3 s less.

transformers reads the 3,300 files of its models, twice, for a list of the names in them, and mlx-lm imports it in every
rank and server. The list is the same until another version is installed. So it is kept in the build folder.

It imports what Python has loaded already: with importlib.abc, pathlib and typing each process took three times as long
to start.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # that of typing takes as long as all other imports here
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

_BUILD = os.path.abspath(__file__ + "/../../../../build")
_NAME = "transformers.utils.import_utils"


class _Finder:
    """Puts a function that keeps its results in the place of the one that reads the files."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: Any) -> None:
                execute(module)
                module.define_import_structure = _kept(module.define_import_structure, module.__file__)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _kept(define_import_structure: Any, source: str) -> Any:
    import marshal
    from pathlib import Path

    all_models = Path(source).parents[1] / "models"

    def read(module_path: str, prefix: str | None = None) -> Any:
        if Path(module_path) not in (all_models, all_models / "__init__.py"):  # one model's: a few files
            return define_import_structure(module_path, prefix)
        file = Path(_BUILD, f"transformers-{os.stat(source).st_mtime_ns:x}-{prefix}")
        try:
            return marshal.loads(file.read_bytes())
        except OSError:
            found = define_import_structure(module_path, prefix)
            own = Path(f"{file}.{os.getpid()}")
            own.write_bytes(marshal.dumps(found))
            own.replace(file)
            return found

    return read


if os.path.isdir(_BUILD):
    sys.meta_path.insert(0, _Finder())
