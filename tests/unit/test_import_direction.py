"""sharding <- pipeline <- workers: each imports itself and those below it, and only workers knows Ray."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BELOW = {
    "sharding": {"sharding"},
    "pipeline": {"sharding", "pipeline"},
    "workers": {"sharding", "pipeline", "workers"},
}


def imported_modules(source: str, *, package: str) -> set[str]:
    """Absolute names of all that ``source`` imports, also inside functions and behind relative dots."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            modules.update(f"{base}.{alias.name}" for alias in node.names)
    return modules


def imports_by_file(layer: str) -> dict[str, set[str]]:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files, f"no files in {layer}/"
    return {
        str(file.relative_to(ROOT)): imported_modules(
            file.read_text(), package="ringfeed." + ".".join(file.relative_to(ROOT).parent.parts)
        )
        for file in files
    }


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_itself_and_the_layers_below(layer):
    wrong = {
        file: above
        for file, modules in imports_by_file(layer).items()
        if (
            above := {
                name
                for name in modules
                if name.startswith("ringfeed.") and name.split(".")[1] not in BELOW[layer]
            }
        )
    }

    assert wrong == {}


@pytest.mark.parametrize("layer", ["sharding", "pipeline"])
def test_only_workers_imports_ray(layer):
    wrong = [
        file
        for file, modules in imports_by_file(layer).items()
        if any(name.split(".")[0] == "ray" for name in modules)
    ]

    assert wrong == []


@pytest.mark.parametrize("layer", BELOW)
def test_nothing_is_imported_by_the_name_of_its_folder(layer):
    # `import pipeline` works from the checkout's root and nowhere else.
    wrong = [
        file
        for file, modules in imports_by_file(layer).items()
        if any(name.split(".")[0] in BELOW for name in modules)
    ]

    assert wrong == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    import ringfeed.workers.feed", {"ringfeed.workers.feed"}),
        ("from ringfeed import workers", {"ringfeed.workers"}),
        ("from ..workers import feed", {"ringfeed.workers.feed"}),
        ("from . import views", {"ringfeed.pipeline.views"}),
    ],
)
def test_the_reader_of_imports_sees_every_form(source, expected):
    assert imported_modules(source, package="ringfeed.pipeline") == expected
