"""What must be settled before any test module is imported."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# ray reads RAY_AUTH_MODE once, when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Ray would start its workers through `uv` again when the tests were started with it.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Several test processes share few cores; torch and numba size their pools when imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiled kernels are found again from a temporary working folder and by child processes.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "numba"))

# No deadline: a busy machine must not turn a right test red.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """Wait until something is so, and fail if it is not in time: a regression must not hang the suite."""

    def wait(condition: Callable[[], object], *, seconds: float = 20) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"it did not happen within {seconds} s"
            time.sleep(0.02)

    return wait
