"""A process of feeders: one Flight server per layout that it is told, until its standard input ends.

    python feeders.py '{"plan": PATH, "servers": [{"layout": ["te", {}], "cp": 2, "options": {...}}]}'

It prints one line of JSON, the URLs in the order asked for.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.skip import read_skip_list
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.block_builder import BlockBuilder, PlanOpener
from ringfeed.workers.flight_options import ServerOptions, ServerTls
from ringfeed.workers.flight_server import FlightServer


def builder(path: Path, asked: dict[str, Any]) -> BlockBuilder:
    name, layout_options = asked["layout"]
    plan = Plan.open(path)
    corpora = plan.open_corpora()
    opened = OpenOptions(layout=make_layout(name, **layout_options), cp_size=asked["cp"])
    skip = asked.get("skip")
    overlay = None if skip is None else read_skip_list(skip, num_documents=corpora.num_documents)
    opener = PlanOpener(plan=path, spec=open_spec(plan, opened, pad_id=corpora.pad_id), overlay=overlay)
    return BlockBuilder(opener, block_bytes=asked.get("block_bytes", 1024))


def options(values: dict[str, Any]) -> ServerOptions:
    tls = values.pop("tls", None)
    files = None if tls is None else ServerTls(**{name: Path(path) for name, path in tls.items()})
    return ServerOptions(**values, tls=files)


def main() -> None:
    asked = json.loads(sys.argv[1])
    servers = [
        FlightServer(builder(Path(asked["plan"]), one), options(one.get("options", {})))
        for one in asked["servers"]
    ]
    print(json.dumps([server.url for server in servers]), flush=True)
    sys.stdin.read()
    for server in servers:
        server.stop(grace_seconds=2)


if __name__ == "__main__":
    main()
