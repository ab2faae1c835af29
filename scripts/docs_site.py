"""Hooks of MkDocs and an extension of Griffe, which reads the docstrings; mkdocs.yml names both.

The site has pages for README.md, CONTRIBUTING.md and CHANGELOG.md, and links to other files of the repository lead to
`repo_url`. A link to a file that does not exist stays as it is, and the strict build fails on it.
"""

import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import mlxdist
from mlxdist import lm, nn, train
from mlxdist.base.environment import VARIABLES
from mlxdist.nn import expert_parallel

PACKAGES = [mlxdist, nn, expert_parallel, train, lm]
ROOT = Path(__file__).parents[1]
# Pages of the site that are files of the repository outside docs/.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
VARIABLE_TABLE = "<!-- the table of variables -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    outside = {page: source for source, page in PAGES.items()}
    source = outside.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_site(link: re.Match) -> str:
        path, anchor = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2])), link[3] or ""
        target = PAGES.get(path) or path.removeprefix("docs/")
        if path in PAGES or path.startswith("docs/"):
            return f"{link[1]}{posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')}{anchor}{link[4]}"
        if (ROOT / path).exists():
            return f"{link[1]}{config.repo_url}/blob/main/{path}{anchor}{link[4]}"
        return link[0]

    if page.file.src_uri == "environment.md":
        before, after = markdown.split(VARIABLE_TABLE)
        rows = [f"| `{variable.name}` | {variable.meaning} | {variable.default} |" for variable in VARIABLES]
        markdown = "\n".join([before + "| variable | meaning | default |", "|---|---|---|", *rows]) + after
    return re.sub(r'(\]\(|src="|srcset="|href=")([\w./-]+)(#[\w-]+)?([)"])', on_site, markdown)


class PublicNames(griffe.Extension):
    """Leads public names to where they are defined, and makes Sphinx roles of docstrings into links.

    Griffe reads the source only: it does not see names that load on first use, and takes a module for the function of
    the same name in it.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.path != "mlxdist":
            return
        for package in PACKAGES:
            found = pkg[package.__name__.removeprefix("mlxdist.")] if package is not mlxdist else pkg
            modules = {name for name, member in found.members.items() if not member.is_alias and member.is_module}
            for name in set(package.__all__) - {"__version__"} - modules:
                module = getattr(package, name).__module__
                if module == "mlxdist":  # as tracebacks show an error
                    module = f"mlxdist.{mlxdist._MODULE_OF[name]}"
                if module != package.__name__:
                    found.set_member(name, griffe.Alias(name, f"{module}.{name}", parent=found))

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if "_made_by" in cls.members:
            cls.members.pop("__init__", None)  # an Opaque class

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            nearest = sorted(PACKAGES, key=lambda package: -len(posixpath.commonprefix([package.__name__, obj.path])))
            text = obj.docstring.value.replace("``", "`")
            obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", lambda role: _link(role[1], nearest), text)


def _link(role: str, packages: list[Any]) -> str:
    """A link where the name is public, written as users import it, by itself, or where it is defined."""
    for package in packages:
        for name in package.__all__:
            value = getattr(package, name)
            path = f"{getattr(value, '__module__', '')}.{name}"
            for start in (path, f"{package.__name__}.{name}", name):
                if f"{role}.".startswith(f"{start}."):
                    member = role.removeprefix(start) if inspect.isclass(value) else ""
                    return f"[`{role}`][{path}{member}]"
    return f"`{role}`"
