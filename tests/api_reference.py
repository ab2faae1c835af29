"""Writes docs/api.md and docs/api-nn.md: the public names, with the docstrings that they have in the source.

Run `python tests/api_reference.py` when a public name or docstring has changed; tests/test_api_reference.py compares.
Signatures are those of the source: what `inspect` shows of a type depends on the version of Python. pdoc and
mkdocstrings make a site of HTML, with a dozen packages; this makes pages like the others, of which a diff can be read.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlxdist
import mlxdist.nn

DOCS = Path(__file__).parents[1] / "docs"
# Page: the package, and under each heading the modules whose public names are there.
PAGES = {
    "api.md": (
        mlxdist,
        {
            "Groups": ["group"],
            "Collectives": ["ops"],
            "Messages between two ranks": ["point_to_point"],
            "Handles and registered memory": ["handle", "registration"],
            "Training": ["train.data_parallel", "train.checkpoint", "step"],
            "Errors": ["errors"],
        },
    ),
    "api-nn.md": (
        mlxdist.nn,
        {
            "Whole models": ["plan.plan", "plan.parameters", "plan.shard_model", "loading.load_sharded", "verify"],
            "Linear layers": ["column_parallel", "row_parallel", "lora"],
            "Attention and MLPs": ["parallel_attention", "parallel_mlp"],
            "Vocabulary, sampling and the loss": ["vocab_parallel", "sampling"],
            "Experts": ["experts.switch"],
            "Compiled decoder layers": ["split.split_block", "split.split_model", "split.submissions"],
            "Borders of parallel regions": ["mappings"],
        },
    ),
}
HEAD = """# `{package}`: reference

<!-- Written by tests/api_reference.py from the docstrings. -->

{about}

"""
ABOUT = {
    "api.md": """What `import mlxdist` gives. Layers and whole models are in [mlxdist.nn](api-nn.md), what to do about
an error in [errors.md](errors.md).""",
    "api-nn.md": """What `from mlxdist import nn` gives: layers, and whole models, of which every rank holds a part.
Groups, collectives and training are in [mlxdist](api.md). [tensor-parallel.md](tensor-parallel.md),
[expert-parallel.md](expert-parallel.md) and [split-block.md](split-block.md) explain how to use these.""",
}
# For the other modules of mlxdist, not for its users.
INTERNAL = {
    "Group": {"add_door", "call", "connection", "is_idle", "shut", "start"},
    "CutLinear": {"adapter", "adapter_part", "join_adapter", "part_of_inputs", "to_lora"}
    | {"enter", "leave", "product", "with_weight"},
    "SplitBlock": {"positions", "reserve", "segments", "table", "without_sums"},
}
_SECTION = re.compile(r"(Args|Attributes|Arguments of every operation|Returns|Raises(?:, all of them)?):$")


def write(page: str) -> str:
    """The text of a page."""
    package, subjects = PAGES[page]
    parts = [HEAD.format(package=package.__name__, about=ABOUT[page])]
    sections = {heading: list(_names(package, modules)) for heading, modules in subjects.items()}
    for heading, found in sections.items():
        links = [f"[{name}](#{name.lower()}{'-1' if name == 'submissions' else ''})" for _, name in found]
        parts.append(f"- {heading}: {', '.join(links)}\n")
    for heading, found in sections.items():
        modules = [module for module, _ in found]
        several = dict.fromkeys(module for module in modules if modules.count(module) > 1)
        parts += [f"\n## {heading}\n", *(f"\n{to_markdown(inspect.getdoc(module))}" for module in several)]
        parts += [_entry(name, getattr(package, name)) for _, name in found]
    return "".join(parts)


def _names(package: Any, modules: list[str]) -> Iterator[tuple[Any, str]]:
    for path in modules:
        module = importlib.import_module(f"{package.__name__}.{path}")
        for name in sorted(package.__all__, key=str.lower):
            if getattr(getattr(package, name), "__module__", None) == module.__name__:
                yield module, name


def _entry(name: str, value: Any) -> str:
    text = f"\n### {name}\n\n"
    if not inspect.isclass(value):
        return text + _fence(signature(value, name)) + to_markdown(inspect.getdoc(value))
    if issubclass(value, Exception):
        text += _fence(f"class {name}({', '.join(base.__name__ for base in value.__bases__)})")
    elif is_made_by_users(value):
        text += _fence(signature(value.__init__, name))
    text += to_markdown(inspect.getdoc(value))
    for member, of in members(value):
        text += f"\n{_fence(signature(of, f'{name}.{member}'))}{to_markdown(inspect.cleandoc(of.__doc__))}"
    return text


def is_made_by_users(kind: type) -> bool:
    """Whether a class is called, and is not an error or what a function returns."""
    made = re.search(r"(?i)made by|^what :meth:", inspect.getdoc(kind))
    return not (issubclass(kind, Exception) or dataclasses.is_dataclass(kind) or made)


def members(kind: type) -> list[tuple[str, Any]]:
    """Public methods and properties of mlxdist's own; not those of a base that is public itself."""
    public = {id(getattr(package, name)) for package, _ in PAGES.values() for name in package.__all__} - {id(kind)}
    own = [base for base in kind.__mro__ if base.__module__.startswith("mlxdist.")]
    hidden = {name for base in own if id(base) in public for name in vars(base)} - set(vars(kind))
    hidden = hidden.union(*(INTERNAL.get(base.__name__, ()) for base in own))
    found = {name: value for base in reversed(own) for name, value in vars(base).items()}
    return [
        (name, value)
        for name, value in found.items()
        if (name == "__call__" and value.__doc__) or not name.startswith("_")
        if isinstance(value, (property, functools.cached_property, classmethod)) or inspect.isfunction(value)
        if name not in hidden
    ]


