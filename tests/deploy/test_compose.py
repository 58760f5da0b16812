"""docker-compose.yml and what it mounts fit together, and commands are understood by the programs they are for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpager.cli.main import build_parser
from kvpager.cli.options import pager_options
from kvpager.cli.pair_options import pair_options
from kvpager.cli.store_options import store_options
from kvpager.config import parse_size
from kvpager.server.auth import ENVIRONMENT
from kvpager.stores.redis_url import PASSWORD
from tests.deploy.front import DEPLOY, ROOT, program

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NODES = ["kvpager-1", "kvpager-2"]
KEYS = {"build", "image", "command", "entrypoint", "environment", "depends_on", "restart", "stop_grace_period"}
KEYS |= {"expose", "ports", "volumes", "secrets", "tmpfs", "read_only", "cap_drop", "security_opt", "user"}
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+(-[a-z0-9-]+)?")


def each(key: str) -> list[tuple[str, Any]]:
    """What the services that have it say under a key."""
    return [(name, service[key]) for name, service in SERVICES.items() if key in service]


def test_it_has_what_compose_knows_and_no_more() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"name", "services", "secrets", "volumes"}
    for name, service in SERVICES.items():
        assert set(service) <= KEYS, name
        assert "image" in service, name
    assert set(NODES) < set(SERVICES)


def test_a_pair_is_the_same_nodes_with_roles() -> None:
    pair = yaml.safe_load((DEPLOY / "pair.yml").read_text())["services"]
    assert list(pair) == NODES
    for name, role in zip(NODES, ("primary", "standby"), strict=True):
        command = pair[name]["command"]
        assert command[:-2] == SERVICES[name]["command"]
        args = build_parser().parse_args(command)
        options = pair_options(args)
        assert options is not None
        assert (args.role, options.eager) == (role, role == "primary")
        assert options.meets_at(store_options(args, pager_options(args)).url)  # type: ignore[union-attr]


def test_images_are_pinned() -> None:
    for name, image in each("image"):
        assert PINNED.fullmatch(image), f"{name}: {image}"


def test_what_is_depended_on_mounted_and_secret_is_there() -> None:
    for name, others in each("depends_on"):
        assert set(others) <= set(SERVICES), name
    for name, secrets in each("secrets"):
        assert set(secrets) <= set(COMPOSE["secrets"]), name
    used = set()
    for name, volumes in each("volumes"):
        for source in (volume.split(":")[0] for volume in volumes):
            if source.startswith("./"):
                assert (DEPLOY / source).is_file(), f"{name}: {source}"
            else:
                used.add(source)
    assert used == set(COMPOSE["volumes"])


def test_services_can_do_no_more_than_they_need() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    assert all(str(port).startswith("127.0.0.1:") for _, ports in each("ports") for port in ports)


def test_secrets_have_no_default_and_the_example_names_them() -> None:
    text = (DEPLOY / "docker-compose.yml").read_text()
    asked = set(re.findall(r"\$\{(\w+):\?", text))
    example = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "env.example").read_text(), re.M))
    assert asked == {name for name, value in example.items() if not value}
    assert {name for name, _ in re.findall(r"\$\{(\w+)(:-|:\?)", text)} == set(example)
    assert all(set(SERVICES[node]["environment"]) == {ENVIRONMENT, PASSWORD} for node in NODES)


@pytest.mark.parametrize("node", NODES)
def test_nodes_commands_are_understood(node: str) -> None:
    service = SERVICES[node]
    args = build_parser().parse_args(service["command"])
    assert args.host == "0.0.0.0"
    assert [str(args.port)] == service["expose"]
    assert parse_size(args.memory, "memory") > 0
    folders = [volume.split(":")[1] for volume in service["volumes"]]
    assert folders == [str(Path(args.store[0]).parent)]
    store = store_options(args, pager_options(args))
    assert store is not None
    most = re.search(r"REDIS_MAXMEMORY:-(\d+)gb", (DEPLOY / "docker-compose.yml").read_text())
    assert most is not None
    assert parse_size(store.shared_limit, "shared") < int(most[1]) * 2**30  # Redis's own bound is the last one
    assert int(str(service["stop_grace_period"]).removesuffix("s")) > args.grace


def test_all_of_it_names_the_same_ports() -> None:
    haproxy, nginx = (DEPLOY / "haproxy.cfg").read_text(), (DEPLOY / "nginx.conf").read_text()
    for number, node in enumerate(NODES, 1):
        address = f"{node}:{SERVICES[node]['expose'][0]}"
        assert f'"${{KVPAGER_NODE{number}-{address}}}"' in haproxy
        assert f"server {address} " in nginx
    assert SERVICES["haproxy"]["ports"] == ["127.0.0.1:8080:8080"]
    assert '"${KVPAGER_BIND-:8080}"' in haproxy
    assert "listen 8080;" in nginx


def test_prometheus_reads_services_that_are_there() -> None:
    settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in settings["scrape_configs"]}
    for job in jobs.values():
        for target in job["static_configs"][0]["targets"]:
            name, _, port = target.partition(":")
            assert port in SERVICES[name]["expose"], target
    assert len(jobs["kvpager"]["static_configs"][0]["targets"]) == len(NODES)
    secret = Path(jobs["kvpager"]["authorization"]["credentials_file"])
    assert [secret.name] == SERVICES["prometheus"]["secrets"]
    assert COMPOSE["secrets"][secret.name] == {"environment": ENVIRONMENT}
    assert any(":/etc/prometheus/prometheus.yml:" in volume for volume in SERVICES["prometheus"]["volumes"])


def test_grafana_reads_prometheus() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"]
    assert source["url"] == f"http://prometheus:{SERVICES['prometheus']['expose'][0]}"


def test_redis_and_sentinels_agree_with_the_nodes() -> None:
    roles = {name: command for name, command in each("command") if command[0] in ("server", "sentinel")}
    for name, command in roles.items():
        assert command[2] == name  # others reach it by its service's name
        assert SERVICES[name]["entrypoint"] == ["sh", "/etc/kvpager/redis.sh"]
        if command[4:]:
            assert command[4:] == [roles["redis-1"][2], roles["redis-1"][3]]
    sentinels = ",".join(f"{name}:{command[3]}" for name, command in roles.items() if command[0] == "sentinel")
    assert f"--store=redis+sentinel://{sentinels}/kvpager" in SERVICES["kvpager-1"]["command"]


def test_haproxy_takes_its_configuration() -> None:
    done = subprocess.run(
        [program("haproxy"), "-c", "-f", str(DEPLOY / "haproxy.cfg")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_image_is_built_from_what_is_there_and_serves() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    said = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert all(PINNED.fullmatch(rest.split()[0]) for word, rest in said if word == "FROM")
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    for copied in (rest.split()[:-1] for word, rest in said if word == "COPY" and not rest.startswith("--from")):
        assert set(copied) <= kept
        assert all((ROOT / name).exists() for name in copied)
    assert ["USER", "kvpager"] in said
    (command,) = (yaml.safe_load(rest) for word, rest in said if word == "CMD")
    assert build_parser().parse_args(command).host == "0.0.0.0"
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.M)
    assert torch is not None
    assert torch[0] in (DEPLOY / "Dockerfile").read_text()
    extras = re.search(r"'\.\[(.*)\]'", (DEPLOY / "Dockerfile").read_text())
    assert extras is not None
    assert {"serve", "redis"} <= set(extras[1].split(","))
