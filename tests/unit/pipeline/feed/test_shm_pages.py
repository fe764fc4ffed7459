"""Large files of shared memory: all of their memory is there, no more, and it is mapped for reading alone."""

import numpy as np
import pytest

from ringfeed.pipeline import shm_pages
from ringfeed.pipeline.shm_files import SHARED_MEMORY
from ringfeed.pipeline.shm_pages import make_file, map_file

MB = 1 << 20


@pytest.fixture
def path():
    path = SHARED_MEMORY / "ringfeed-test-shm-pages"
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("size", [4096, 3 * MB, 4 * MB, 9 * MB + 4096])
@pytest.mark.parametrize("huge", [shm_pages._COLLAPSE, 9999], ids=["asked", "refused"])
def test_what_is_written_is_read_and_takes_the_memory_that_was_asked_for(path, size, huge, monkeypatch):
    monkeypatch.setattr(shm_pages, "_COLLAPSE", huge)
    written = np.frombuffer(make_file(path, size), dtype=np.uint8)[:size]
    read = np.frombuffer(map_file(path), dtype=np.uint8)[:size]
    assert path.stat().st_blocks * 512 == size
    written[:] = np.arange(size) % 251
    assert np.array_equal(read, np.arange(size) % 251)
    assert not read.flags.writeable
    # Reading on, where a mapping is longer for the sake of its address, takes no memory either.
    assert path.stat().st_blocks * 512 == size


def test_a_file_is_made_once_and_must_be_there(path):
    make_file(path, 4096)
    with pytest.raises(FileExistsError):
        make_file(path, 4096)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        map_file(path)
