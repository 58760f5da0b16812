"""``kvpager serve``: the OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from kvpager.cli.console import say
from kvpager.cli.options import (
    DEFAULT_MODEL,
    add_model_options,
    add_pager_options,
    load_model,
    number,
    pager_options,
    positive,
    whole,
)
from kvpager.cli.pair_options import Member, add_pair_options, node_name, pair_options, share_pages
from kvpager.cli.store_options import add_store_options, store_options
from kvpager.config import parse_size
from kvpager.errors import ConfigError

if TYPE_CHECKING:
    from kvpager.build import PagerOptions, StoreOptions
    from kvpager.engine.engine import Engine, EngineConfig
    from kvpager.server.service import Served, Service, ServiceOptions
    from kvpager.stats import StoreStats

__all__ = ["add_parser", "run"]

MIB = 2**20
EPILOG = """\
examples:
  kvpager serve
  kvpager serve --port 8001 --memory 256MiB --budget 1024 --max-num-seqs 32
  kvpager serve --store ~/kv/store.db
  kvpager serve --role standby --peer redis://10.0.0.5:6379
  KVPAGER_API_KEY=change-me kvpager serve path/to/model --host 0.0.0.0 --served-model-name mine

Then, with any client of OpenAI's:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is demand paging?"}], "max_tokens": 64}'

One line of JSON for each request goes to standard output, without what was asked and answered.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve`` and its options."""
    parser = subparsers.add_parser(
        "serve",
        help="answer the requests of OpenAI's clients",
        description="Serve a model to OpenAI's clients, many requests at once in a bounded KV memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("served", nargs="?", metavar="MODEL", help="the model; the same as --model")
    _add_server_options(parser)
    _add_engine_options(parser)
    _add_limits(parser)
    add_model_options(parser)
    add_pager_options(parser)
    add_store_options(parser)
    add_pair_options(parser)
    parser.set_defaults(run=run)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    group.add_argument(
        "--port",
        type=whole(0, 65535),
        default=8000,
        metavar="N",
        help="port; 0 takes a free one (default: %(default)s)",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="the model's names for clients; the first is in answers (default: the model's own)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that clients must send; may be given several times. Others can see a program's options: "
        "rather use KVPAGER_API_KEY or --api-key-file",
    )
    group.add_argument(
        "--api-key-file", metavar="FILE", help="a file with a key a line; lines that begin with # are left out"
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages whose scripts may use the server, as https://example.org, or * (default: none)",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="names that clients may reach the server by, beside addresses and localhost, or * (default: none where it "
        "listens on this machine alone and has no key, so that no web page gets in by a name of its own; else all)",
    )
    group.add_argument("--log-prompts", action="store_true", help="put prompts and answers into the log")
    group.add_argument(
        "--grace",
        type=number(0, 86400),
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM or Ctrl-C (default: 30)",
    )
    group.add_argument("--ssl-keyfile", metavar="FILE", help="the private key for TLS")
    group.add_argument("--ssl-certfile", metavar="FILE", help="the certificate for TLS")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-model-len",
        type=whole(2),
        metavar="N",
        help="tokens of prompt and answer together (default: the model's)",
    )
    group.add_argument(
        "--max-num-seqs", type=positive, default=16, metavar="N", help="answers written at once (default: %(default)s)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="tokens of one step: a token for each answer, then chunks of prompts (default: %(default)s)",
    )
    group.add_argument(
        "--max-queue", type=whole(0), default=256, metavar="N", help="requests that may wait (default: %(default)s)"
    )
    group.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="compute what begins the same as an earlier prompt again (default: it is shared, within one API key)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits of one request")
    group.add_argument("--max-body", default="4MiB", metavar="SIZE", help="size of a request (default: %(default)s)")
    group.add_argument(
        "--max-prompt-tokens", type=positive, metavar="N", help="tokens of a prompt (default: the context's)"
    )
    group.add_argument(
        "--max-tokens-limit", type=positive, metavar="N", help="tokens of an answer (default: the context's)"
    )
    group.add_argument(
        "--max-n", type=whole(1, 128), default=16, metavar="N", help="answers to a prompt (default: %(default)s)"
    )
    group.add_argument(
        "--request-timeout",
        type=number(0.001, 1e9),
        metavar="SECONDS",
        help="answers are cut after it (default: never)",
    )
    group.add_argument(
        "--resume-seconds",
        type=number(0, 1e6),
        default=60.0,
        metavar="SECONDS",
        help="a request with an Idempotency-Key goes on so long without its client, and is kept so long after its end "
        "(default: %(default)g)",
    )
    group.add_argument(
        "--max-connections",
        type=positive,
        default=256,
        metavar="N",
        help="requests open at once (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns 0. Raises what listening, loading and paging raise."""
    from kvpager import build

    if args.served is not None:
        if args.model != DEFAULT_MODEL:
            raise ConfigError("model: give either MODEL or --model, not both")
        args.model = args.served
    options = pager_options(args)
    options.settings()  # refused before a model is loaded
    pair = pair_options(args)
    if pair is not None:
        share_pages(args, pair)
    store = store_options(args, options)
    build.require_server()
    from kvpager.engine.engine import EngineConfig
    from kvpager.server.logs import configure_logs
    from kvpager.server.run import RunOptions, listen, serve
    from kvpager.server.service import Service

    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        raise ConfigError("ssl_keyfile: TLS needs both --ssl-keyfile and --ssl-certfile")
    config = EngineConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        max_queue=args.max_queue,
        enable_prefix_caching=not args.no_prefix_caching,
        seed=args.seed,
    )
    settings = RunOptions(args.grace, args.ssl_keyfile, args.ssl_certfile)
    configure_logs()
    with listen(args.host, args.port) as listener:
        where = url(listener, tls=args.ssl_certfile is not None)
        say(f"loading {args.model}; {where}/ready says when it is there")
        member = None if pair is None else Member(pair, args.node_name or node_name(listener))
        maker = Maker(args, options, config, store, member)
        service = Service(maker, service_options(args), None if member is None else member.node.state)

        def on_ready() -> None:
            say(maker.told(where, service))
            if member is not None:
                member.start(service)

        try:
            asyncio.run(serve(service, listener, settings, on_ready=on_ready))
        finally:
            if member is not None:
                member.node.close()
    say("stopped")
    return 0


