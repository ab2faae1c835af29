"""docs/api.md and docs/api-nn.md: current, complete, and written from docstrings that say what a user needs."""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import api_reference
import pytest

import mlxdist
from mlxdist import nn
from mlxdist.base import errors

# Arguments that a module describes for all of its functions.
OF_MODULES = dict.fromkeys(
    ("mlxdist.runtime.ops", "mlxdist.runtime.point_to_point"),
    {"group", "stream", "out", "dtype", "async_op", "timeout"},
) | {"mlxdist.nn.mappings": {"group"}}
NAMES = [(package, name) for package in (mlxdist, nn) for name in package.__all__ if name != "__version__"]


@pytest.mark.parametrize("page", api_reference.PAGES)
def test_the_page_is_what_the_docstrings_say(page):
    written = (api_reference.DOCS / page).read_text()
    assert written == api_reference.write(page), f"{page} is not current: python tests/api_reference.py"


def test_every_public_name_is_there_once():
    pages = "".join((api_reference.DOCS / page).read_text() for page in api_reference.PAGES)
    assert sorted(re.findall(r"^### (\w+)$", pages, re.MULTILINE)) == sorted(name for _, name in NAMES)


def callables(value: Any) -> Iterator[tuple[Any, str]]:
    """The functions of a public name, each with what is written for it: its own docstring, and that of the class where
    it is another way to make one."""
    if not inspect.isclass(value):
        yield value, inspect.getdoc(value)
        return
    of_class = class_text(value)
    if api_reference.is_made_by_users(value):
        yield value.__init__, of_class
    for name, member in api_reference.members(value):
        yield member, f"{member.__doc__}\n{of_class if name.startswith('from_') else ''}"


def class_text(value: type) -> str:
    """Of a quantized layer also what is written of the plain one."""
    plain = getattr(nn, value.__name__.removeprefix("Quantized"), value)
    return f"{inspect.getdoc(value)}\n{inspect.getdoc(plain)}"


def around(value: Any) -> str:
    """What else is written for all of a class or a module: there, and in the modules that these refer to."""
    module = sys.modules[value.__module__]
    text = f"{module.__doc__}\n{class_text(value) if inspect.isclass(value) else ''}"
    for reference in re.findall(r":mod:`(mlxdist\.\w+)`", module.__doc__):
        text += importlib.import_module(reference).__doc__
    return text


@pytest.mark.parametrize("package, name", NAMES)
def test_every_method_and_property_is_documented(package, name):
    value = getattr(package, name)
    members = api_reference.members(value) if inspect.isclass(value) else []
    assert not [member for member, of in members if not of.__doc__]


@pytest.mark.parametrize("package, name", NAMES)
def test_every_argument_and_every_error_is_named(package, name):
    value = getattr(package, name)
    elsewhere = {"self", "cls"} | OF_MODULES.get(value.__module__, set())
    for member, text in callables(value):
        function = api_reference.function_of(member)
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
        function = api_reference.function_of(member)
        text = doc + around(value)
        if re.search(r"\bmx\.array|\bArray\b", api_reference.signature(member, name)):
            assert re.search(r"shape|\((\.\.\.|\w+), ", text), f"{function.__qualname__}: no shape"
            assert re.search(r"(?i)dtype|float|\bintegers|\buint", text), f"{function.__qualname__}: no dtype"
