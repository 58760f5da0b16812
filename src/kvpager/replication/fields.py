"""A request's parts as JSON and runs of bytes, and back: what entries and whole requests have in common."""

from __future__ import annotations

from typing import Any

from kvpager.journaled import Accepted, Told
from kvpager.replication.limits import Limits
from kvpager.replication.packing import Damaged, Fields, pack_tokens, unpack_tokens

__all__ = ["ACCEPTED_RUNS", "read_accepted", "read_end", "write_accepted", "write_end"]

ACCEPTED_RUNS = 3  # prompt, salt, client


def write_accepted(accepted: Accepted, page: int) -> tuple[dict[str, Any], list[bytes]]:
    """A request as it was taken, and the size of its blocks."""
    header = {
        "id": accepted.id,
        "page": page,
        "params": dict(accepted.params),
        "priority": accepted.priority,
        "seconds": accepted.seconds,
        "session": accepted.session,
        "seed": accepted.seed,
    }
    return header, [pack_tokens(accepted.prompt), bytes(accepted.salt), bytes(accepted.client)]


def read_accepted(fields: Fields, runs: list[bytes], limits: Limits) -> tuple[Accepted, int]:
    """The same back. Raises Damaged."""
    prompt, salt, client = runs
    if not prompt or len(salt) > limits.name_bytes or len(client) > limits.header_bytes:
        raise Damaged("runs")
    accepted = Accepted(
        id=fields.text("id"),
        prompt=unpack_tokens(prompt, limits),
        params=fields.mapping("params"),
        priority=fields.whole("priority", least=-(2**63)),
        seconds=fields.seconds("seconds"),
        salt=salt,
        session=fields.maybe_text("session"),
        seed=fields.whole("seed", 2**64, -(2**63)),
        client=client,
    )
    return accepted, fields.whole("page", 2**20, 1)


def write_end(told: Told) -> dict[str, Any]:
    """How an answer ended."""
    return {
        "finish": told.finish_reason,
        "stop": told.stop_reason,
        "error": told.error,
        "usage": None if told.usage is None else dict(told.usage),
    }


def read_end(fields: Fields) -> dict[str, Any]:
    """The same back, as arguments of Told. Raises Damaged."""
    return {
        "finish_reason": fields.text("finish", 64),
        "stop_reason": fields.text_or_whole("stop"),
        "error": fields.maybe_text("error", 2**20),
        "usage": fields.maybe_mapping("usage"),
    }
