"""The Dockerfile, read instruction by instruction. It is not built here: tests have no Docker."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
INSTRUCTIONS = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "CMD"}


def instructions():
    """Pairs of an instruction and its words, in order; comments and line ends taken away."""
    lines = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split()[1:]) for line in joined.splitlines()]


def test_only_instructions_that_need_no_excuse():
    assert {name for name, _ in instructions()} == INSTRUCTIONS


def test_two_stages_from_one_base_that_is_pinned_to_a_patch_release():
    stages = [words for name, words in instructions() if name == "FROM"]
    base = next(words[0] for name, words in instructions() if name == "ARG" and words[0].startswith("BASE="))

    assert stages == [["${BASE}", "AS", "build"], ["${BASE}", "AS", "run"]]
    assert re.fullmatch(r"BASE=python:3\.11\.\d+-slim-\w+", base)


def test_what_runs_is_not_root_and_is_a_number():
    last_stage = instructions()[max(i for i, (name, _) in enumerate(instructions()) if name == "FROM") :]
    names = [name for name, _ in last_stage]

    assert [words for name, words in last_stage if name == "USER"] == [["1000:1000"]]
    assert not {"RUN", "COPY"} & set(names[names.index("USER") :])


def copied():
    return [words for name, words in instructions() if name == "COPY"]


def test_every_source_that_is_copied_exists_and_is_let_through():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = {word for words in copied() if not words[0].startswith("--from") for word in words[:-1]}

    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert {line[1:] for line in ignored if line.startswith("!")} == sources
    # All else stays out, tokens and data among it.
    assert next(line for line in ignored if line and line[0] not in "!#") == "*"


def test_every_package_folder_is_copied():
    pyproject = (ROOT / "pyproject.toml").read_text()
    tops = set(re.findall(r'^"ringfeed\.\w+" = "(\w+)"$', pyproject, re.MULTILINE))

    assert tops <= {word for words in copied() for word in words}


def test_packages_are_pinned_and_nothing_secret_is_in_a_layer():
    installs = [" ".join(words) for name, words in instructions() if name == "RUN" and "pip" in words]

    assert installs
    assert all("-c constraints.txt" in install for install in installs)
    assert not re.search(r"token|secret|password|credential", TEXT, re.IGNORECASE)


@pytest.mark.parametrize("variable", ["HOME", "NUMBA_CACHE_DIR", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"])
def test_a_user_without_a_right_to_write_can_compile_kernels(variable):
    environment = " ".join(word for name, words in instructions() if name == "ENV" for word in words)

    assert f"{variable}=" in environment
