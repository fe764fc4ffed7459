"""``ringfeed serve``: start a service, say where it is, and stop it on a signal.

In:   a checked ``ServeConfig``
Out:  an ``Outcome`` that is printed when ranks are served, and goes on until the service ends
"""

from __future__ import annotations

import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.console import Outcome
from ringfeed.workers.environment import choose_ray_auth, read_environment
from ringfeed.workers.service import Service
from ringfeed.workers.serving import options_of

if TYPE_CHECKING:
    from ringfeed.pipeline.config import ServeConfig
    from ringfeed.pipeline.progress import Progress

__all__ = ["run_serve"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOTICE_SECONDS = 0.5


def run_serve(config: ServeConfig, *, progress: Progress) -> Outcome:
    """Serve until a signal comes.

    Raises:
        ValueError: if something does not fit, or a port or name is taken.
        CorruptDataError: if plan or corpora are damaged.
        JobFailedError: if Ray cannot be had, or its workers die again and again.
    """
    is_unwanted = threading.Event()
    take = partial(_take_signals, is_unwanted)
    take()
    options = options_of(config)
    if read_environment().address is None:
        choose_ray_auth()
    # Ray takes SIGTERM for itself when it is imported, and once more when it is connected.
    import ray  # noqa: F401

    take()
    try:
        service = Service.start(options, progress=progress, is_unwanted=is_unwanted, on_connected=take)
    except (InterruptedError, SystemExit):
        # The latter is what Ray makes of SIGTERM while it is being connected.
        stopped = "stopped before it was ready"
        return Outcome(text=stopped, facts={"stopped": stopped})
    views = options.views
    text = (
        f"serving {views.plan}, cp {views.cp_size}, layout {views.layout.name}, at {service.url}\n"
        f"for ranks on Ray (RAY_ADDRESS={service.ray_address}): {service.ray_url}"
    )
    facts = {"url": service.url, "ray_url": service.ray_url, "ray_address": service.ray_address}

    def go_on() -> None:
        with service:
            while not is_unwanted.is_set() and not service.wait(_NOTICE_SECONDS):
                pass
            progress.log("serve: stopping")

    return Outcome(text=text, facts=facts, go_on=go_on)


def _take_signals(is_unwanted: threading.Event) -> None:
    """Have the first signal set ``is_unwanted``. The second one ends the process at once."""

    def note(number: int, frame: Any) -> None:  # noqa: ARG001 - what Python calls a handler with
        is_unwanted.set()
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)

    if not is_unwanted.is_set():
        for number in _SIGNALS:
            signal.signal(number, note)
