"""The board for Grafana and the alert rules ask for what a live daemon exports; a real Prometheus reads all of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_daemon_metrics import scrape
from tests.reference.conversations import put_conversation, tokens_of
from tests.reference.promql import RULES, expressions, grouped_by, metrics_in
from tests.reference.running_daemon import RunningDaemon, eventually, free_port, running_daemon

BLOCKS = 6
_OF_THE_SCRAPE = {"instance", "job"}
_ONLY_THEN = {"kvstored_degraded": {"part", "mode"}}  # series that are there while something is wrong


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def daemon(port: int) -> Iterator[RunningDaemon]:
    """A daemon with hits, misses and movement."""
    with running_daemon(f"metrics.listen=127.0.0.1:{port}") as running:
        with running.connect() as session:
            put_conversation(session, 1, BLOCKS, wait="settled")
            running.drop("host")
            with session.get(tokens_of(1, BLOCKS)) as lease:
                assert len(lease) == BLOCKS
            assert session.lookup(tokens_of(2, BLOCKS)).blocks == 0
        yield running


def test_every_expression_names_what_the_daemon_exports(daemon: RunningDaemon, port: int) -> None:
    found = scrape(port)
    labels = {name: {label for key in samples for label, _ in key} for name, samples in found.items()} | _ONLY_THEN
    asked = 0
    for name, expression in expressions():
        metrics = metrics_in(expression)
        asked += len(metrics)
        for metric, matched in metrics.items():
            assert metric in labels, f"{name}: the daemon has no {metric}"
            assert matched - _OF_THE_SCRAPE <= labels[metric], f"{name}: {metric} has no such label"
        known = {label for metric in metrics for label in labels[metric]}
        assert grouped_by(expression) <= known | _OF_THE_SCRAPE, name
    assert asked > 40


@contextmanager
def prometheus(place: Path, scraped: int) -> Iterator[str]:
    """Yield the address of a Prometheus that scrapes the daemon's port each second; skip without Debian's package."""
    if shutil.which("prometheus") is None:
        pytest.skip("Debian's package prometheus is not installed")
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "kvstored", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}],
    }  # fmt: skip
    (place / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        "prometheus", f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with open(place / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as reply:
        answer = json.load(reply)
    assert answer["status"] == "success" and not answer.get("warnings")
    return answer["data"]


def value(url: str, query: str) -> float | None:
    try:
        found = ask(url, "query", query=query)["result"]
    except OSError:  # not yet up
        return None
    return float(found[0]["value"][1]) if found else None


@pytest.mark.slow
def test_a_real_prometheus_reads_the_daemon_and_answers_every_query(
    daemon: RunningDaemon, port: int, tmp_path: Path
) -> None:
    with prometheus(tmp_path, port) as url:
        assert eventually(lambda: value(url, 'up{job="kvstored"}') == 1), (tmp_path / "log").read_text()
        assert value(url, "kvstored_missed_blocks_total{cause='never_stored'}") == BLOCKS
        assert eventually(lambda: value(url, "count_over_time(kvstored_serving[1m]) >= 4") is not None)
        empty = {name for name, query in expressions() if not ask(url, "query", query=query)["result"]}
        alerts = {rule["name"]: rule for group in ask(url, "rules")["groups"] for rule in group["rules"]}
        assert all(rule["health"] == "ok" for rule in alerts.values()), alerts
        assert not ask(url, "alerts")["alerts"], "nothing is wrong"
        # A rate of a few seconds has no misses, and there is no budget.
        assert empty - alerts.keys() <= {"Misses by cause A", "Written a day B"}
        daemon.kill9()
        assert eventually(lambda: value(url, "up") == 0)
        assert eventually(lambda: any(a["labels"]["alertname"] == "KvstoredDown" for a in ask(url, "alerts")["alerts"]))
        daemon.restart()
