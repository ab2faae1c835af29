"""The issue forms: what GitHub's schema for them demands, which nothing says until a volunteer opens one."""

import re
from pathlib import Path

import pytest
import yaml

from mlxdist.tools.doctor.diagnostics.command import FORM

DIRECTORY = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE"
FORMS = [path for path in sorted(DIRECTORY.glob("*.yml")) if path.name != "config.yml"]
TOP = {"name", "description", "body", "title", "labels", "assignees", "projects", "type"}
ELEMENT = {"type", "id", "attributes", "validations"}
# Of each type: the attributes that it must have, and those that it may have.
ATTRIBUTES = {
    "markdown": ({"value"}, set()),
    "textarea": ({"label"}, {"description", "placeholder", "value", "render"}),
    "input": ({"label"}, {"description", "placeholder", "value"}),
    "dropdown": ({"label", "options"}, {"description", "multiple", "default"}),
    "checkboxes": ({"label", "options"}, {"description"}),
    "upload": ({"label"}, {"description"}),
}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_form(path):
    form = yaml.safe_load(path.read_text())
    assert form.keys() <= TOP and all(isinstance(form[key], str) and form[key] for key in ("name", "description"))
    body = form["body"]
    assert any(element["type"] != "markdown" for element in body)
    ids = [element["id"] for element in body if "id" in element]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in ids)
    labels = [element["attributes"]["label"] for element in body if element["type"] != "markdown"]
    assert len(labels) == len(set(labels))
    for element in body:
        assert element.keys() <= ELEMENT and ("id" not in element or element["type"] != "markdown")
        demanded, allowed = ATTRIBUTES[element["type"]]
        attributes = element["attributes"]
        assert demanded <= attributes.keys() <= demanded | allowed, element
        assert element.get("validations", {}).keys() <= {"required"}
        check_options(element["type"], attributes.get("options"))


def check_options(kind: str, options: list | None) -> None:
    if kind == "dropdown":  # "yes" without quotes is a boolean
        assert options and all(isinstance(option, str) for option in options) and len(set(options)) == len(options)
    if kind == "checkboxes":
        assert options and all({"label"} <= option.keys() <= {"label", "required"} for option in options)


def test_chooser():
    assert yaml.safe_load((DIRECTORY / "config.yml").read_text()).keys() <= {"blank_issues_enabled", "contact_links"}


def test_what_the_command_and_the_page_name_is_there():
    name, path = FORM
    assert yaml.safe_load((DIRECTORY.parent.parent / path).read_text())["name"] == name
    page = (DIRECTORY.parent.parent / "docs" / "first-contact.md").read_text()
    assert name in page and path in page
    steps = re.findall(r"^## (\d\. [^(\n]*?)(?: \(.*)?$", page, re.MULTILINE)
    form = yaml.safe_load((DIRECTORY.parent.parent / path).read_text())
    (options,) = [e["attributes"]["options"] for e in form["body"] if e.get("id") == "step"]
    for shown, step in zip(options[1:], steps):
        assert shown.startswith(step), (shown, step)
