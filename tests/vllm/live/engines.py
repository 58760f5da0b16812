"""vLLM in another process and environment, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK = 32  # tokens
STEP = 256  # tokens a step computes at most: prompts of more are computed in pieces
DRIVER = Path(__file__).parent / "driver.py"
END_S = 60


class Engine:
    """A driver's methods, called across the pipe."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def __getattr__(self, name: str) -> Any:
        return lambda **arguments: self.ask(name, **arguments)

    def ask(self, name: str, /, **arguments: Any) -> Any:
        """Call and wait for the answer."""
        self.send(name, **arguments)
        return self.receive()

    def send(self, name: str, /, **arguments: Any) -> None:
        """Call without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"vLLM has ended:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(END_S)


def transfer(store: Path, **more: Any) -> dict[str, Any]:
    """vLLM's setting that names the connector and its store; `more` goes to the store's settings."""
    return {
        "kv_connector": "KVPagerConnector",
        "kv_connector_module_path": "kvpager.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(store), **more},
    }


def settings(model: Path, store: Path | None, **more: Any) -> dict[str, Any]:
    """Arguments of LLM for the tiny model; float32, so that what else runs in a step decides no token."""
    found: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "block_size": BLOCK,
        "max_num_batched_tokens": STEP,
        "enforce_eager": True,
    }
    if store is not None:
        found["kv_transfer_config"] = transfer(store)
    return {**found, **more}


@contextmanager
def engine(folder: Path, options: dict[str, Any]) -> Iterator[Engine]:
    """An engine that runs until the end of the block; its log is in `folder`."""
    log = folder / f"vllm-{len(list(folder.glob('vllm-*.log')))}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [os.environ["KVPAGER_VLLM"], str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(options) + "\n")
            process.stdin.flush()
            found = Engine(process, log)
            assert found.receive() == "ready"
            yield found
            if process.poll() is None:
                process.communicate(timeout=END_S)
                assert process.returncode == 0, log.read_text()[-4000:]
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(END_S)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()