def service_options(args: argparse.Namespace) -> ServiceOptions:
    """How to serve, from the command line and the environment. Raises ConfigError."""
    from kvpager.server.auth import collect_keys
    from kvpager.server.hosts import is_loopback
    from kvpager.server.limits import Limits
    from kvpager.server.service import ServiceOptions

    keys = tuple(collect_keys(args.api_key, args.api_key_file, os.environ))
    return ServiceOptions(
        names=tuple(args.served_model_name or [own_name(args.model)]),
        api_keys=keys,
        limits=Limits(
            body_bytes=parse_size(args.max_body, "max_body"),
            prompt_tokens=args.max_prompt_tokens,
            max_tokens=args.max_tokens_limit,
            n=args.max_n,
            connections=args.max_connections,
        ),
        allowed_origins=tuple(args.allowed_origins),
        hosts=hosts(args.allowed_hosts, open_to_others=bool(keys) or not is_loopback(args.host)),
        log_prompts=args.log_prompts,
        request_seconds=args.request_timeout,
        resume_seconds=args.resume_seconds,
    )


def hosts(given: list[str] | None, *, open_to_others: bool) -> tuple[str, ...] | None:
    """The names that the server goes by; None for all."""
    if given is None:
        return None if open_to_others else ()
    return None if "*" in given else tuple(name.lower().removesuffix(".") for name in given)


def own_name(model: str) -> str:
    """A model's name for clients: that of a file or folder without the way to it, which is nobody's business."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def url(listener: socket.socket, *, tls: bool) -> str:
    """Where a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"http{'s' if tls else ''}://{host}:{port}"


def memory_line(engine: Engine, weight_bytes: int) -> str:
    """The memory whole."""
    stats = engine.stats().pager
    holds = stats.pool_bytes // engine.pager.shape.token_bytes
    return (
        f"memory: weights {weight_bytes / MIB:.0f} MiB, KV {stats.resident_bytes / MIB:.0f} MiB "
        f"(frames {stats.pool_bytes / MIB:.0f}, digests {stats.digest_bytes / MIB:.1f}, "
        f"tables {stats.table_bytes / MIB:.1f}; {holds} tokens at once, the rest in swap), "
        f"process {stats.peak_rss_bytes / MIB:.0f} MiB so far"
    )


class Maker:
    """Loads model and engine, in the engine's thread, and tells what came of it."""

    def __init__(
        self,
        args: argparse.Namespace,
        options: PagerOptions,
        config: EngineConfig,
        store: StoreOptions | None = None,
        member: Member | None = None,
    ) -> None:
        self._args, self._options, self._config, self._store = args, options, config, store
        self._member = member
        self._held: list[str] = []

    def __call__(self) -> Served:
        """Load; raises what loading and paging raise."""
        from kvpager import build
        from kvpager.server.service import Served

        args = self._args
        loaded = load_model(args, identify=self._store is not None)
        more = {} if self._member is None else self._member.parts(self._store)
        engine = build.make_engine(loaded, self._options, self._config, store=self._store, **more)
        if self._member is not None:
            self._member.meet(engine)
        longest = self._config.max_model_len or loaded.context_length or 0
        self._held = [memory_line(engine, loaded.weight_bytes), *self._store_lines(engine)]
        return Served(engine, loaded.tokenizer, longest)

    def _store_lines(self, engine: Engine) -> list[str]:
        """What the store has from earlier, or why it is out of use."""
        stats = engine.stats().store
        if self._store is None or stats is None:
            return []
        places = [place for place in (self._store.path, self._store.told["url"]) if place is not None]
        return [store_line(place, tier) for place, tier in zip(places, stats.tiers.values(), strict=True)]

    def told(self, where: str, service: Service) -> str:
        """Lines for people: what is served, where, the memory whole, and what the store has."""
        names = ", ".join(service.options.names)
        keys = len(service.keys)
        access = f"{keys} API key{'s' * (keys > 1)}" if keys else "no API key: everybody who reaches it may use it"
        held = "\n".join(self._held)
        return (
            f"{held}\n"
            f"serving {names} at {where}/v1 ({access}); {self._config.max_num_seqs} answers at once, "
            f"up to {service.max_model_len} tokens each. Ctrl-C stops it."
        )


def store_line(place: str, stats: StoreStats) -> str:
    """What a tier of the store has from earlier, or why it is out of use."""
    if stats.state != "ok":
        return f"store: {place} is out of use ({stats.state}); requests are served without it"
    return (
        f"store: {place} holds {stats.blocks} blocks and {stats.records} sessions, {stats.bytes / MIB:.0f} of at most "
        f"{stats.limit_bytes / MIB:.0f} MiB {'in Redis' if '://' in place else 'on disk'}, pages of prompts among them"
    )
