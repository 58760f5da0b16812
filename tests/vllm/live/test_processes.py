"""vLLM as users run it, scheduler and worker in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.vllm.live.conftest import prompt
from tests.vllm.live.engines import BLOCK, STEP, Engine, transfer

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm_store.py"
TOKENS = 24
WAIT_S = 300


def environment() -> dict[str, str]:
    more = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    return {**os.environ, **more, "VLLM_LOGGING_LEVEL": "WARNING"}


@contextmanager
def server(model: Path, store: Path, log: Path) -> Iterator[httpx.Client]:
    """vLLM's OpenAI server on a store, until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"model": model, "port": port, "host": "127.0.0.1", "dtype": "float32", "max-model-len": 2048}
    options |= {"block-size": BLOCK, "max-num-batched-tokens": STEP, "kv-transfer-config": json.dumps(transfer(store))}
    named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    module = "vllm.entrypoints.openai.api_server"
    command = [os.environ["KVPAGER_VLLM"], "-m", module, "--enforce-eager", "--enable-prompt-tokens-details", *named]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
                while not ready(client):
                    assert process.poll() is None, log.read_text()[-4000:]
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)


def ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def answers(client: httpx.Client, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Token ids that were answered to each, and how many of its tokens were found; all asked at once."""

    def one(tokens: list[int]) -> tuple[list[int], int]:
        body: dict[str, Any] = {"prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body | {"return_token_ids": True}).raise_for_status().json()
        details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        return answer["choices"][0]["token_ids"], details["cached_tokens"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def metric(client: httpx.Client, name: str) -> float:
    text = client.get("/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"vllm:kvpager_{name}"))


def test_sixteen_clients_of_a_server_that_is_started_again(
    model: Path, alone: Engine, store: Path, tmp_path: Path
) -> None:
    prompts = [prompt(200 + marker, 100 + 20 * marker) for marker in range(16)]
    expected = [one["tokens"] for one in alone.generate(prompts=prompts, tokens=TOKENS)]
    with server(model, store, tmp_path / "first.log") as client:
        assert [tokens for tokens, _ in answers(client, prompts)] == expected
        assert metric(client, "saved_blocks_total") > 0
    with server(model, store, tmp_path / "second.log") as client:
        found = answers(client, prompts)
        assert [tokens for tokens, _ in found] == expected
        assert [cached for _, cached in found] == [(len(one) - 1) // BLOCK * BLOCK for one in prompts]
        assert metric(client, "loaded_blocks_total") == sum((len(one) - 1) // BLOCK for one in prompts)
        assert metric(client, "lost_blocks_total") == 0
        assert metric(client, "store_usable") == 1


def test_the_example_finds_the_second_time_what_it_computed_the_first(model: Path, store: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
    command = [os.environ["KVPAGER_VLLM"], str(EXAMPLE), str(model), str(store)]
    told = []
    for _ in range(2):
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr[-4000:]
        match = re.search(r"(\d+) of (\d+) tokens found.*\nanswer: (.*)", done.stdout)
        assert match, done.stdout
        told.append(match.groups())
    (none, length, first), (found, _, second) = told
    assert (int(none), int(found)) == (0, (int(length) - 1) // 128 * 128)
    assert first == second


def test_vllm_does_not_start_with_a_policy_that_fails_requests(model: Path, store: Path, tmp_path: Path) -> None:
    wrong = transfer(store) | {"kv_load_failure_policy": "fail"}
    driver = Path(__file__).parent / "driver.py"
    settings = {"model": str(model), "enforce_eager": True, "max_model_len": 512, "kv_transfer_config": wrong}
    command = [os.environ["KVPAGER_VLLM"], str(driver)]
    done = subprocess.run(command, input=json.dumps(settings) + "\n", capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode != 0
    assert "must be 'recompute'" in done.stderr
    assert not store.exists()