def function_of(member: Any) -> Any:
    """The function below a property, a class method or a context manager."""
    inner = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    return inspect.unwrap(inner)


def signature(member: Any, name: str) -> str:
    """As the source has it, in one line."""
    source = textwrap.dedent(inspect.getsource(function_of(member)))
    function = ast.parse(source).body[0]
    head = " ".join(line.strip() for line in source.splitlines()[function.lineno - 1 : function.body[0].lineno - 1])
    head = re.sub(r"(-> |: )[\"']([^\"']+)[\"']", r"\1\2", head.removesuffix(":"))
    head = re.sub(r"\((self|cls)(, )?", "(", head.replace("( ", "(")).replace(", )", ")")
    arguments = head[head.index("(") :]
    if not isinstance(member, (property, functools.cached_property)):
        return f"{name}{arguments.removesuffix(' -> None')}"
    return f"{name}: {arguments.removeprefix('() -> ')}"


def _fence(text: str) -> str:
    """Broken between two arguments."""
    whole = text.replace(" ", "\0").replace(",\0", ", ")
    lines = textwrap.fill(whole, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return f"```python\n{lines.replace(chr(0), ' ')}\n```\n\n"


def to_markdown(text: str) -> str:
    """A docstring: sections become lists, what is indented stays code."""
    blocks = []
    for block in text.strip().split("\n\n"):
        first, *rest = block.splitlines()
        if section := _SECTION.match(first):
            indented = [line for line in rest if line.startswith(" ")]
            plain = "".join(f"\n\n{line}" for line in rest if not line.startswith(" "))
            block = f"**{section[1]}**\n\n{_list(indented, section[1])}{plain}"
        blocks.append(block if first.startswith("    ") else _inline(block))
    return "\n\n".join(blocks) + "\n"


def _list(lines: list[str], section: str) -> str:
    """One entry for each name; the lines that belong to it are indented further."""
    if section == "Returns":
        return "\n".join(line.strip() for line in lines)
    entries: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        if line.startswith(" "):
            entries[-1] += f"\n  {line.strip()}"
        else:
            names = re.match(r"(\w+(?:, \w+)*): ", line)
            marked = "".join((", ".join(f"`{name}`" for name in names[1].split(", ")), ": ")) if names else ""
            entries.append(f"- {marked}{line[names.end() if names else 0 :]}")
    return "\n".join(entries)


def _inline(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text.replace("``", "`"))
    return re.sub(r"::$", ":", text)


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(write(page))
