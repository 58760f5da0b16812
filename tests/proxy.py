"""A TCP proxy on loopback that does to connections what networks do: delay, drip, cut, corrupt, let nothing pass."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

CHUNK = 1 << 16


@dataclass(frozen=True)
class Fault:
    """How bytes are treated at the moment; as it is made, they pass."""

    delay_s: float = 0.0  # each chunk, both ways
    drip: int = 0  # bytes of an answer at a time; 0: as they come
    drip_s: float = 0.0  # between them
    cut_after: int | None = None  # bytes of answers until every connection is cut; new ones are cut at once
    corrupt_at: int | None = None  # this byte of the answers from now on is another one
    held: bool = False  # nothing passes, either way, until it is healed


class Proxy:
    """Passes connections on to a port of this machine, from a free one or from `port`.

    Faults hold for all connections, from the moment they are set. What was held back comes through when it is healed,
    as packets that are sent again do: a command can arrive late.
    """

    def __init__(self, target_port: int, port: int = 0) -> None:
        self.target_port = target_port
        self.fault = Fault()
        self.answered = 0  # bytes of answers since the fault was set
        self._changed = threading.Condition()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a thread of the proxy did not end"

    def set(self, fault: Fault) -> None:
        """This fault from now on, instead of what was set before."""
        with self._changed:
            self.fault = fault
            self.answered = 0
            self._changed.notify_all()
        if fault.cut_after == 0:
            self._cut()

    def heal(self) -> None:
        """Bytes pass again, first those that were held back. Connections that were cut stay cut."""
        self.set(Fault())

    def delay(self, seconds: float) -> None:
        """Each chunk comes this much later, both ways."""
        self.set(Fault(delay_s=seconds))

    def drip(self, count: int, pause_s: float) -> None:
        """Answers come `count` bytes at a time, with a pause after each."""
        self.set(Fault(drip=count, drip_s=pause_s))

    def cut(self, after: int = 0) -> None:
        """Cut all connections when so many more bytes of answers have passed, and every new one from then on."""
        self.set(Fault(cut_after=after))

    def corrupt(self, at: int) -> None:
        """Change one byte: number `at` of the answers from now on."""
        self.set(Fault(corrupt_at=at))

    def blackhole(self) -> None:
        """Let nothing pass, close nothing: to both sides it looks as if the other were silent."""
        self.set(Fault(held=True))

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut():
                client.close()
            else:
                self._start(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        self._wait_while_held()
        try:
            server = socket.create_connection(("127.0.0.1", self.target_port), timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            self._sockets |= {client, server}
            cut = self._closed
        if cut or self._is_cut():
            self._cut()
        self._start(self._pump, client, server, False)
        self._pump(server, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        """Pass on what comes from `source`, until one end is closed."""
        try:
            while data := source.recv(CHUNK):
                self._pass(data, sink, answers)
        except OSError:
            pass
        finally:
            self._close(source, sink)

    def _pass(self, data: bytes, sink: socket.socket, answers: bool) -> None:
        self._wait_while_held()
        fault = self.fault
        if fault.delay_s:
            self._pause(fault.delay_s)
        if not answers:
            sink.sendall(data)
            return
        with self._changed:
            begin, self.answered = self.answered, self.answered + len(data)
        if fault.corrupt_at is not None and begin <= fault.corrupt_at < begin + len(data):
            changed = bytearray(data)
            changed[fault.corrupt_at - begin] ^= 0x15
            data = bytes(changed)
        if fault.cut_after is not None:
            data = data[: max(fault.cut_after - begin, 0)]
        step = fault.drip or len(data) or 1
        for first in range(0, len(data), step):
            sink.sendall(data[first : first + step])
            if fault.drip:
                self._pause(fault.drip_s)
        if self._is_cut():
            self._cut()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def _wait_while_held(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self.fault.held)

    def _is_cut(self) -> bool:
        return self.fault.cut_after is not None and self.answered >= self.fault.cut_after

    def _cut(self) -> None:
        with self._changed:
            open_now = list(self._sockets)
        self._close(*open_now)

    def _close(self, *ends: socket.socket) -> None:
        for end in ends:
            with self._changed:
                self._sockets.discard(end)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
