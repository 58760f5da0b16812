"""Claims of records in Redis: keys with a token that end by themselves, and are held on to by a thread."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Sequence

from kvpager.errors import StoreError
from kvpager.stores.redis_client import RedisClient
from kvpager.stores.redis_links import Command, Gone
from kvpager.stores.redis_names import CLAIM, RELEASE, RENEW, Names

__all__ = ["CLAIM_S", "RedisClaims"]

_log = logging.getLogger("kvpager.stores")
CLAIM_S = 10.0
"""A claim ends so long after its process: that is how long a session of a node that was lost is busy."""


class RedisClaims:
    """What this process has claimed. `take` asks Redis; giving back and renewing are done by a thread behind."""

    def __init__(self, client: RedisClient, names: Names, keep_s: int, claim_s: float = CLAIM_S) -> None:
        """`keep_s`: for so long it is remembered who claimed a record last."""
        self._client, self._names, self._keep_s, self._claim_s = client, names, keep_s, claim_s
        self._changed = threading.Condition()
        self._tokens: dict[bytes, str] = {}
        self._given_back: list[tuple[bytes, str]] = []
        self._sending: set[bytes] = set()  # claims that are being given back
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, key: bytes) -> bool:
        """Claim a key; False where it is claimed already, here or elsewhere. Raises StoreError."""
        with self._changed:
            if key in self._tokens:
                return False
            self._changed.wait_for(lambda: key not in self._sending, self._client.timeout_s)
            leaving = self._leaving()  # what is given back is free for us too
        token = secrets.token_hex(16)
        reply = self._client.run([*leaving, self._command(CLAIM, key, token)])[-1]
        if isinstance(reply, Gone):
            return True  # nobody can be kept from it
        if reply:
            with self._changed:
                self._tokens[key] = token
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._run, name="kvpager-redis-claims", daemon=True)
                    self._thread.start()
        return bool(reply)

    def token(self, key: bytes) -> str:
        """What this process claimed a key with; "" where it has not."""
        with self._changed:
            return self._tokens.get(key, "")

    def give_back(self, key: bytes) -> None:
        """End a claim, soon; nothing happens where it was not claimed here."""
        with self._changed:
            token = self._tokens.pop(key, None)
            if token is not None:
                self._given_back.append((key, token))
                self._changed.notify_all()

    def close(self) -> None:
        """End all claims."""
        with self._changed:
            self._closed = True
            self._given_back += self._tokens.items()
            self._tokens.clear()
            self._changed.notify_all()
        self._flush()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._given_back, self._claim_s / 3)
                if self._closed:
                    return
                held = list(self._tokens.items())
            self._flush()
            self._renew(held)

    def _renew(self, held: Sequence[tuple[bytes, str]]) -> None:
        replies: Sequence[object] = []
        with contextlib.suppress(StoreError):  # Redis is away: it is tried again while the claim lasts, and after it
            replies = self._client.run([self._command(RENEW, key, token) for key, token in held]) if held else []
        lost = [
            key for (key, token), reply in zip(held, replies, strict=False) if reply == 0 and self.token(key) == token
        ]
        if lost:
            _log.warning("store redis: %d claims were lost to others; what is saved for them is left out", len(lost))

    def _flush(self) -> None:
        """Give back what is to be given back; what fails ends by itself."""
        with self._changed:
            keys = {key for key, _ in self._given_back}
            commands = self._leaving()
            self._sending |= keys
        try:
            if commands:
                self._client.run(commands)
        except StoreError:
            pass
        finally:
            with self._changed:
                self._sending -= keys
                self._changed.notify_all()

    def _leaving(self) -> list[Command]:
        with self._changed:
            leaving, self._given_back = self._given_back, []
        return [("EVAL", RELEASE, 2, self._names.claim(key), self._names.last(key), token) for key, token in leaving]

    def _command(self, script: str, key: bytes, token: str) -> Command:
        names = self._names
        return ("EVAL", script, 2, names.claim(key), names.last(key), token, int(self._claim_s * 1000), self._keep_s)
