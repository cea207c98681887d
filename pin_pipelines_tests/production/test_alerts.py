"""Alerts fire when they must, and lead to a runbook; dashboards ask for what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from pin_pipelines_tests.support import PROJECT_ROOT
from pin_pipelines_tests.support.exporter import exposition, needs_promtool, promtool, samples

PROMETHEUS = PROJECT_ROOT / "docker" / "prometheus"
GRAFANA = PROJECT_ROOT / "docker" / "grafana"
RUNBOOKS = PROJECT_ROOT / "docs" / "runbooks.md"
RULE_TESTS = Path(__file__).parent / "prometheus" / "alerts.yaml"

RULES: Mapping[str, Any] = {
    rule["alert"]: rule
    for group in yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
}
DASHBOARDS = {file.stem: json.loads(file.read_text()) for file in sorted((GRAFANA / "dashboards").iterdir())}
CONDITIONS = [
    condition for test in yaml.safe_load(RULE_TESTS.read_text())["tests"] for condition in test["alert_rule_test"]
]

_METRIC = re.compile(r"\b(?:catalog|invest_analytics|pin_pipelines)_\w+")


def anchors(markdown: str) -> set[str]:
    """Of its headings, as the usual hosts make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def queries() -> Iterator[tuple[str, str]]:
    """Each query of a dashboard, by dashboard and panel."""
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                yield f"{name}: {panel['title']}", target["expr"]


def exported(text: str) -> set[str]:
    """Names of all metrics that there are, also of those that have no sample yet; of a histogram its three."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "count", "sum")} if kind == "histogram" else {name}
    return names


@pytest.mark.parametrize("name", sorted(RULES))
def test_alert_says_what_it_means_and_leads_to_a_runbook(name: str) -> None:
    rule = RULES[name]
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert PROJECT_ROOT / file == RUNBOOKS
    assert anchor in anchors(RUNBOOKS.read_text())


def test_every_alert_is_in_the_table_of_the_runbooks_and_of_the_readme() -> None:
    for document in (RUNBOOKS, PROJECT_ROOT / "README.md"):
        assert set(RULES) <= set(re.findall(r"`(P\w+)`", document.read_text()))


def test_links_of_the_runbooks_lead_somewhere() -> None:
    text = RUNBOOKS.read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        assert (RUNBOOKS.parent / file).exists()
        assert not anchor or anchor in anchors(text)


def test_readme_leads_to_runbooks_that_are_there() -> None:
    links = re.findall(r"\]\(docs/runbooks\.md(?:#([^)]+))?\)", (PROJECT_ROOT / "README.md").read_text())
    assert links
    assert {anchor for anchor in links if anchor} <= anchors(RUNBOOKS.read_text())


def test_every_runbook_has_its_four_parts() -> None:
    runbooks = re.split(r"^### ", RUNBOOKS.read_text(), flags=re.MULTILINE)[1:]
    assert runbooks
    for runbook in runbooks:
        parts = re.findall(r"^\*\*(Symptom|See it|Do|It is over)\b", runbook, re.MULTILINE)
        assert parts == ["Symptom", "See it", "Do", "It is over"], runbook.splitlines()[0]


@pytest.mark.parametrize("name", sorted(RULES))
def test_alert_is_tested_to_fire_and_not_to_fire(name: str) -> None:
    assert {bool(each["exp_alerts"]) for each in CONDITIONS if each["alertname"] == name} == {True, False}


def test_alerts_and_dashboards_ask_for_metrics_that_are_exported(database_url: str) -> None:
    asked = [*queries(), *((name, rule["expr"]) for name, rule in RULES.items())]
    names = exported(exposition(database_url))
    assert {(place, name) for place, query in asked for name in _METRIC.findall(query) if name not in names} == set()


def test_table_of_the_readme_has_every_metric_and_no_other(database_url: str) -> None:
    text = (PROJECT_ROOT / "README.md").read_text()
    documented = dict(re.findall(rf"^\| `({_METRIC.pattern})(?:\{{(\w+)\}})?` \|", text, re.MULTILINE))
    scraped = exposition(database_url)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scraped, re.MULTILINE))
    assert set(documented) == set(kinds)
    for series in samples(scraped):
        name, _, labels = series.partition("{")
        if name in documented:
            assert documented[name] == labels.partition("=")[0]


def test_background_jobs_of_the_catalogue_show_duration_cards_and_errors() -> None:
    panels = DASHBOARDS["catalog-overview"]["panels"]
    (start,) = (n for n, panel in enumerate(panels) if panel["title"] == "Background jobs")
    assert panels[start]["type"] == "row"
    asked = [" ".join(target["expr"] for target in panel["targets"]) for panel in panels[start + 1 : start + 4]]
    for query, metric in zip(asked, ("duration_seconds", "cards_total", "errors_total"), strict=True):
        assert f"catalog_popularity_recompute_{metric}" in query


def test_dashboards_are_provisioned_and_ask_the_provisioned_prometheus() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/dashboards.yaml").read_text())["providers"]
    compose = yaml.safe_load((PROJECT_ROOT / "docker/compose.yaml").read_text())
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    for name, dashboard in DASHBOARDS.items():
        assert dashboard["uid"] == name
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(ids) == len(set(ids))
        for panel in dashboard["panels"]:
            assert panel["title"]
            for target in panel.get("targets", []):
                assert target["datasource"] == {"type": "prometheus", "uid": source["uid"]}


def test_prometheus_scrapes_the_exporter_of_the_compose_file() -> None:
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["exporter:9108"]}]
    compose = yaml.safe_load((PROJECT_ROOT / "docker/compose.yaml").read_text())["services"]
    assert compose["exporter"]["command"] == ["pin-pipelines", "exporter", "--port", "9108", "--address", "0.0.0.0"]
    assert "./prometheus:/etc/prometheus:ro" in compose["prometheus"]["volumes"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in compose["prometheus"]["command"]


class TestPromtool:
    pytestmark = needs_promtool

    def test_alerts_fire_when_they_must_and_at_no_other_time(self) -> None:
        tested = promtool("test", "rules", RULE_TESTS)
        assert tested.returncode == 0, tested.stdout + tested.stderr

    def test_configuration_is_valid(self) -> None:
        checked = promtool("check", "config", PROMETHEUS / "prometheus.yml")
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert f"SUCCESS: {len(RULES)} rules found" in checked.stdout

    def test_queries_of_the_dashboards_are_valid(self, tmp_path: Path) -> None:
        rules = [{"record": f"panel_{n}", "expr": query} for n, (_, query) in enumerate(queries())]
        file = tmp_path / "queries.yaml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
        checked = promtool("check", "rules", file)
        assert checked.returncode == 0, checked.stdout + checked.stderr
