"""The command of one training process: ``python -m ringfeed.workers.demo_process JOB.json RANK``.

In:   a ``TrainJob`` as JSON (``demo_job.py``); standard input, which stays open as long as the demo lives
Out:  what ``demo_train.py`` records
"""

import os
import sys
import threading

__all__ = ["end_with_parent"]


def end_with_parent() -> None:
    """End this process when the demo does, however it ends: its end closes our standard input."""

    def wait() -> None:
        # Not through sys.stdin: its lock, held by this thread, breaks the interpreter's shutdown.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    # Takes seconds, in which the demo may have been killed already.
    from ringfeed.workers.demo_train import main

    main(sys.argv[1:])
