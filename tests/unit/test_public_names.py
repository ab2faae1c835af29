"""What `import mlxdist` gives: an explicit list, complete, in MLX's spelling, and loaded only when used."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import mlx.core as mx
import pytest

import mlxdist
from mlxdist import nn

OPERATIONS = [
    "all_sum",
    "all_max",
    "all_min",
    "all_gather",
    "sum_scatter",
    "send",
    "recv",
    "recv_like",
    "init",
    "is_available",
]
PACKAGES = ["mlxdist.kv", "mlxdist.nn", "mlxdist.nn.expert_parallel", "mlxdist.serve", "mlxdist.train"]


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", mlxdist.__all__)
def test_every_name_is_there_and_documented(name):
    value = getattr(mlxdist, name)
    assert name == "__version__" or inspect.getdoc(value), f"mlxdist.{name} has no docstring"


@pytest.mark.parametrize("name", nn.__all__)
def test_every_name_of_nn_is_documented(name):
    assert inspect.getdoc(getattr(nn, name)), f"mlxdist.nn.{name} has no docstring"


def test_list_has_no_name_twice_and_hides_none():
    assert len(set(mlxdist.__all__)) == len(mlxdist.__all__)
    assert dir(mlxdist) == sorted([*mlxdist.__all__, "breakpoint", "nn", "print", "serve", "train"])
    for module in ("runtime.operations.collectives", "runtime.operations.point_to_point"):
        names = importlib.import_module(f"mlxdist.{module}").__all__
        assert set(names) <= set(mlxdist.__all__), f"public in mlxdist.{module}, but not in mlxdist"


def test_every_error_is_public():
    errors = importlib.import_module("mlxdist.base.errors")
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.Error)
    }
    assert classes <= set(mlxdist.__all__)


def test_star_import():
    """It leaves Python's own names as they are."""
    code = "from mlxdist import *; print(all_sum.__name__, init.__name__, Error.__name__, print.__module__)"
    assert run_python(code) == "all_sum init Error builtins\n"


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'mlxdist' has no attribute 'all_som'"):
        mlxdist.all_som


@pytest.mark.parametrize("module", ["mlxdist", "mlxdist.cli", "mlxdist.cli.launch", "mlxdist.runtime.rendezvous"])
def test_launcher_loads_neither_mlx_nor_numpy_nor_native_code(module):
    heavy = "{'mlx.core', 'numpy', 'cffi', '_cffi_backend', 'mlxdist._native', 'mlxdist._bridge', 'transformers'}"
    assert run_python(f"import sys, {module}; print({heavy} & set(sys.modules))") == "set()\n"


def mlx_signatures() -> dict[str, tuple[list[str], list[str]]]:
    """The arguments of mx.distributed's functions, positional and keyword-only, from the stubs of its wheel."""
    stub = next(Path(path) / "core" / "distributed.pyi" for path in importlib.import_module("mlx").__path__)
    functions = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {f.name: ([a.arg for a in f.args.args], [a.arg for a in f.args.kwonlyargs]) for f in functions}


def test_split_takes_what_that_of_mlx_takes():
    ours = inspect.signature(mlxdist.Group.split).parameters
    assert list(ours) == ["self", "color", "key"] and ours["key"].default == -1


@pytest.mark.parametrize("name", OPERATIONS)
def test_arguments_are_those_of_mlx(name):
    """What is written for mx.distributed works: the same arguments in the same places; ours come on top."""
    positional, keyword = mlx_signatures()[name]
    ours = inspect.signature(getattr(mlxdist, name)).parameters.values()
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert {p.name for p in ours if p.kind is p.KEYWORD_ONLY} >= set(keyword) - {"all_gather_factory"}
    assert callable(getattr(mx.distributed, name))


def test_public_classes_share_no_name():
    """A class that programs see is the only one of its name, also among those that they do not see."""
    modules = [mlxdist, *map(importlib.import_module, PACKAGES)]
    public = {name for module in modules for name in module.__all__ if inspect.isclass(getattr(module, name))}
    defined: dict[str, list[str]] = {}
    for path in Path(mlxdist.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name in public:
                defined.setdefault(node.name, []).append(str(path))
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


OF_MLX = {"average_gradients", "all_reduce_grads"}  # in the places that mlx.nn.average_gradients gives them


def public_callables(module: ModuleType) -> Iterator[tuple[str, Callable]]:
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        if callable(value) and name not in OF_MLX:
            yield name, value
        for method, function in vars(value).items() if inspect.isclass(value) else ():
            if not method.startswith("_") and isinstance(function, FunctionType | classmethod):
                yield f"{name}.{method}", getattr(value, method)


@pytest.mark.parametrize("package", ["mlxdist", *PACKAGES])
def test_a_group_is_given_by_keyword(package):
    positional = []
    for name, function in public_callables(importlib.import_module(package)):
        group = inspect.signature(function).parameters.get("group")
        if group is not None and group.kind is not group.KEYWORD_ONLY:
            positional.append(name)
    assert not positional


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_lie_where_a_reader_looks(package):
    """In a file of the name, or in one that a folder's ``__init__.py`` says."""
    module = importlib.import_module(package)
    for name in module.__all__:
        defined = importlib.import_module(getattr(module, name).__module__)
        file, folder = Path(defined.__file__), importlib.import_module(defined.__package__)
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        listed = f"{folder.__doc__} {module.__doc__}"
        assert file.stem == snake or re.search(rf"\b{name}\b", listed), f"{package}.{name} is in {file}"


def test_packages_load_on_first_use():
    assert run_python("import mlxdist, sys; print('mlx.core' in sys.modules, mlxdist.nn.shard_model.__name__)") == (
        "False shard_model\n"
    )
    assert run_python("import mlxdist; print(mlxdist.train.fully_shard.__name__)") == "fully_shard\n"
