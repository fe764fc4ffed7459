"""Mistakes in what a service is told: one line and exit code 2, before any Ray is started."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.config import ServeConfig
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.planner.session import PlanSession
from ringfeed.workers import service
from ringfeed.workers.cli import main
from ringfeed.workers.flight_options import Exposure
from ringfeed.workers.plan_opening import open_checked
from ringfeed.workers.service_options import ServiceOptions, is_wildcard
from ringfeed.workers.serving import options_of


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    documents = [np.full(n, 7) for n in np.random.default_rng(2).integers(1, 60, 40)]
    write_corpus(folder / "corpus", documents, name="corpus", pad_id=5)
    fixed: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 4, "max_cp": 2, "balance": "in_order"}
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **fixed))
    return folder / "plan"


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    def refuse(**options):
        raise AssertionError("a Ray was started")

    monkeypatch.setattr(service, "ray_session", refuse)
    monkeypatch.setattr("ringfeed.workers.serve_command._SIGNALS", ())
    for name in ("RINGFEED_TOKEN", "RINGFEED_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--layout", "zigzag"], "unknown layout 'zigzag'"),
        (["--cp", "3"], "slot_budget|multiple"),
        (["--skip", "all.txt"], "the skip list leaves no supervised token in"),
        (["--skip", "none.txt"], "skip='none.txt' is not a file"),
        (["--host", "0.0.0.0"], "there is no token"),  # noqa: S104 - it is refused
        (["--token-file", "none"], "token file: 'none' cannot be read"),
        (["--tls-cert", "a.pem"], "--tls-cert and --tls-key"),
        (["--tls-client-ca", "a.pem"], "encrypted servers"),
        (["--tls-cert", "a.pem", "--tls-key", "b.pem"], "cert='a.pem' is not a file"),
        (["--port", "70000"], "port=70000 must be 0 to 65535"),
        (["--port", "4000", "--feeder-port", "4000"], "feeder_port=4000 is the directory's port"),
        (["--node-bytes", "1000"], "node_bytes=1000 must be at least 314572800"),
        (["--metrics-port", "70000"], "metrics_port=70000 must be 0 to 65535"),
        (["--block-bytes", "1000000000"], "node_bytes=.* must be at least 32000000000"),
        (["--name", "a b"], "name='a b': letters"),
        (["--builders", "0"], "builders=0"),
        (["--corpus", "nowhere"], "nowhere"),
        (["--plan-from", "none.yaml"], "none.yaml"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(plan, tmp_path, monkeypatch, capsys, flags, told):
    monkeypatch.chdir(tmp_path)
    Path("all.txt").write_text("\n".join(map(str, range(40))))
    given = {"--cp": "2", "--layout": "te"} | dict(zip(flags[::2], flags[1::2], strict=True))
    code = main(["serve", str(plan), "--json", *(word for pair in given.items() for word in pair)])
    out, err = capsys.readouterr()
    assert code == 2
    line = json.loads(out.splitlines()[-1])
    assert line["exit_code"] == 2
    assert err.count("\n") == 1
    assert err.startswith("ringfeed serve: ")
    assert re.search(told, err), err


def test_a_plan_that_is_missing_is_a_mistake(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "none"), "--cp", "2", "--layout", "te"]) == 2
    assert "none" in capsys.readouterr().err


def test_a_port_that_is_taken_is_a_mistake_before_ray_is_started(plan, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(plan), "--cp", "2", "--layout", "te", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def options(plan, **more) -> ServiceOptions:
    return options_of(ServeConfig(plan=plan, cp=2, layout="te", **more))


def test_flags_become_options(plan, tmp_path):
    token = tmp_path / "token"
    token.write_text("a-secret-of-ranks\n")
    told = options(plan, host="0.0.0.0", token_file=token, port=4000, builders=3, name="mine")  # noqa: S104
    assert (told.server.token, told.server.port, told.num_builders, told.name) == (
        "a-secret-of-ranks",
        4000,
        3,
        "mine",
    )
    assert "a-secret" not in repr(told)
    assert options(plan, host="0.0.0.0", open=True).server.exposure is Exposure.OPEN  # noqa: S104


def test_a_plan_to_make_is_the_plan_that_is_served(plan, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"plan: {{corpora: [{plan.parent / 'corpus'}], pack_tokens: 128, packs_per_step: 4, max_cp: 2}}"
    )
    told = options(tmp_path / "new", plan_from=file)
    assert told.plan_from is not None
    assert told.plan_from.output == told.views.plan == tmp_path / "new"
    with pytest.raises(ValueError, match=r"output='.*new' of the plan to make is not '.*other'"):
        replace(told, views=replace(told.views, plan=tmp_path / "other"))


def test_a_plan_to_make_beside_a_skip_list_is_refused_before_it_is_begun(plan, tmp_path, capsys):
    file, skip = tmp_path / "run.yaml", tmp_path / "skip.txt"
    corpus = plan.parent / "corpus"
    file.write_text(f"plan: {{corpora: [{corpus}], pack_tokens: 128, packs_per_step: 4, max_cp: 2}}")
    skip.write_text("3\n")
    flags = ["--cp", "2", "--layout", "te", "--plan-from", str(file), "--skip", str(skip)]
    assert main(["serve", str(tmp_path / "new"), *flags]) == 2
    assert "plan it first, or leave skip out" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml", "skip.txt"]


def test_a_skip_list_waits_for_the_finished_plan(plan, tmp_path):
    (tmp_path / "skip.txt").write_text("1\n")
    fixed: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 4, "max_cp": 2}
    made = PlanOptions(output=tmp_path / "new", corpora=[plan.parent / "corpus"], **fixed)
    with PlanSession.open(made):
        told = options(tmp_path / "new", skip=tmp_path / "skip.txt")
        with pytest.raises(ValueError, match=r"skip='.*skip.txt': .*new is still being planned"):
            open_checked(told.views)


def test_a_nodes_bytes_are_split_so_that_nothing_exceeds_them(plan):
    told = options(plan, builders=4)
    budget = told.budget(told.block_bytes)
    parts = budget.shared_bytes + 4 * budget.keep_bytes + budget.store_bytes
    assert parts == told.node_bytes == 2 << 30
    assert budget.most_blocks * told.block_bytes * 2 == budget.store_bytes
    feeder = told.feeder(host="127.0.0.2", public_host="here", shared_bytes=budget.shared_bytes)
    assert (feeder.host, feeder.public_host, feeder.shared_bytes) == ("127.0.0.2", "here", 1 << 30)
    assert told.directory.shared_bytes == 0


@pytest.mark.parametrize(("host", "is_one"), [("0.0.0.0", True), ("[::]", True), ("10.0.0.1", False)])  # noqa: S104
def test_hosts_that_stand_for_every_address(host, is_one):
    assert is_wildcard(host) is is_one
