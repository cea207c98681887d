"""What the README says of the code is so: every setting with its default, and where each rule of the specs lives."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import annotated_types
import pytest
from pydantic.fields import FieldInfo

from pin_pipelines.settings import ENV_PREFIX, BackfillSettings, Settings
from pin_pipelines_tests.support import PROJECT_ROOT

README = (PROJECT_ROOT / "README.md").read_text()
PACKAGE = PROJECT_ROOT / "pin_pipelines"

_VARIABLE = re.compile(rf"`({ENV_PREFIX}\w+)`")
_PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def section(heading: str) -> str:
    """The text below a heading of the second level."""
    (text,) = re.findall(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    return text


def table_rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of its tables, headings left out."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def documented_settings() -> dict[str, tuple[str, str]]:
    """Default and meaning, by variable."""
    rows: dict[str, tuple[str, str]] = {}
    for names, default, meaning in table_rows(section("Configuration")):
        for name in _VARIABLE.findall(names):
            assert name not in rows, f"{name} has two rows"
            rows[name] = (default, meaning)
    return rows


def settings() -> dict[str, FieldInfo]:
    return {f"{ENV_PREFIX}{name}".upper(): field for name, field in Settings.model_fields.items()}


def shown_default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default: Any = field.get_default(call_default_factory=True)
    if default is None:
        needed = {f"{ENV_PREFIX}{each.name}".upper() for each in dataclasses.fields(BackfillSettings)}
        return "for the backfill" if name in needed else ""
    if isinstance(default, bool):
        return f"`{default}`".lower()
    if isinstance(default, Mapping):
        return f"`{json.dumps(default, default=str)}`"
    return f"`{default}`"


def test_configuration_table_has_every_setting_and_no_other() -> None:
    assert sorted(documented_settings()) == sorted(settings())


@pytest.mark.parametrize("name", sorted(settings()))
def test_configuration_table_gives_default_and_bounds_of(name: str) -> None:
    default, meaning = documented_settings()[name]
    field = settings()[name]
    assert default == shown_default(name, field)
    lowest = [bound.ge for bound in field.metadata if isinstance(bound, annotated_types.Ge)]
    highest = [bound.le for bound in field.metadata if isinstance(bound, annotated_types.Le)]
    if lowest and highest:
        assert f"{lowest[0]} to {highest[0]}" in meaning


def places() -> list[tuple[str, str]]:
    return sorted(set(_PLACE.findall(section("Where the rules live"))))


def test_each_rule_has_a_place() -> None:
    rows = [row for row in table_rows(section("Where the rules live")) if row[0] != "section"]
    assert rows
    for row in rows:
        assert re.fullmatch(rf"{_PLACE.pattern}(, {_PLACE.pattern})*", row[-1]), row


@pytest.mark.parametrize(("file", "name"), places())
def test_place_of_a_rule_exists(file: str, name: str) -> None:
    node: ast.AST = ast.parse((PACKAGE / file).read_text())
    for part in name.split("."):
        node = find(node, part, PACKAGE / file)


def find(scope: ast.AST, name: str, file: Path) -> ast.AST:
    """What a module or class defines under a name."""
    for node in getattr(scope, "body", ()):
        match node:
            case ast.FunctionDef() | ast.ClassDef() if node.name == name:
                return node
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                return node
            case _:
                continue
    raise AssertionError(f"{file} defines no {name}")


def test_links_within_the_readme_lead_somewhere() -> None:
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors
