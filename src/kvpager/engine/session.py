"""A conversation that outlives its requests: its name in a store, and a request's hold on it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvpager.core.blocks import fields, tenant
from kvpager.engine.session_record import SessionRecord
from kvpager.errors import InputError

__all__ = ["Session", "session_key"]

MOST_CHARACTERS = 128
_FORMAT = b"kvpager-session-1"
_SEAL = b"kvpager-session-seal-1"


def session_key(salt: bytes, name: str) -> bytes:
    """The 32-byte key of a session's record: SHA-256, untruncated, over length-prefixed fields.

    Sessions of one name under different salts have nothing to do with each other. Raises InputError for what is no
    name: 1 to 128 printable characters.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= MOST_CHARACTERS or not name.isprintable():
        raise InputError(f"session: a name has 1 to {MOST_CHARACTERS} printable characters")
    return hashlib.sha256(fields(_FORMAT, salt, name.encode())).digest()


@dataclass
class Session:
    """One request's hold on a session.

    key      of its record; tenant: whose it is; secret: what its record is sealed with
    seed     from which each turn has its own; turn: which one this is, from 0
    looked   whether the store was asked for its record; record: what it gave, until the request has begun with it
    kept     whether the request's end is saved
    """

    key: bytes
    tenant: bytes
    secret: bytes
    seed: int
    turn: int = 0
    looked: bool = False
    record: SessionRecord | None = None
    kept: bool = True

    @classmethod
    def named(cls, salt: bytes, name: str, seed: int) -> Session:
        """The session of a tenant. Raises InputError for what is no name."""
        key = session_key(salt, name)
        return cls(key, tenant(salt), hashlib.sha256(fields(_SEAL, salt, name.encode())).digest(), seed)

    @property
    def turn_seed(self) -> int:
        """The seed of this turn's draws: the same whether the engine was made anew between two turns or not."""
        material = self.seed.to_bytes(8, "little") + self.turn.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little") >> 1
