"""Serve a mixed load for minutes, with clients that go away, and see that memory stays flat and the books balance.

    python benchmarks/soak.py --minutes 10 --json soak.json
    python benchmarks/soak.py --url http://127.0.0.1:8000 --minutes 10       # against a server that runs already

Without --url it starts `kvpager serve` on a tiny random model with a small pool, so that pages come and go all the
time. Exit code 0: no answer was wrong, memory grew by less than --growth after the first fifth, and nothing was left
running at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

READY_S = 120.0


@contextmanager
def own_server(folder: Path) -> Iterator[tuple[str, int]]:
    """A server on a tiny model: its URL and process id."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.small_llm import save_folder

    model = save_folder(folder / "model")
    code = "import sys; from kvpager.cli.main import main; sys.exit(main())"
    options = ["serve", str(model), "--port", "0", "--pool", "256", "--max-num-seqs", "8", "--grace", "5"]
    log = (folder / "log").open("wb")
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options], stdout=log, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    try:
        url = next(part for line in process.stderr for part in line.split() if part.startswith("http://"))
        yield url.removesuffix("/ready"), process.pid
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def resident_bytes(pid: int) -> int:
    """The resident set of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def ask(client: httpx.AsyncClient, random_: random.Random, counts: Counter[str]) -> None:
    """One client of a random kind; every kind checks what it gets."""
    shared = "All requests of this kind begin with the same words. " * random_.randint(1, 4)
    prompt = shared + f"Number {random_.randint(0, 999)}."
    tokens = random_.choice((1, 8, 32, 100))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": random_.randint(0, 9)}
    kind = random_.choices(("whole", "stream", "several", "leave", "wrong"), (4, 4, 1, 2, 1))[0]
    if kind == "wrong":
        answer = await client.post("/v1/completions", json={**body, "n": 10**6})
        counts["wrong refused" if answer.status_code == 400 else "failed"] += 1
    elif kind == "leave":
        try:
            async with asyncio.timeout(random_.uniform(0.001, 0.5)):
                await client.post("/v1/completions", json={**body, "max_tokens": 200, "stream": random_.random() < 0.5})
            counts["finished before it left"] += 1
        except TimeoutError:
            counts["left"] += 1
    elif kind == "stream":
        answer = await client.post(
            "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        events = answer.text.rstrip().split("\n\n")
        good = events[-1] == "data: [DONE]"
        good = good and json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == tokens
        counts["streamed" if good else "failed"] += 1
    else:
        n = 3 if kind == "several" else 1
        answer = await client.post("/v1/completions", json={**body, "n": n})
        good = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == tokens * n
        counts["answered" if good else "failed"] += 1


async def soak(url: str, pid: int | None, minutes: float, clients: int, seed: int) -> dict[str, Any]:
    """Keep `clients` busy for `minutes`; then the figures."""
    counts: Counter[str] = Counter()
    memory: list[int] = []
    end = time.monotonic() + minutes * 60
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        ready_by = time.monotonic() + READY_S
        while (await client.get("/ready")).status_code != 200:
            assert time.monotonic() < ready_by, "the server did not become ready"
            await asyncio.sleep(0.2)

        async def one(number: int) -> None:
            random_ = random.Random(seed * 1000 + number)
            while time.monotonic() < end:
                try:
                    await ask(client, random_, counts)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    counts[f"failed: {type(error).__name__}"] += 1

        async def watch() -> None:
            while time.monotonic() < end:
                if pid is not None:
                    memory.append(resident_bytes(pid))
                assert (await client.get("/health")).status_code == 200
                await asyncio.sleep(1)

        await asyncio.gather(watch(), *(one(number) for number in range(clients)))
        stats: dict[str, Any] = {}
        for _ in range(100):  # aborts of the last clients are still on their way
            stats = (await client.get("/stats")).json()
            if stats["running"] == stats["waiting"] == stats["pager"]["sequences"] == 0:
                break
            await asyncio.sleep(0.1)
    settled = memory[len(memory) // 5 :]
    growth = max(settled) / settled[0] - 1 if settled else None
    return {"seconds": minutes * 60, "counts": dict(counts), "growth": growth, "memory_bytes": memory, "stats": stats}


def verdict(figures: dict[str, Any], growth: float) -> list[str]:
    """What is not as it should be."""
    stats = figures["stats"]
    wrong = [f"{name}: {count}" for name, count in figures["counts"].items() if name.startswith("failed")]
    if figures["growth"] is not None and figures["growth"] > growth:
        wrong.append(f"memory grew by {figures['growth']:.1%}")
    for name, left in (*((n, stats[n]) for n in ("running", "waiting")), ("sequences", stats["pager"]["sequences"])):
        if left:
            wrong.append(f"{left} {name} are left")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already (its memory is not watched)")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--growth", type=float, default=0.02, help="of the resident set, after the first fifth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="all figures")
    args = parser.parse_args()
    if args.url:
        figures = asyncio.run(soak(args.url, None, args.minutes, args.clients, args.seed))
    else:
        with tempfile.TemporaryDirectory() as folder, own_server(Path(folder)) as (url, pid):
            figures = asyncio.run(soak(url, pid, args.minutes, args.clients, args.seed))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))
    wrong = verdict(figures, args.growth)
    growth = "not watched" if figures["growth"] is None else f"{figures['growth']:.2%}"
    print(figures["counts"], "memory growth:", growth, "finished:", figures["stats"].get("finished"))
    print("\n".join(wrong) if wrong else "all is as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
