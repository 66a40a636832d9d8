"""Every query of the Grafana dashboard asks for what /metrics shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_metrics import BASE, busy_metrics, samples

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana" / "tightkv.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
FUNCTIONS = {"by", "histogram_quantile", "increase", "max", "rate", "sum", "topk"}
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"


def targets() -> Iterator[tuple[str, str]]:
    """Expression and legend of every query."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def parse(expression: str) -> tuple[set[str], set[str]]:
    """Metric names, and the label names of selectors, groupings and `label_values`."""
    labels: set[str] = set()

    def take(found: re.Match[str]) -> str:
        labels.update(re.findall(rf"({_NAME})\s*(?:=~|!~|!=|=|,|$)", found[1]))
        return " "

    text = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)  # label values
    text = re.sub(r"\[[^\]]*\]", " ", text)  # ranges
    text = re.sub(r"\{([^}]*)\}", take, text)
    text = re.sub(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", take, text)
    names = set(re.findall(rf"(?<![\w.$:]){_NAME}", text)) - FUNCTIONS
    return names, labels


def shown() -> dict[str, set[str]]:
    """Label names of every series."""
    return {
        name: set(BASE).union(*(labels for labels, _ in found))
        for name, found in samples(busy_metrics()).items()
    }


def test_the_parser() -> None:
    names, labels = parse(
        'topk(3, sum by (le, group) (rate(vllm:x_bucket{model_name="$m", a!="b{c}"}[5m]))) / 1.5e3'
    )
    assert names == {"vllm:x_bucket"}
    assert labels == {"le", "group", "model_name", "a"}


@pytest.mark.parametrize(("expression", "legend"), list(targets()))
def test_names_and_labels_exist(expression: str, legend: str) -> None:
    series = shown()
    names, labels = parse(expression)
    assert names
    assert names <= set(series), "no such series"
    labels |= set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    for name in names:
        assert labels <= series[name], f"no such label of {name}"
    assert "model_name" in labels


def test_a_misspelled_name_would_be_found() -> None:
    names, labels = parse('sum by (fromat) (vllm:kv_cache_usage_percent{model_name="$model_name"})')
    assert not names & set(shown())
    assert labels == {"fromat", "model_name"}


def test_variables() -> None:
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    query = variables["model_name"]["query"]["query"]
    match = re.fullmatch(rf"label_values\(({_NAME}), ({_NAME})\)", query)
    assert match is not None
    assert match[2] in shown()[match[1]]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD)))
    assert used - {"__rate_interval", "__range"} == set(variables)


def test_layout() -> None:
    assert BOARD["schemaVersion"] >= 39
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    kinds = ["Traffic", "Latency", "KV cache", "Swap space", "Formats and clips", "Quality"]
    assert rows == kinds
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
    for panel in PANELS:
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_what_grafana_wants_of_a_board() -> None:
    """Keys and types of its dashboard schema, so that it is loaded without an upgrade or a form."""
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time", "refresh"} <= set(
        BOARD
    )
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", BOARD["uid"])
    # An id is the database's own; inputs would be asked for by hand.
    assert BOARD.get("id") is None
    assert "__inputs" not in BOARD
    assert set(BOARD["time"]) == {"from", "to"}
    assert re.fullmatch(r"\d+[smh]", BOARD["refresh"])
    for variable in BOARD["templating"]["list"]:
        assert {"name", "type", "query", "hide", "refresh"} <= set(variable)


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: str(panel["title"]))
def test_what_grafana_wants_of_a_panel(panel: dict[str, Any]) -> None:
    assert isinstance(panel["id"], int)
    assert panel["title"]
    assert set(panel["gridPos"]) == {"h", "w", "x", "y"}
    assert all(isinstance(value, int) and value >= 0 for value in panel["gridPos"].values())
    if panel["type"] == "row":
        # An open row's panels stand behind it, not in it.
        assert (panel["gridPos"]["w"], panel["collapsed"], panel["panels"]) == (24, False, [])
        return
    assert panel["type"] in ("timeseries", "stat", "table")
    assert {"datasource", "targets", "fieldConfig", "options"} <= set(panel)
    assert {"defaults", "overrides"} <= set(panel["fieldConfig"])
    references = [target["refId"] for target in panel["targets"]]
    assert references
    assert len(set(references)) == len(references)
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert target["expr"]
        assert isinstance(target["instant"], bool)
        assert isinstance(target["range"], bool)
