"""What a trainer rank does in the scripts of deploy/: load all its batches, and write down what they were.

Run:   torchrun rank.py URL OUTPUT [wait]
"""

import json
import os
import sys
import time
from pathlib import Path

from ringfeed.pipeline.loader import Loader


def main() -> None:
    url, output = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    with Loader(url, dp_rank=0, dp_size=1, cp_rank=rank, cp_size=2) as loader:
        digests = [batch.info.digest for batch in loader]
    token = Path(os.environ["RINGFEED_TOKEN_FILE"])
    told = {"url": url, "digests": digests, "token_mode": token.stat().st_mode & 0o777, "token": str(token)}
    partial = output / f"rank-{rank}.partial"
    partial.write_text(json.dumps(told))
    partial.replace(output / f"rank-{rank}.json")
    while sys.argv[3:] == ["wait"]:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
