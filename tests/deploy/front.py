"""HAProxy and nginx with the configurations of deploy/, in front of two nodes on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.redis_rig import free_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SECONDS = 30.0


def program(name: str) -> str:
    """The path of a program that tests need; where it is missing the test fails and says so."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")
    if found is None:
        pytest.fail(f"{name} is missing: apt-get install {'nginx-light' if name == 'nginx' else name}")
    return found


@contextmanager
def haproxy(folder: Path, nodes: tuple[int, int], metrics: int | None = None) -> Iterator[str]:
    """HAProxy in front of two ports; gives its URL."""
    port = free_port()
    settings = {
        "KVPAGER_BIND": f"127.0.0.1:{port}",
        "KVPAGER_METRICS_BIND": f"127.0.0.1:{metrics or free_port()}",
        "KVPAGER_NODE1": f"127.0.0.1:{nodes[0]}",
        "KVPAGER_NODE2": f"127.0.0.1:{nodes[1]}",
    }
    with running([program("haproxy"), "-db", "-f", str(DEPLOY / "haproxy.cfg")], folder, port, settings):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def nginx(folder: Path, nodes: tuple[int, int]) -> Iterator[str]:
    """Nginx in front of two ports, its configuration in one like a distribution's; gives its URL."""
    port = free_port()
    ours = (DEPLOY / "nginx.conf").read_text()
    for old, new in (
        ("listen 8080;", f"listen 127.0.0.1:{port};"),
        ("server kvpager-1:8000 ", f"server 127.0.0.1:{nodes[0]} "),
        ("server kvpager-2:8000 ", f"server 127.0.0.1:{nodes[1]} "),
    ):
        assert ours.count(old) == 1, f"deploy/nginx.conf has {old!r} not once"
        ours = ours.replace(old, new)
    (folder / "kvpager.conf").write_text(ours)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "\n".join(f"    {kind}_temp_path {folder}/{kind};" for kind in kinds)
    whole = f"""daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/errors.txt;
events {{ worker_connections 512; }}
http {{
    access_log off;
{paths}
    include {folder}/kvpager.conf;
}}
"""
    (folder / "nginx.conf").write_text(whole)
    command = [program("nginx"), "-p", str(folder), "-e", f"{folder}/errors.txt", "-c", f"{folder}/nginx.conf"]
    with running(command, folder, port, {}):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running(command: list[str], folder: Path, port: int, environment: dict[str, str]) -> Iterator[None]:
    """A program that listens on a port of this machine, until it is left."""
    log = folder / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        end = time.monotonic() + SECONDS
        while not listens(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.01)
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait(SECONDS)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
