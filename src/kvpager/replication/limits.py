"""Bounds of the journal and of its mirror."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvpager.errors import ConfigError

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """How long is waited, and how much is held. Raises ConfigError for one that is not above zero.

    bound_s          a step waits so long for its acknowledgement; then it goes out without, and the journal is degraded
    queue_entries    steps and requests that wait to be written; more, and the journal is degraded
    queue_bytes      bytes of them
    batch_bytes      what one command writes at most, but for a single step that is larger
    retry_s          first pause between tries to reach Redis; it doubles
    longest_retry_s  up to this
    stream_entries   what the stream holds at most, about
    stream_bytes     of it, and `request_bytes` more for each running request
    request_bytes    see there
    ended_s          an ended request is kept for so long
    ended_entries    and so many of them at most
    look_s           between two looks at how many replicas there are
    requests         that a mirror takes
    name_bytes       of a request's id or session
    tokens           of a prompt or an answer
    header_bytes     of one JSON object
    blob_bytes       of one run of bytes (keys, slots, what a client said)
    """

    bound_s: float = 0.5
    queue_entries: int = 4096
    queue_bytes: int = 256 * 2**20
    batch_bytes: int = 4 * 2**20
    retry_s: float = 0.05
    longest_retry_s: float = 2.0
    stream_entries: int = 2048
    stream_bytes: int = 16 * 2**20
    request_bytes: int = 4 * 2**20
    ended_s: float = 60.0
    ended_entries: int = 4096
    look_s: float = 1.0
    requests: int = 2**16
    name_bytes: int = 4096
    tokens: int = 2**24
    header_bytes: int = 64 * 2**20
    blob_bytes: int = 2**29

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}: {value} is not above zero")
