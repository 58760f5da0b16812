"""What a request is made of, checked before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from kvpager.engine.params import SamplingParams
from kvpager.errors import InputError

__all__ = ["checked"]


def checked(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    priority: int,
    deadline: float | None,
    salt: bytes,
    vocabulary: int,
) -> list[int]:
    """The prompt as a list of token ids, all below `vocabulary`.

    Raises InputError that names the argument which is not what it should be.
    """
    if not isinstance(request_id, str) or not request_id:
        raise InputError(f"request_id: {request_id!r} is not a name")
    if not isinstance(params, SamplingParams):
        raise InputError(f"params: expected SamplingParams, got {type(params).__name__}")
    params.require_vocabulary(vocabulary)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InputError(f"priority: {priority!r} is not a whole number")
    if deadline is not None and not isinstance(deadline, (int, float)):
        raise InputError(f"deadline: {deadline!r} is not a time in seconds")
    if not isinstance(salt, bytes):
        raise InputError(f"salt: expected bytes, got {type(salt).__name__}")
    try:
        ids = [index(token) for token in prompt]
    except TypeError:
        raise InputError("prompt: expected a list of token ids") from None
    if not ids:
        raise InputError("prompt: it is empty; at least one token is needed")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise InputError(f"prompt: token id {wrong} is not in 0..{vocabulary - 1}, the model's vocabulary")
    return ids
