"""deploy/cluster.py: nodes share what they computed, go on when one dies or Redis fails over, and all ends together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.front import DEPLOY, program
from tests.redis_rig import free_port, redis_binary, until
from tests.small_llm import save_folder

TEXT = "/v1/completions"
PROMPT = "the cat sat on the mat and thought of the other mat. " * 4
LINE = re.compile(r"^(\S+) +(?:http://)?(127\.0\.0\.1:\d+)\S*.*, process (\d+)$")


@dataclass
class Running:
    """What it told: addresses and processes by name, and where the logs are."""

    process: subprocess.Popen[str]
    addresses: dict[str, str]
    pids: dict[str, int]
    folder: Path

    def ask(self, name: str, prompt: str = PROMPT) -> dict[str, Any]:
        """An answer from one of them; it must be one."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"http://{self.addresses[name]}{TEXT}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def stats(self, name: str) -> dict[str, Any]:
        return dict(httpx.get(f"http://{self.addresses[name]}/stats", timeout=60).json())


@contextmanager
def cluster(model: Path, *options: str) -> Iterator[Running]:
    program("haproxy")
    redis_binary()
    command = [sys.executable, str(DEPLOY / "cluster.py"), "--model", str(model), "--port", str(free_port())]
    more = ["--threads", "1", "--pool", "4MiB", "--store-publish", "all"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, *options, "--", *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        addresses, pids, told = {}, {}, []
        for line in process.stdout:
            told.append(line)
            if match := LINE.match(line):
                addresses[match[1]], pids[match[1]] = match[2], int(match[3])
            if line.startswith("logs: "):
                yield Running(process, addresses, pids, Path(line.split()[1]))
                break
        else:
            pytest.fail("".join(told))
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=120)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.promise(4)
def test_nodes_share_survive_each_other_and_end_together(model: Path) -> None:
    with cluster(model) as running:
        first = running.ask("kvpager-1")
        text = first["choices"][0]["text"]

        def found() -> bool:  # blocks are written behind
            return int(running.ask("kvpager-2")["usage"]["prompt_tokens_details"]["cached_tokens"]) > 100

        until(found, "what one node computed was not found at the other")
        assert running.ask("kvpager-2")["choices"][0]["text"] == text
        os.kill(running.pids["redis-1"], signal.SIGKILL)
        for name in ("kvpager-1", "kvpager-2", "haproxy"):
            assert running.ask(name)["choices"][0]["text"] == text
        os.kill(running.pids["kvpager-1"], signal.SIGKILL)
        for number in range(4):
            assert running.ask("haproxy", f"{number} {PROMPT}")["choices"]
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0
    assert not any(map(is_there, running.pids.values()))
    assert not running.folder.exists()


@pytest.mark.slow
def test_of_a_pair_one_serves_and_the_other_takes_over(model: Path) -> None:
    with cluster(model, "--pair") as running:
        text = running.ask("haproxy")["choices"][0]["text"]

        def role() -> Any:
            return running.stats("kvpager-2").get("replication", {}).get("role")

        until(lambda: role() == "standby", "it is not on standby")
        os.kill(running.pids["kvpager-1"], signal.SIGKILL)
        until(lambda: role() == "primary", "it did not take over")
        assert running.ask("kvpager-2")["choices"][0]["text"] == text


@pytest.mark.slow
def test_it_ends_by_itself_after_its_time(model: Path) -> None:
    with cluster(model, "--seconds", "0.5") as running:
        assert running.process.wait(60) == 0
    assert len(running.pids) == 8
    assert not any(map(is_there, running.pids.values()))


@pytest.mark.slow
def test_nothing_stays_behind_when_it_is_killed(model: Path) -> None:
    with cluster(model) as running:
        running.process.kill()
        running.process.wait(60)
        until(lambda: not any(map(is_there, running.pids.values())), "programs outlived the one that started them")


@pytest.mark.slow
def test_what_does_not_start_is_told_and_nothing_stays(tmp_path: Path) -> None:
    command = [sys.executable, str(DEPLOY / "cluster.py"), "--model", str(tmp_path / "nothing"), "--nodes", "1"]
    done = subprocess.run(
        [*command, "--port", str(free_port())], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "kvpager-1 did not start" in done.stderr
    assert "nothing at" in done.stderr
    assert not any(is_there(int(pid)) for pid in re.findall(r"process (\d+)", done.stdout))
