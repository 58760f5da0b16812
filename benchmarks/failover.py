"""What a takeover takes, and what a pair's journal costs: real servers, a real Redis, all on this machine.

    python benchmarks/failover.py takeovers [--model smollm2-135m] [--count 30] [--tokens 120] [--json FILE]
    python benchmarks/failover.py cost [--model smollm2-135m] [--tokens 100] [--rounds 3]

`takeovers`: eight streams run, greedy and drawn, chats and completions; the primary is killed (SIGKILL) and stopped
(SIGSTOP, later SIGCONT) in turn. Reported: seconds from the signal to the first new token at the standby and until all
streams have one, tokens that were computed again, lost and doubled, and whether the text is that of an undisturbed run.
Prompts are not shared (--no-prefix-caching): one that is found may round otherwise than one that is computed.
`cost`: tokens a second at batch 8, without a pair and as a primary with a standby's place empty, round after round.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.redis_rig import RedisServer  # noqa: E402
from tests.replication.pair import Pair, Reader, Served, asked, readers, until  # noqa: E402

LEASE_S = 1.0


def takeover(pair: Pair, by: str, number: int, expected: list[Reader], tokens: int, after: int) -> dict[str, Any]:
    """One: eight streams, the signal, the rest of them; then the pair is whole again."""
    primary, standby = pair.settled()
    reading = readers([primary.url, standby.url], asked(tokens), f"{by}-{number}-{time.time_ns()}")
    until(lambda: all(reader.count >= after for reader in reading), "the streams do not run")
    before = standby.client.get("/stats").json()
    at = time.monotonic()
    primary.kill() if by == "SIGKILL" else primary.send(signal.SIGSTOP)
    for reader in reading:
        until(lambda one=reader: one.done, "a stream does not end")
    stats = standby.client.get("/stats").json()
    firsts = [next((e.at for e in one.events if e.url == standby.url), None) for one in reading]
    times = [first - at for first in firsts if first is not None]
    result = {
        "by": by,
        "first_s": round(min(times), 3),
        "all_s": round(max(times), 3),
        "streams": len(times),
        "recomputed": stats["recomputed"] - before["recomputed"],
        "lost": sum(max(0, one.count - len(own.tokens)) for one, own in zip(expected, reading, strict=True)),
        "doubled": sum(max(0, len(own.tokens) - one.count) for one, own in zip(expected, reading, strict=True)),
        "same_text": all(
            (one.text, one.tokens) == (own.text, own.tokens) for one, own in zip(expected, reading, strict=True)
        ),
        "epoch": standby.health()["replication"]["epoch"],
    }
    if by == "SIGKILL":
        primary.start()
    else:
        primary.send(signal.SIGCONT)
    until(lambda: primary.role == "standby", "the old primary is not on standby")
    return result


def whole(server: Served, tokens: int, name: str) -> list[Reader]:
    """Undisturbed answers."""
    return [reader.join() for reader in readers([server.url], asked(tokens), name)]


def takeovers(args: argparse.Namespace) -> None:
    """As many as were asked for, SIGKILL and SIGSTOP in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = []
        with (
            RedisServer(folder / "redis") as redis,
            Pair(args.model, folder, redis.url, "--lease-seconds", str(LEASE_S), "--no-prefix-caching") as pair,
        ):
            expected = [whole(pair.settled()[0], args.tokens, f"undisturbed-{number}") for number in range(2)][1]
            for number in range(args.count):
                by = ("SIGKILL", "SIGSTOP")[number % 2]
                results.append(takeover(pair, by, number, expected, args.tokens, args.after))
                print(json.dumps(results[-1]), flush=True)
    for by in ("SIGKILL", "SIGSTOP"):
        own = [one for one in results if one["by"] == by]
        if own:
            firsts, alls = ([one[what] for one in own] for what in ("first_s", "all_s"))
            print(
                f"{by}: {len(own)} takeovers; first new token after {statistics.median(firsts):.2f} s (most "
                f"{max(firsts):.2f}), all streams after {statistics.median(alls):.2f} s (most {max(alls):.2f}); "
                f"recomputed {sum(one['recomputed'] for one in own)}, "
                f"lost {sum(one['lost'] for one in own)}, doubled {sum(one['doubled'] for one in own)}, "
                f"text as undisturbed in {sum(one['same_text'] for one in own)}"
            )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


def rate(server: Served, tokens: int, name: str) -> float:
    """Tokens a second of eight streams, from the first token of the last that began to the end of the first."""
    reading = [reader.join() for reader in readers([server.url], asked(tokens, f"round {name}"), f"{name}")]
    begin = max(reader.events[0].at for reader in reading)
    end = min(reader.events[-1].at for reader in reading)
    count = sum(len(event.tokens) for reader in reading for event in reader.events if begin < event.at <= end)
    return count / (end - begin)


def cost(args: argparse.Namespace) -> None:
    """Both kinds of server are up; they serve in turn, so that what else the machine does meets both."""
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name) / "redis") as redis:
        folder = Path(name)
        pair = ("--role", "primary", "--peer", redis.url)
        with Served(args.model, folder / "plain.log") as plain, Served(args.model, folder / "p.log", *pair) as primary:
            until(lambda: plain.ready and primary.ready, "they are not ready", 300)
            rates: dict[str, list[float]] = {"plain": [], "journal": []}
            for number in range(args.rounds):
                for kind, server in (("plain", plain), ("journal", primary)):
                    rates[kind].append(rate(server, args.tokens, f"{number}{kind}"))
                    print(f"{kind}: {rates[kind][-1]:.1f} tokens/s", flush=True)
            medians = {kind: statistics.median(values) for kind, values in rates.items()}
            lost = 100 * (1 - medians["journal"] / medians["plain"])
            print(f"median {medians['plain']:.1f} and {medians['journal']:.1f} tokens/s: it costs {lost:.1f} %")


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("takeovers", "cost"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--count", type=int, default=30, help="takeovers (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=120, help="of each answer (default: %(default)s)")
    parser.add_argument("--after", type=int, default=20, help="tokens that every client has had before the signal")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    {"takeovers": takeovers, "cost": cost}[args.what](args)


if __name__ == "__main__":
    main()
