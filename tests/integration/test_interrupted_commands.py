"""``ingest``, ``plan``, ``shard`` stopped by kill -9 or a full disk: run again, they give the same bytes.

The commands are real. Each case runs in a forked child, so that nothing is imported twice; ``shard``
writes in its own process: a killed driver with a real Ray is in tests/ray/test_shard_job.py.
"""

import json
import subprocess
import sys

import pytest

HARNESS = """
import json, os, resource, signal, sys
from pathlib import Path
from ringfeed.workers import shard_job
from ringfeed.workers.cli import main
# What the children would import one by one.
from ringfeed.pipeline import commands, config, config_file, ingest, verify
from ringfeed.pipeline.planner import run

shard_job._FOLDER_BYTES = (1 << 13, 1 << 32)
mode, output, value, *command = sys.argv[1:]

def run_here(job, journal, *, workers, progress):
    for index in job.missing:
        journal.adopt(shard_job.write_folder(job.task, index))

shard_job._run_on_ray = run_here

def in_child(target, prepare=None):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(write, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if prepare:
            prepare()
        os._exit(main([*command, "-o", str(target)]))
    os.close(write)
    told = os.fdopen(read).read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told

def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}

def die_at(number, target):
    count = 0
    def hook(event, arguments):
        nonlocal count
        watched = event in ("open", "os.rename", "os.mkdir", "os.remove")
        if watched and str(arguments[0]).startswith(str(target)):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(value), int(value)))

whole = Path(output).with_name("whole")
assert in_child(whole)[0] == 0
expected, facts = files_of(whole), []
if mode == "kill":
    for number in range(1, 10_000, int(value)):
        target = Path(output).with_name(f"killed-{number}")
        if in_child(target, lambda: die_at(number, target))[0] == 0:
            break
        assert not target.exists() or (target / "manifest.json").exists(), number
        assert in_child(target)[0] == 0, number
        assert files_of(target) == expected, number
        facts.append(number)
else:
    code, told = in_child(output, limit_files)
    opened = main(["verify", str(output)])
    leftovers = [str(p) for p in Path(output).parent.rglob(".*.tmp")]
    again, _ = in_child(output)
    facts = [code, told.splitlines()[-1], opened, leftovers, again, files_of(output) == expected]
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What each command reads, made by the command before it."""
    root = tmp_path_factory.mktemp("inputs")
    (root / "text").mkdir()
    for i in range(60):
        (root / "text" / f"{i:02d}.txt").write_text(f"{i} " * (1 + i * i % 97))
    script = "from ringfeed.workers.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    for command in (
        ["ingest", "text", "-o", "corpus"],
        ["plan", "corpus", "-o", "plan", *PLAN],
    ):
        subprocess.run([sys.executable, "-c", script, *command], cwd=root, check=True, capture_output=True)
    return root


PLAN = [
    "--pack-tokens",
    "96",
    "--packs-per-step",
    "4",
    "--max-cp",
    "2",
    "--seed",
    "1",
    "--overflow",
    "truncate",
]
COMMANDS = {
    "ingest": ["ingest", "text", "--name", "c"],
    "plan": ["plan", "corpus", *PLAN],
    "shard": ["shard", "plan", "--cp", "2", "--layout", "te"],
}


def run_harness(inputs, mode, output, value, command):
    arguments = [mode, str(output), str(value), *COMMANDS[command]]
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, *arguments], cwd=inputs, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# How many file operations from one kill to the next; a step of 1 passes as well, and takes longer.
@pytest.mark.parametrize(("command", "step", "least"), [("ingest", 5, 4), ("plan", 4, 4), ("shard", 41, 4)])
def test_kill_9_in_the_middle(inputs, command, step, least):
    output = inputs / f"kill-{command}" / "out"
    output.parent.mkdir()
    assert len(run_harness(inputs, "kill", output, step, command)) >= least


@pytest.mark.parametrize(
    ("command", "limit"),
    [("ingest", 4000), ("plan", 3000), ("shard", 900), ("shard", 4000)],
)
def test_disk_full_in_the_middle(inputs, command, limit):
    output = inputs / f"full-{command}-{limit}" / "out"
    output.parent.mkdir()
    code, told, opened, leftovers, again, same = run_harness(inputs, "full", output, limit, command)
    assert code == 1
    assert told.startswith(f"ringfeed {command}: ")
    assert "File too large" in told
    assert told.endswith("run the same command again: it goes on where it was")
    assert (opened, leftovers) == (2, [])
    assert (again, same) == (0, True)
