"""Running the server: a socket, uvicorn around the application, and an end in good order."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from kvpager.errors import ConfigError
from kvpager.server.app import create_app
from kvpager.server.service import Service

__all__ = ["RunOptions", "listen", "serve"]

BACKLOG = 1024
LATE_S = 5  # after the grace time: for answers that were cut short to reach their clients


@dataclass(frozen=True)
class RunOptions:
    """How long requests may go on after a signal to end, and the files for TLS."""

    grace_s: float = 30.0
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None


class _Server(uvicorn.Server):
    """uvicorn's server, but signals are handled by :func:`serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that a port in use is known before a model is loaded.

    Port 0 takes a free one. Raises OSError with a message that says where.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(f"can't listen on {host}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"can't listen on {host} port {port}: {error.strerror}") from None
    return listener


async def serve(
    service: Service,
    listener: socket.socket,
    options: RunOptions,
    *,
    on_ready: Callable[[], None] = lambda: None,
    stopping: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until `stopping` is set (then signals are the caller's matter).

    Requests are answered with 503 until the engine is there, then `on_ready` is called. At the end no connection is
    taken any more, what runs may finish within the grace time, and the rest is ended; a second signal ends it at once.
    Raises what loading the model raises, and ConfigError for files that TLS can't use.
    """
    server = _Server(_config(service, options))
    hurry = asyncio.Event()
    if stopping is None:
        stopping = asyncio.Event()
        _handle_signals(stopping, hurry)
    service.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(_load(service, on_ready))
    stopped = asyncio.create_task(stopping.wait())
    hurried = asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait({loading, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done() or loading.exception() is None:
            await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        ending = asyncio.create_task(service.stop(options.grace_s))
        await asyncio.wait({ending, hurried}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await service.stop(0)
        await asyncio.gather(serving, ending)
        loaded = loading.done()
        for task in (stopped, hurried, loading):
            task.cancel()
    if loaded:
        await loading  # raises what loading raised


async def _load(service: Service, on_ready: Callable[[], None]) -> None:
    await service.engine.ready()
    on_ready()


def _handle_signals(stopping: asyncio.Event, hurry: asyncio.Event) -> None:
    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _config(service: Service, options: RunOptions) -> uvicorn.Config:
    config = uvicorn.Config(
        create_app(service),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # connections that ask for nothing count too, so it is above the number of requests that are answered at once
        limit_concurrency=4 * service.options.limits.connections + 64,
        timeout_graceful_shutdown=math.ceil(options.grace_s) + LATE_S,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ssl_certfile: {options.ssl_certfile} can't be used: {error}") from None
    return config
