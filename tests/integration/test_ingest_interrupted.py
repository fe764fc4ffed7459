"""Ingest stopped anywhere, by kill -9 or a full disk, then run again: the same bytes as undisturbed."""

import errno
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.ingest import IngestOptions, run_ingest
from ringfeed.pipeline.progress import SilentProgress

# Small parts and files, so that there are many moments to be stopped at.
INGEST = """
import os, resource, signal, sys
from pathlib import Path
from ringfeed.pipeline.ingest import IngestOptions, run_ingest
from ringfeed.pipeline.progress import LineProgress

def ingest(source, output):
    return run_ingest(
        IngestOptions(
            sources=(Path(source),), output=Path(output), name="c", token_file_bytes=6000, part_bytes=2000
        ),
        progress=LineProgress(sys.stderr),
    )
"""

# Forks a child for each moment at which files are opened, renamed or removed. The child kills itself
# there; then another one runs undisturbed, and what it leaves is compared.
KILL_EVERYWHERE = (
    INGEST
    + """
source, reference, work, step = sys.argv[1:]
WATCHED = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}

def in_child(output, kill_at):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    count = 0
    def hook(event, arguments):
        nonlocal count
        # Only what touches the output: the rest of the interpreter opens files, too.
        if event in WATCHED and str(arguments[0]).startswith(str(output)):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        ingest(source, output)
    except BaseException:
        os._exit(1)
    os._exit(0)

def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(Path(folder).rglob("*"))if p.is_file()}

expected, killed = files_of(reference), 0
for kill_at in range(1, 10_000, int(step)):
    output = Path(work) / str(kill_at) / "c"
    output.parent.mkdir()
    if in_child(output, kill_at) == 0:
        break
    killed += 1
    manifest = output / "manifest.json"
    assert not output.exists() or manifest.exists(), f"half-written output after kill {kill_at}"
    assert in_child(output, 0) == 0, f"the run after kill {kill_at} failed"
    assert files_of(output) == expected, f"other bytes after kill {kill_at}"
    assert [p.name for p in output.parent.iterdir()] == ["c"], f"leftovers after kill {kill_at}"
print(killed)
"""
)

ONE_INGEST = INGEST + "ingest(sys.argv[1], sys.argv[2])\n"

LIMITED_INGEST = (
    INGEST
    + """
limit = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    ingest(sys.argv[1], sys.argv[2])
except OSError as error:
    sys.exit(error.errno)
"""
)

# In a mount namespace of its own: a file system of 32 KiB, then of 64 MiB.
FULL_DISK = """
set -e
mount -t tmpfs -o size=32k tmpfs "$3"
set +e
"$0" -c "$1" "$2" "$3/c" >&2
echo "first run ended with $?"
set -e
ls "$3"
mount -o remount,size=64m "$3"
"$0" -c "$1" "$2" "$3/c" >&2
cp -r "$3/c" "$4"
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted") / "source"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i:02d}.txt").write_text(f"document {i} " * (20 + 40 * i))
    lines = "".join(f'{{"text": "line {i} {"x" * (i % 50)}"}}\n' for i in range(60))
    (folder / "lines.jsonl").write_text(lines)
    (folder / "nothing.txt").write_text("")
    return folder


@pytest.fixture(scope="module")
def undisturbed(source):
    output = source.parent / "undisturbed" / "c"
    options = IngestOptions(
        sources=(source,), output=output, name="c", token_file_bytes=6000, part_bytes=2000
    )
    run_ingest(options, progress=SilentProgress())
    return output


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_killed_at_any_file_operation(source, undisturbed, tmp_path):
    # Some 140 operations; a step of 1 passes as well, and takes minutes.
    result = run(KILL_EVERYWHERE, source, undisturbed, tmp_path, 7)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 15


def test_killed_from_outside_at_any_time(source, undisturbed, tmp_path):
    output = tmp_path / "c"
    num_killed = 0
    # Start-up takes most of the time: begin to kill once the partial folder is there.
    for delay in (0.0, 0.02, 0.04, 0.08):
        command = [sys.executable, "-c", ONE_INGEST, str(source), str(output)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not (tmp_path / "c.partial").exists():
                time.sleep(0.001)
            time.sleep(delay)
            process.kill()
        num_killed += process.returncode == -signal.SIGKILL
        if not output.exists():
            with pytest.raises(ValueError, match="half-written"):
                Corpus.open(output)

    assert run(ONE_INGEST, source, output).returncode == 0
    assert num_killed > 0
    assert files_of(output) == files_of(undisturbed)


def test_a_resumed_run_does_not_make_finished_files_again(source, undisturbed, tmp_path):
    output = tmp_path / "c"
    # Room for the token files of the beginning, not for the one long document further on.
    assert run(LIMITED_INGEST, source, output, 7_000).returncode == errno.EFBIG
    finished = sorted((tmp_path / "c.partial").glob("tokens-*"))
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in finished}
    assert 1 <= len(finished) < Corpus.open(undisturbed).num_token_files

    result = run(ONE_INGEST, source, output)

    assert "going on after" in result.stderr
    after = {name: ((output / name).stat().st_ino, (output / name).stat().st_mtime_ns) for name in before}
    assert after == before
    assert files_of(output) == files_of(undisturbed)


@pytest.mark.parametrize("limit", [100, 500, 2_000, 7_000])
def test_files_that_may_not_grow_any_more(source, undisturbed, tmp_path, limit):
    """RLIMIT_FSIZE makes real writes fail, each time at another file."""
    output = tmp_path / "c"
    assert run(LIMITED_INGEST, source, output, limit).returncode == errno.EFBIG
    with pytest.raises(ValueError, match=r"half-written|there is no corpus"):
        Corpus.open(output)
    assert not list(tmp_path.rglob("*.tmp"))

    assert run(ONE_INGEST, source, output).returncode == 0
    assert files_of(output) == files_of(undisturbed)


def test_a_full_disk(source, undisturbed, tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("no unshare command: cannot make a small file system")
    (tmp_path / "disk").mkdir()
    tries = [["unshare", "-m"], ["unshare", "-rm"]]
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(tmp_path / "disk")]
    may = [
        unshare
        for unshare in tries
        if subprocess.run([*unshare, *mount], check=False, capture_output=True).returncode == 0
    ]
    if not may:
        pytest.skip("this machine does not let us mount a small file system")

    arguments = [ONE_INGEST, str(source), str(tmp_path / "disk"), str(tmp_path / "copy")]
    command = [*may[0], "sh", "-c", FULL_DISK, sys.executable, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert "No space left on device" in result.stderr
    assert result.stdout.splitlines() == ["first run ended with 1", "c.partial"]
    assert files_of(tmp_path / "copy") == files_of(undisturbed)
