"""What the commands of ``workers/cli.py`` do, and what they say.

In:   a checked config
Out:  an ``Outcome`` for ``ringfeed.pipeline.console`` to print
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.console import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfeed.pipeline.config import ConvertConfig, DemoConfig, ServeConfig, ShardConfig
    from ringfeed.pipeline.progress import Progress

__all__ = ["convert", "demo", "parse_options", "serve", "shard"]


def shard(config: ShardConfig, progress: Progress) -> Outcome:
    """Pre-shard a plan."""
    from ringfeed.workers.shard_job import run_shard

    report = run_shard(config, progress=progress)
    if report.num_folders_written:
        done = f"{report.num_folders_written} of {report.num_folders} folders written by this run"
    else:
        done = "there already, nothing to do"
    text = (
        f"{report.output}: {report.num_steps} steps, cp {config.cp}, layout {config.layout}, "
        f"{report.tokens:,} slots, {report.bytes:,} bytes; {done}"
    )
    return Outcome(text=text, facts=report.to_json())


def serve(config: ServeConfig, progress: Progress) -> Outcome:
    """Serve a plan."""
    from ringfeed.workers.serve_command import run_serve

    return run_serve(config, progress=progress)


def convert(config: ConvertConfig, progress: Progress) -> Outcome:
    """Pre-shard rows that were packed before."""
    from ringfeed.workers.convert_files import run_convert

    report = run_convert(config, progress=progress)
    shards = report.shards
    text = (
        f"{shards.output}: {report.num_rows:,} rows of {report.pack_tokens:,} slots, {shards.num_steps} "
        f"steps, cp {config.cp}, layout {config.layout}, {shards.bytes:,} bytes; corpus and plan in "
        f"{report.rows}"
    )
    return Outcome(text=text, facts=report.to_json())


def demo(config: DemoConfig, progress: Progress) -> Outcome:
    """Run the demonstration."""
    from ringfeed.workers.demo import run_demo

    return run_demo(config, progress=progress)


def parse_options(given: Sequence[str] | None) -> dict[str, Any] | None:
    """Turn ``["threshold=512", ...]`` into keyword arguments; values that look like JSON are JSON.

    Raises:
        ValueError: if an entry has no ``=``.
    """
    if not given:
        return None
    options: dict[str, Any] = {}
    for entry in given:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise ValueError(f"layout_option={entry!r}: must be KEY=VALUE, for example threshold=512")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options
