"""deploy/: the dashboard and the alert rules name only what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from polykv_proxy.core.admission.policy import Mode
from polykv_proxy.core.admission.verdict import Arm, Outcome
from polykv_proxy.core.pools import Verdict
from polykv_proxy.core.tally import Copied, Ending, Evicted, Rebuilt
from polykv_proxy.engine.status import EngineState
from polykv_proxy.observability import catalog
from polykv_proxy.observability.collector import SLEEPING
from polykv_proxy.observability.described import Kind

DEPLOY = Path(__file__).parents[2] / "deploy"
ENGINE = {"llamacpp:n_decode_total", "llamacpp:n_busy_slots_per_decode"}
TARGET = {"instance", "job"}
WORDS = {"sum", "avg", "max", "rate", "increase", "abs", "histogram_quantile", "by", "on", "and", "or", "le", "label_values"}
VALUES = {
    ("polykv_requests_total", "outcome"): set(Ending),
    ("polykv_engine_state", "state"): {state.value for state in EngineState} | {SLEEPING},
    ("polykv_pool_evictions_total", "cause"): set(Evicted),
    ("polykv_pool_rebuilds_total", "outcome"): set(Rebuilt),
    ("polykv_disk_copies_total", "outcome"): set(Copied),
    ("polykv_pool_checks_total", "verdict"): set(Verdict),
    ("polykv_admission_decisions_total", "arm"): set(Arm),
    ("polykv_admission_decisions_total", "outcome"): set(Outcome),
    ("polykv_admission_floor_tps", "mode"): set(Mode),
    ("up", "job"): {"polykv"},
}
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")


def labels_of() -> dict[str, set[str]]:
    """The labels of each name that a query may have."""
    found = {"up": set(), **{name: set() for name in ENGINE}}
    for one in catalog.ALL:
        histogram = one.kind is Kind.HISTOGRAM
        for suffix in ("_bucket", "_sum", "_count") if histogram else ("",):
            found[one.shown + suffix] = set(one.labels) | ({"le"} if suffix == "_bucket" else set())
    return found


def queries() -> Iterator[tuple[str, str]]:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    board = json.loads((DEPLOY / "grafana" / "polykv.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


@pytest.mark.parametrize(("where", "query"), [pytest.param(*each, id=f"{n}-{each[0]}") for n, each in enumerate(queries())])
def test_a_query_names_only_metrics_labels_and_values_that_exist(where: str, query: str) -> None:
    """Each word of a query is a metric of ours (or one of the engine's few that are used), one of its labels, or PromQL."""
    labels = labels_of()
    used = {name for name in re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", query) if name in labels}
    assert used, "a query asks for something"
    for name, matchers in _SELECTOR.findall(query):
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            assert label in labels[name] | TARGET, f"{where}: {name} has no label {label}"
            if label not in TARGET or name == "up":
                assert set(value.split("|")) <= VALUES[name, label], f"{where}: {label}={value}"
    bare = re.sub(r'"[^"]*"|\[[^]]*\]|\{[^}]*\}', " ", query)
    words = set(re.findall(r"(?<![0-9.])[a-zA-Z_:][a-zA-Z0-9_:]*", bare))
    assert words <= used | WORDS | TARGET | set().union(*(labels[name] for name in used)), where


def test_alerts_say_what_is_wrong_and_how_bad_it_is() -> None:
    """Each rule has a name of its own, a severity and a summary that names the instance."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    found = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert "$labels.instance" in rule["annotations"]["summary"]


def test_legends_use_labels_that_their_queries_keep() -> None:
    """What stands in a legend is a label of a metric in the query, so that no line is called nothing."""
    board = json.loads((DEPLOY / "grafana" / "polykv.json").read_text())
    labels = labels_of()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            known = set().union(*(labels[name] for name in labels if name in target["expr"]))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known
