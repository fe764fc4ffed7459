"""Dashboards and rules ask for metrics that exist, by labels that they have."""

import inspect
import json
import re
from pathlib import Path

import yaml

from ringfeed.pipeline.rank_metrics import RankMetrics
from ringfeed.workers import metrics as worker_metrics

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"


def names():
    """What the code counts: trainer ranks' names, and those of actors with Ray's prefix."""
    ranks = {
        sample.name
        for family in RankMetrics().registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    actors = re.findall(r'"(ringfeed_\w+)"', inspect.getsource(worker_metrics))
    return ranks | {f"ray_{name}" for name in actors}


def rules():
    content = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def panels():
    return json.loads((DEPLOY / "grafana" / "ringfeed.json").read_text())["panels"]


def queries():
    return [rule["expr"] for rule in rules()] + [t["expr"] for panel in panels() for t in panel["targets"]]


def test_every_query_asks_for_what_is_counted():
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = {name for query in queries() for name in re.findall(r"[a-z_:]*ringfeed[a-z_:0-9]*", query)}

    assert asked - recorded <= names()
    assert {"ringfeed_stalls_total", "ray_ringfeed_restarts_total"} <= asked


def test_every_counter_is_on_the_dashboard():
    shown = " ".join(target["expr"] for panel in panels() for target in panel["targets"])

    assert {name for name in names() if not re.search(rf"\b{name}\b", shown)} == {"ringfeed_batches_total"}


def test_counters_are_asked_for_as_rates():
    for query in queries():
        for counter in re.findall(r"\b\w+_total\b", query):
            assert re.search(rf"(rate|increase)\({counter}\[", query), query


def test_what_should_fire_when_nobody_counts_is_compared_with_nothing():
    """Where all actors are gone there is no series: ``sum(...) == 0`` of none is none."""
    for query in queries():
        for compared in re.findall(r"\S* == 0", query):
            assert re.search(r"\(sum\(.*\) or vector\(0\)\) == 0", query), compared


def test_parentheses_match_and_panels_do_not_overlap():
    assert all(query.count("(") == query.count(")") for query in queries())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels()}) == len(places)


def test_alerts_say_what_is_wrong_and_where_to_read_on():
    headings = {
        line.lstrip("#").strip()
        for line in (ROOT / "docs" / "service.md").read_text().splitlines()
        if line.startswith("#")
    }
    for rule in rules():
        if "alert" in rule:
            file, heading = rule["annotations"]["runbook"].split(", ", 1)
            assert (file, heading.strip('"') in headings) == ("docs/service.md", True), rule["alert"]
            assert rule["labels"]["severity"] in {"warning", "critical"}
