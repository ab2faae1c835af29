"""docs/reference: every public name once, with a docstring that says what a user needs."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlxdist
from mlxdist import debug, kv, lm, nn, serve, train
from mlxdist.base import errors
from mlxdist.base.opaque import Opaque
from mlxdist.nn import expert_parallel

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PACKAGES = [mlxdist, nn, expert_parallel, train, serve, debug, kv, lm]
# What a page says of a name: `::: mlxdist.nn.Plan`, and perhaps which of its members are internal.
ENTRIES = {
    name: options
    for page in REFERENCE.glob("*.md")
    for name, options in re.findall(r"^::: (mlxdist\S*)\n(?:    options: (.*)\n)?", page.read_text(), re.MULTILINE)
}
# Arguments that a module describes for all of its functions.
OF_MODULES = dict.fromkeys(
    ("mlxdist.runtime.operations.collectives", "mlxdist.runtime.operations.point_to_point"),
    {"group", "stream", "out", "dtype", "async_op", "timeout"},
) | {"mlxdist.nn.mappings": {"group"}}
PUBLIC = {package: [*package.__all__] for package in PACKAGES}
PUBLIC[mlxdist] += ["breakpoint", "print"]  # which `from mlxdist import *` leaves out
ALL_NAMES = [(package, name) for package in PACKAGES for name in PUBLIC[package] if name != "__version__"]
NAMES = [(package, name) for package, name in ALL_NAMES if package is not train]


def find(path: str) -> Any:
    package, _, name = path.rpartition(".")
    return getattr(importlib.import_module(package), name)


def test_every_public_name_has_one_entry():
    public = {id(getattr(package, name)) for package, name in ALL_NAMES}
    entries = [id(find(path)) for path, options in ENTRIES.items() if "{members: false" not in options]
    assert len(entries) == len(set(entries)) and set(entries) == public


def test_no_entry_is_a_module_of_the_same_name():
    """The site takes one for the other: expert_parallel.dispatch.dispatch is the function."""
    for path in (path for path, options in ENTRIES.items() if "{members: false" not in options):
        module = Path(mlxdist.__file__).parents[1] / path.replace(".", "/")
        assert not module.is_dir() and not module.with_suffix(".py").exists(), path


def test_the_pages_hide_only_methods_that_exist():
    for path, options in ENTRIES.items():
        assert all(hasattr(find(path), name) for name in hidden(options)), path


def hidden(options: str) -> set[str]:
    filtered = re.search(r"'!\^\((.*?)\)\$'", options)
    return set(filtered[1].split("|")) if filtered else set()


def members(kind: type) -> list[tuple[str, Any]]:
    """The methods and properties that the pages show; not those of a base that is public itself."""
    public = {id(getattr(package, name)) for package in PACKAGES for name in package.__all__} - {id(kind)}
    own = [base for base in kind.__mro__ if base.__module__.startswith("mlxdist.")]
    left_out = {name for base in own if id(base) in public for name in vars(base)} - set(vars(kind))
    left_out = left_out.union(*(hidden(options) for path, options in ENTRIES.items() if find(path) in own))
    found = {name: value for base in reversed(own) for name, value in vars(base).items()}
    return [
        (name, value)
        for name, value in found.items()
        if (name == "__call__" and value.__doc__) or not name.startswith("_")
        if isinstance(value, (property, functools.cached_property, classmethod)) or inspect.isfunction(value)
        if name not in left_out
    ]


def function_of(member: Any) -> Any:
    """The function below a property, a class method or a context manager."""
    inner = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    return inspect.unwrap(inner)


def is_made_by_users(kind: type) -> bool:
    """Whether a class is called, and is not an error or what a function returns."""
    return not (issubclass(kind, Exception | tuple) or dataclasses.is_dataclass(kind) or isinstance(kind, Opaque))


def callables(value: Any) -> Iterator[tuple[Any, str]]:
    """The functions of a public name, each with what is written for it: its own docstring, and that of the class where
    it is another way to make one."""
    if not inspect.isclass(value):
        yield value, inspect.getdoc(value)
        return
    of_class = class_text(value)
    if is_made_by_users(value):
        yield value.__init__, of_class
    for name, member in members(value):
        yield member, f"{member.__doc__}\n{of_class if name.startswith('from_') else ''}"


def class_text(value: type) -> str:
    """Of a quantized layer also what is written of the plain one."""
    plain = getattr(nn, value.__name__.removeprefix("Quantized"), value)
    return f"{inspect.getdoc(value)}\n{inspect.getdoc(plain)}"


def around(value: Any) -> str:
    """What else is written for all of a class or a module: there, and in the modules that these refer to."""
    module = sys.modules[value.__module__]
    text = f"{module.__doc__}\n{class_text(value) if inspect.isclass(value) else ''}"
    for reference in re.findall(r":mod:`(mlxdist[.\w]+)`", module.__doc__):
        text += importlib.import_module(reference).__doc__
    return text


@pytest.mark.parametrize("package, name", ALL_NAMES)
def test_every_method_and_property_is_documented(package, name):
    value = getattr(package, name)
    assert inspect.getdoc(value)
    assert not [member for member, of in (members(value) if inspect.isclass(value) else []) if not of.__doc__]


@pytest.mark.parametrize("package, name", NAMES)
def test_every_argument_and_every_error_is_named(package, name):
    value = getattr(package, name)
    elsewhere = {"self", "cls"} | OF_MODULES.get(value.__module__, set())
    for member, text in callables(value):
        function = function_of(member)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in elsewhere and parameter.kind not in (2, 4):  # not *args and **kwargs
                assert re.search(rf"\b{parameter.name}\b", text), f"{function.__qualname__}: {parameter.name}"
        for raised in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(raised, ast.Raise) and isinstance(raised.exc, ast.Call):
                error = ast.unparse(raised.exc.func).split(".")[-1]
                assert error not in errors.__all__ or error in text, f"{function.__qualname__} raises {error}"


@pytest.mark.parametrize("package, name", NAMES)
def test_arrays_have_shapes_and_dtypes(package, name):
    value = getattr(package, name)
    for member, doc in callables(value):
        function = function_of(member)
        text = doc + around(value)
        source = textwrap.dedent(inspect.getsource(function))
        body = ast.parse(source).body[0].body[0]
        signature = "".join(source.splitlines(keepends=True)[: body.lineno - 1])
        if re.search(r"\bmx\.array|\bArray\b", signature):
            assert re.search(r"shape|\((\.\.\.|\w+), ", text), f"{function.__qualname__}: no shape"
            assert re.search(r"(?i)dtype|float|\bintegers|\buint", text), f"{function.__qualname__}: no dtype"
