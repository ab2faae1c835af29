"""No module imports itself by way of others: not inside functions either, nor by a name in a string."""

import ast
import functools
import graphlib
from pathlib import Path

import mlxdist

ROOT = Path(mlxdist.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in ROOT.rglob("*.py")}


def imported(tree: ast.Module, package: str) -> set[str]:
    """All that a module names: in imports anywhere, and in strings such as "mlxdist.cli.launch:launch"."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("mlxdist."):
            names.add(node.value.split(":")[0])
    return names


def module_of(name: str) -> str:
    """The module that a dotted name is in, "" for another package's."""
    while name and name not in SOURCES:
        name = name.rpartition(".")[0]
    return name


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(module: str) -> set[str]:
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = {module_of(name) for name in imported(tree_of(path), package)}
    # The public names of mlxdist load on first use, by design, from anywhere below.
    return found - {"", module, "mlxdist"}


def test_imports_are_found():
    """The reader itself: a lazy import, a relative one, and one by name."""
    tree = ast.parse("def f():\n    from ..base import errors\nimport os\nX = 'mlxdist.cli.launch:launch'")
    assert imported(tree, "mlxdist.cli") == {"mlxdist.base.errors", "os", "mlxdist.cli.launch"}
    assert "mlxdist.runtime.group.group" in imports_of("mlxdist.runtime.operations.collectives")


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: imports_of(module) for module in SOURCES}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names one


def test_one_file_changes_the_class_of_a_module():
    found = {
        module
        for module, path in SOURCES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    }
    assert found == {"mlxdist.nn.interception"}
