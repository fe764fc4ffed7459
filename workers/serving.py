"""``serve``: a service as one call, for programs that start their own.

In:   keywords, or the config of ``ringfeed serve``
Out:  a running ``Service`` (``workers/service.py``)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.config import PlanConfig
from ringfeed.pipeline.config_file import load_config
from ringfeed.pipeline.feed_facts import DEFAULT_BLOCK_BYTES
from ringfeed.pipeline.feed_token import find_token
from ringfeed.sharding.layouts import make_layout, read_layout
from ringfeed.workers.flight_options import DEFAULT_MAX_STREAMS, Exposure, ServerOptions, ServerTls
from ringfeed.workers.plan_opening import PlanChoice
from ringfeed.workers.service import Service
from ringfeed.workers.service_options import (
    DEFAULT_NAME,
    DEFAULT_NAMESPACE,
    DEFAULT_NODE_BYTES,
    ServiceOptions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfeed.pipeline.config import ServeConfig
    from ringfeed.pipeline.planner.options import PlanOptions
    from ringfeed.sharding.layouts import Layout

__all__ = ["options_of", "serve"]


def serve(  # noqa: PLR0913 - one call with all that shapes a service
    plan: str | Path,
    *,
    cp_size: int,
    layout: str | Layout,
    tp_size: int = 1,
    unit: int = 1,
    slot_budget: int | None = None,
    skip: str | Path | None = None,
    corpus: str | Path | Sequence[str | Path] = (),
    host: str = "127.0.0.1",
    port: int = 0,
    public_host: str | None = None,
    token: str | None = None,
    tls: ServerTls | None = None,
    exposure: Exposure = Exposure.LOOPBACK,
    max_streams: int = DEFAULT_MAX_STREAMS,
    feeder_port: int = 0,
    builders: int | None = None,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    node_bytes: int = DEFAULT_NODE_BYTES,
    metrics_port: int = 0,
    name: str = DEFAULT_NAME,
    namespace: str = DEFAULT_NAMESPACE,
    plan_from: PlanOptions | None = None,
) -> Service:
    """Serve a plan; returns once ranks can load from ``Service.url``. Use it in a ``with`` block.

    Ray is the one that runs in this process, the cluster of ``RAY_ADDRESS``, or one that is started here.

    Args:
        plan: the plan folder; on a cluster every node sees it, and the corpora, under the same path.
        cp_size: context-parallel ranks that share a pack.
        layout: which rank holds which token.
        tp_size: tensor-parallel ranks (sequence parallel) that share a view.
        unit: FP8 unit of the local length.
        slot_budget: slots of a pack, where the plan's are too few.
        skip: a text file of document ids to leave out.
        corpus: corpus folders in command order, where the plan's own paths moved.
        host: where directory and feeders listen; ``0.0.0.0`` for ranks on other machines.
        port: of the directory; 0 takes any that is free.
        public_host: what ranks call the directory's machine, if that is not ``host``.
        token: bearer token of ranks; None takes that of the environment, if there is one.
        tls: certificates of the servers.
        exposure: who may reach servers that have no token.
        max_streams: ranks that one feeder serves at once.
        feeder_port: of every feeder; 0 takes any that is free.
        builders: how many; by default one for each CPU that this process may use.
        block_bytes: ids and labels that one rank gets in a block.
        node_bytes: memory for blocks on a node (``service_options.NodeBudget`` says what becomes of it).
        metrics_port: where a Ray that is started here shows its metrics; 0 takes any that is free.
        name: of the service; two on one Ray need two.
        namespace: of Ray, in which it has this name.
        plan_from: makes the plan while ranks train, its output is ``plan``; None serves what is there.

    Raises:
        ValueError: if plan, layout, sizes or skip list do not fit, or a port or name is taken.
        CorruptDataError: if plan or corpora are damaged.
        JobFailedError: if Ray cannot be had, or its workers die again and again.
    """
    corpora = [corpus] if isinstance(corpus, str | Path) else corpus
    views = PlanChoice(
        plan=Path(plan),
        layout=read_layout(layout),
        cp_size=cp_size,
        tp_size=tp_size,
        unit=unit,
        slot_budget=slot_budget,
        skip=None if skip is None else Path(skip),
        corpora=tuple(Path(path) for path in corpora),
    )
    server = ServerOptions(
        host=host,
        port=port,
        public_host=public_host,
        token=find_token(token),
        tls=tls,
        exposure=exposure,
        max_streams=max_streams,
    )
    return Service.start(
        ServiceOptions(
            views=views,
            server=server,
            feeder_port=feeder_port,
            builders=builders,
            block_bytes=block_bytes,
            node_bytes=node_bytes,
            metrics_port=metrics_port,
            name=name,
            namespace=namespace,
            plan_from=plan_from,
        )
    )


def options_of(config: ServeConfig) -> ServiceOptions:
    """Return what ``ringfeed serve`` was told.

    Raises:
        ValueError: if it does not go together.
    """
    views = PlanChoice(
        plan=config.plan,
        layout=make_layout(config.layout, **config.layout_options),
        cp_size=config.cp,
        tp_size=config.tp,
        unit=config.unit,
        slot_budget=config.slot_budget,
        skip=config.skip,
        corpora=config.corpus,
    )
    server = ServerOptions(
        host=config.host,
        public_host=config.public_host,
        port=config.port,
        token=find_token(file=config.token_file),
        tls=_tls(config),
        exposure=Exposure.OPEN if config.open else Exposure.LOOPBACK,
        **_given(config, "max_streams"),
    )
    return ServiceOptions(
        views=views,
        server=server,
        feeder_port=config.feeder_port,
        metrics_port=config.metrics_port,
        builders=config.builders,
        plan_from=_plan_from(config),
        **_given(config, "block_bytes", "node_bytes", "name", "namespace"),
    )


def _plan_from(config: ServeConfig) -> PlanOptions | None:
    if config.plan_from is None:
        return None
    return load_config(PlanConfig, flags={"output": config.plan}, file=config.plan_from).to_options()


def _tls(config: ServeConfig) -> ServerTls | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return ServerTls(cert=config.tls_cert, key=config.tls_key, client_ca=config.tls_client_ca)


def _given(config: ServeConfig, *names: str) -> dict[str, Any]:
    """Return the fields that the user set; the others have their defaults in ``ServiceOptions``."""
    return {name: value for name in names if (value := getattr(config, name)) is not None}
