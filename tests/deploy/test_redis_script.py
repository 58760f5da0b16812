"""deploy/redis.sh: a primary, a replica and sentinels that find each other, and a primary that comes back empty."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

from tests.deploy.front import DEPLOY
from tests.redis_rig import free_port, redis_binary, until

SCRIPT = ["sh", str(DEPLOY / "redis.sh")]
PASSWORD = "not.a-secret_1"


@dataclass
class Group:
    """What the script started, by name, and at which ports."""

    folder: Path
    stack: ExitStack
    ports: dict[str, int] = field(default_factory=dict)
    programs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, kind: str, name: str, *primary: str) -> None:
        port = self.ports.setdefault(name, free_port())
        path = f"{Path(redis_binary()).parent}:/usr/bin:/bin"
        down = ["300"] if kind == "sentinel" else []
        self.programs[name] = program = subprocess.Popen(
            [*SCRIPT, kind, str(self.folder / name), "127.0.0.1", str(port), *primary, *down],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PATH": path, "REDIS_PASSWORD": PASSWORD, "REDIS_RESTART_PAUSE": "3", "REDIS_MAXMEMORY": "64mb"},
        )
        self.stack.callback(program.wait)
        self.stack.callback(program.kill)

    def client(self, name: str) -> redis.Redis:
        password = None if name.startswith("sentinel") else PASSWORD
        return self.stack.enter_context(
            redis.Redis(port=self.ports[name], password=password, retry=None, socket_timeout=5)
        )

    def primary(self) -> int:
        """The port of the primary, as a sentinel knows it."""
        told = self.client("sentinel-1").execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kvpager")
        return int(told[1])


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ExitStack() as stack:
        made = Group(tmp_path, stack)
        made.start("server", "redis-1")
        made.start("server", "redis-2", "127.0.0.1", str(made.ports["redis-1"]))
        first, second = made.client("redis-1"), made.client("redis-2")
        until(lambda: first.ping() and second.info("replication")["master_link_status"] == "up")
        until(lambda: first.info("replication")["slave0"]["state"] == "online")
        for number in range(3):
            made.start("sentinel", f"sentinel-{number}", "127.0.0.1", str(made.ports["redis-1"]))
        for number in range(3):
            sentinel = made.client(f"sentinel-{number}")

            def whole(client: redis.Redis = sentinel) -> bool:
                told = client.execute_command("SENTINEL", "MASTER", "kvpager")
                pairs = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
                return (int(pairs[b"num-other-sentinels"]), int(pairs[b"num-slaves"])) == (2, 1)

            until(whole, "the sentinels did not find each other")
        yield made


def test_what_it_starts_is_bounded_protected_and_keeps_nothing_on_disk(group: Group) -> None:
    client = group.client("redis-1")
    assert client.config_get("maxmemory*")["maxmemory-policy"] == "volatile-lru"
    assert int(client.config_get("maxmemory")["maxmemory"]) == 64 * 2**20
    assert client.config_get("save")["save"] == ""
    assert client.config_get("appendonly")["appendonly"] == "no"
    with redis.Redis(port=group.ports["redis-1"], retry=None) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    assert (group.folder / "redis-1" / "server.conf").stat().st_mode & 0o77 == 0


@pytest.mark.slow
def test_a_primary_that_comes_back_empty_takes_nothing_from_its_replica(group: Group) -> None:
    client = group.client("redis-1")
    client.set("kept", "yes")
    assert client.wait(1, 5000) == 1
    group.programs["redis-1"].kill()
    group.programs["redis-1"].wait()
    group.start("server", "redis-1")  # at once, as what restarts containers does
    until(lambda: group.primary() == group.ports["redis-2"], "nobody was promoted")
    back = group.client("redis-1")
    until(lambda: back.info("replication")["role"] == "slave", "the old primary did not become a replica")
    until(lambda: back.get("kept") == b"yes", "it did not get what was kept")
    assert group.client("redis-2").get("kept") == b"yes"


@pytest.mark.parametrize(
    ("host", "password", "said"),
    [("redis-1", "", "REDIS_PASSWORD is not set"), ("127.0.0.1", 'a "b', "other characters than letters")],
)
def test_it_refuses_what_is_not_safe(tmp_path: Path, host: str, password: str, said: str) -> None:
    command = [*SCRIPT, "server", str(tmp_path), host, "1"]
    environment = {"PATH": "/usr/bin:/bin", "REDIS_PASSWORD": password}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "server.conf").exists()
