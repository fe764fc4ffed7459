"""What is built and shipped is what lies in the folders."""

import importlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOPS = ("sharding", "pipeline", "workers")


def test_the_list_of_packages_is_the_folders():
    folders = {
        ".".join(["ringfeed", *file.parent.relative_to(ROOT).parts])
        for top in TOPS
        for file in (ROOT / top).rglob("*.py")
    }

    assert sorted(folders) == sorted(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_package_has_an_init_that_says_what_it_is():
    for package in PYPROJECT["tool"]["setuptools"]["packages"]:
        init = ROOT.joinpath(*package.split(".")[1:], "__init__.py")
        assert init.read_text().startswith('"""'), f"{init} has no docstring"


def test_only_the_three_tops_are_mapped_and_each_is_typed():
    mapping = PYPROJECT["tool"]["setuptools"]["package-dir"]

    assert mapping == {f"ringfeed.{top}": top for top in TOPS}
    assert all((ROOT / top / "py.typed").exists() for top in TOPS)
    assert PYPROJECT["tool"]["setuptools"]["package-data"] == {"*": ["py.typed"]}


def test_ringfeed_is_a_namespace_package():
    assert getattr(importlib.import_module("ringfeed"), "__file__", None) is None
    assert not (ROOT / "__init__.py").exists()
