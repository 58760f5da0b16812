"""Admission: what a request may come to need of a pager, and whether that fits beside what others may come to need.

What is admitted can always go on: nobody has to give way to others because they grew. Shared blocks count for each who
holds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.config import parse_size
from kvpager.core.pager import Pager
from kvpager.errors import RequestTooLarge

__all__ = ["Need", "Room"]


@dataclass(frozen=True)
class Need:
    """The most that a request comes to need.

    length      tokens of one of its sequences
    sequences   answers side by side
    frames      for itself alone
    tokens      of all its sequences
    pages       of all its sequences
    """

    length: int
    sequences: int
    frames: int
    tokens: int
    pages: int


class Room:
    """The limits of one pager and engine, and what requests need of them.

    tokens    the most tokens that one sequence may hold here, and which limit says so
    """

    def __init__(self, pager: Pager, max_num_seqs: int, max_model_len: int) -> None:
        config, shape = pager.config, pager.shape
        self._pager, self._max_num_seqs = pager, max_num_seqs
        self._recall = config.mode == "recall"
        self._page_size = config.page_size
        self._block = shape.layers * shape.kv_heads
        self._max_tokens = config.max_tokens
        # a page in the pool may have a slot in swap as well, so the two don't add up
        slots = parse_size(config.swap_limit, "swap_limit") // shape.page_bytes(config.page_size)
        self._pages = max(slots, pager.frames)
        limits = [(max_model_len, "max_model_len")]
        if config.max_tokens is not None:
            limits.append((config.max_tokens, "the pager's max_tokens"))
        if self._recall:
            limits.append((self._pages // self._block * config.page_size, "the pager's swap_limit"))
        self.tokens, self.limit = min(limits)

    def require(self, prompt: int, max_tokens: int | None, choices: int) -> Need:
        """What a new request may come to need.

        Raises RequestTooLarge for what could never run: its size and the limit that it passes are told.
        """
        total = self.tokens if max_tokens is None else prompt + max_tokens
        if prompt >= self.tokens or total > self.tokens:
            asked = "" if max_tokens is None else f" and max_tokens {max_tokens}, together {total}"
            raise RequestTooLarge(
                f"the prompt has {prompt} tokens{asked}; {self.limit} allows {self.tokens} for prompt and answer"
            )
        if choices > self._max_num_seqs:
            raise RequestTooLarge(f"n: {choices} answers at once, and max_num_seqs is {self._max_num_seqs}")
        need = self._need(total, choices)
        if need.frames > self._pager.frames:
            raise RequestTooLarge(
                f"{choices} answer{'s' * (choices > 1)} of up to {total} tokens can need {need.frames} frames, "
                f"and the pool has {self._pager.frames}: use a larger pool"
            )
        if self._max_tokens is not None and need.tokens > self._max_tokens:
            raise RequestTooLarge(
                f"{choices} answers of up to {total} tokens hold {need.tokens}, and the pager's max_tokens is "
                f"{self._max_tokens}"
            )
        if self._recall and need.pages > self._pages:
            raise RequestTooLarge(
                f"{choices} answers of up to {total} tokens are {need.pages} pages, and the pager's swap_limit allows "
                f"{self._pages}"
            )
        return need

    def fits(self, own: Need, held: list[Need], kept: list[Need]) -> bool:
        """Whether a request can run beside those that `held` is of, while those that `kept` is of wait in swap."""
        if own.sequences + sum(need.sequences for need in held) > self._max_num_seqs:
            return False
        everyone = [own, *held, *kept]
        if self._max_tokens is not None and sum(need.tokens for need in everyone) > self._max_tokens:
            return False
        if self._recall and sum(need.pages for need in everyone) > self._pages:
            return False
        return self._frames([own, *held]) <= self._pager.frames

    def _need(self, total: int, choices: int) -> Need:
        blocks = -(-total // self._page_size)
        alone = self._pager.minimum_frames(1, total)
        frames = alone + (choices - 1) * (self._block if self._recall else alone)
        return Need(total, choices, frames, choices * total, choices * blocks * self._block)

    def _frames(self, needs: list[Need]) -> int:
        """Recall: an open block for each sequence; the largest alone: another block, and one group.

        So a step can always let one more sequence go on to a new block, and nobody waits for ever.
        """
        if not self._recall:
            return sum(need.frames for need in needs)
        sequences = sum(need.sequences for need in needs)
        return max(need.frames + (sequences - need.sequences) * self._block for need in needs)
