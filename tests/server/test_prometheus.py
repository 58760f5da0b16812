"""A real Prometheus: the alerts' own tests, and every query of the dashboard against a server that it scrapes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import LiveServer, real_server

DEPLOY = Path(__file__).parents[2] / "deploy"
SECONDS = 60.0


def program(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, f"{name} is missing: apt-get install prometheus"
    return found


def test_alerts_fire_when_they_should_and_not_before() -> None:
    rules = DEPLOY / "prometheus" / "alerts.yml"
    for arguments in (("check", "rules", rules), ("test", "rules", DEPLOY / "prometheus" / "alerts_test.yml")):
        done = subprocess.run([program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_that_sees_it_fire() -> None:
    rules = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    tests = (DEPLOY / "prometheus" / "alerts_test.yml").read_text()
    alerts = [line.split(":")[1].strip() for line in rules.splitlines() if line.strip().startswith("- alert:")]
    assert alerts
    for alert in alerts:
        assert f"alertname: {alert}\n        exp_alerts:" in tests, f"{alert} never fires in a test"


@pytest.fixture(scope="module")
def watched(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, httpx.Client]]:
    """A server with work behind it, and a Prometheus that scrapes it every second."""
    place = tmp_path_factory.mktemp("prometheus")
    with real_server(folder, pool="56KiB", budget=64, store=place / "store.db") as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(DEPLOY / "prometheus" / "alerts.yml")],
            "scrape_configs": [
                {"job_name": "kvpager", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]},
            ],
        }
        (place / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        command = [
            program("prometheus"),
            f"--config.file={place / 'prometheus.yml'}",
            f"--storage.tsdb.path={place / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (place / "log").open("w") as log:
            running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                wait(lambda: value(client, 'up{job="kvpager"}') == 1)
                for number in range(3):
                    server.complete(f"the {number}th of some longer texts " * 4, max_tokens=30, ignore_eos=True)
                wait(lambda: value(client, "kvpager_generation_tokens_total") == 90)
                # two scrapes after the work, so that rates have something to say
                scraped = value(client, "count_over_time(kvpager_generation_tokens_total[1h])") or 0
                wait(lambda: (value(client, "count_over_time(kvpager_generation_tokens_total[1h])") or 0) > scraped + 1)
                yield server, client
        finally:
            running.terminate()
            running.wait(timeout=SECONDS)


def wait(condition: Any) -> None:
    until = time.monotonic() + SECONDS
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass  # it is still starting
        assert time.monotonic() < until, "waited for too long"
        time.sleep(0.1)


def query(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    given = client.get("/api/v1/query", params={"query": expression})
    answer = given.raise_for_status().json()  # 503 while it starts
    assert answer["status"] == "success", f"{expression}: {answer}"
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def value(client: httpx.Client, expression: str) -> float | None:
    found = query(client, expression)
    return float(found[0]["value"][1]) if found else None


@pytest.mark.slow
def test_every_query_of_the_dashboard_has_an_answer(watched: tuple[LiveServer, httpx.Client]) -> None:
    _, client = watched
    dashboard = json.loads((DEPLOY / "grafana" / "kvpager.json").read_text())
    asked = 0
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
            found = query(client, expression)
            if "memory_limit" not in expression:  # there need not be a limit
                assert found, f"{panel['title']}: nothing for {expression}"
            asked += 1
    assert asked > 30


@pytest.mark.slow
def test_the_alerts_are_loaded_and_a_healthy_server_raises_none(watched: tuple[LiveServer, httpx.Client]) -> None:
    _, client = watched
    groups = client.get("/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == (DEPLOY / "prometheus" / "alerts.yml").read_text().count("- alert:")
    assert all(rule["health"] in ("ok", "unknown") and not rule.get("lastError") for rule in rules)
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
