"""What ``kvpager bench serve`` and ``kvpager bench engine`` ask for: which requests, how long, when, and their prompts.

Everything follows from the seed: the same workload gives the same requests, prompts and arrivals on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpager.errors import InputError

__all__ = ["Item", "Kind", "Prompts", "Workload", "parse_mix"]

_KIND = re.compile(r"(?:([\w.-]+)=)?(\d+)/(\d+)(?::(\d+(?:\.\d+)?))?")
_ARRIVALS, _ORDER, _TEXTS = range(3)  # streams of random numbers that must not depend on each other


@dataclass(frozen=True)
class Kind:
    """Requests of one size: tokens in (a shared prefix comes on top), tokens out at most, and their share."""

    name: str
    input_tokens: int
    output_tokens: int
    weight: float = 1.0


@dataclass(frozen=True)
class Item:
    """One request to be made, `at` seconds after the start; `prompt_tokens` includes the shared prefix."""

    index: int
    kind: str
    group: int
    at: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests of some kinds.

    rate            requests a second on average, with exponential gaps (Poisson arrivals); None: all at once
    shared_prefix   tokens that all prompts of a group begin with, on top of their kind's
    groups          requests are dealt to so many groups in turn, each with a prefix of its own

    Raises InputError for values that can't be.
    """

    kinds: tuple[Kind, ...]
    requests: int
    rate: float | None = None
    shared_prefix: int = 0
    groups: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.kinds or self.requests < 1:
            raise InputError(f"num-prompts: {self.requests} requests of {len(self.kinds)} kinds are nothing to do")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InputError(f"request-rate: {self.rate} is not above zero")
        if self.shared_prefix < 0 or not 1 <= self.groups <= self.requests:
            raise InputError(
                f"prefix-groups: {self.groups} groups for {self.requests} requests; use 1 to {self.requests}"
            )
        if len({kind.name for kind in self.kinds}) < len(self.kinds):
            raise InputError(f"mix: two kinds have one name ({', '.join(kind.name for kind in self.kinds)})")

    def items(self) -> list[Item]:
        """All requests, in the order in which they are made."""
        kinds = self._dealt()
        return [
            Item(index, kind.name, index % self.groups, at, self.shared_prefix + kind.input_tokens, kind.output_tokens)
            for index, (kind, at) in enumerate(zip(kinds, self._arrivals(), strict=True))
        ]

    def figures(self) -> dict[str, Any]:
        """The settings, for ``--json``."""
        return {
            "requests": self.requests,
            "request_rate": self.rate,
            "shared_prefix": self.shared_prefix,
            "prefix_groups": self.groups,
            "seed": self.seed,
            "kinds": [
                {
                    "name": kind.name,
                    "input_tokens": kind.input_tokens,
                    "output_tokens": kind.output_tokens,
                    "requests": count,
                }
                for kind, count in zip(self.kinds, self._counts(), strict=True)
            ],
        }

    def _counts(self) -> list[int]:
        """Requests of each kind: as near to the shares as whole numbers go, the largest remainders rounded up."""
        total = sum(kind.weight for kind in self.kinds)
        exact = [self.requests * kind.weight / total for kind in self.kinds]
        counts = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda index: (counts[index] - exact[index], index))
        for index in by_remainder[: self.requests - sum(counts)]:
            counts[index] += 1
        return counts

    def _dealt(self) -> list[Kind]:
        """The kind of each request, in random order."""
        each = [kind for kind, count in zip(self.kinds, self._counts(), strict=True) for _ in range(count)]
        return [each[index] for index in np.random.default_rng([self.seed, _ORDER]).permutation(len(each))]

    def _arrivals(self) -> list[float]:
        """Seconds after the start; the first request is made at once."""
        if self.rate is None:
            return [0.0] * self.requests
        gaps = np.random.default_rng([self.seed, _ARRIVALS]).exponential(1 / self.rate, self.requests)
        return [float(at) for at in np.cumsum(gaps) - gaps[0]]


def parse_mix(text: str) -> tuple[Kind, ...]:
    """Kinds from text such as "short=100/64:0.8,long=2000/128:0.2": name=input/output:share.

    Name and share may be left out. Raises InputError that says what is wrong.
    """
    kinds = []
    for part in text.split(","):
        match = _KIND.fullmatch(part.strip())
        if match is None:
            raise InputError(f"mix: {part.strip()!r} is not like long=2000/128:0.2 (name=input/output:share)")
        name, tokens, output, weight = match.groups()
        kind = Kind(name or f"{tokens}/{output}", int(tokens), int(output), float(weight or 1))
        if kind.input_tokens < 1 or kind.output_tokens < 1 or kind.weight <= 0:
            raise InputError(f"mix: {part.strip()!r} has a zero in it; lengths and shares are above zero")
        kinds.append(kind)
    return tuple(kinds)


class Prompts:
    """Prompts of exact lengths out of a text's tokens, each from a place of its own.

    `source` is any sequence: token ids, or words where tokens can't be had. Windows run on at its beginning when they
    reach its end. Two prompts never begin at the same place, and so share nothing but the prefix of their group.
    `spare` prompts more can be made, for requests that don't count; they have no prefix. Raises InputError where the
    source has fewer places than there are prompts and prefixes.
    """

    def __init__(self, source: Sequence[Any], workload: Workload, spare: int = 0) -> None:
        needed = workload.requests + workload.groups + spare
        if len(source) < needed:
            raise InputError(
                f"num-prompts: {needed} distinct beginnings are needed (prompts and prefixes), and the text has "
                f"{len(source)} tokens"
            )
        self._source = source
        self._prefix = workload.shared_prefix
        self._groups = workload.groups
        self._requests = workload.requests
        self._places = np.random.default_rng([workload.seed, _TEXTS]).permutation(len(source))

    def shared(self, group: int, length: int) -> list[Any]:
        """The first `length` tokens or words of what all prompts of a group begin with."""
        return self._window(group, length)

    def own(self, item: Item, length: int) -> list[Any]:
        """The first `length` tokens or words of what a prompt has for itself."""
        return self._window(self._groups + item.index, length)

    def prefix(self, item: Item) -> int:
        """The tokens that a prompt shares with its group: none for a spare one, lest it leave them in a cache."""
        return self._prefix if item.index < self._requests else 0

    def __call__(self, item: Item) -> list[Any]:
        """The whole prompt: `item.prompt_tokens` long."""
        prefix = self.prefix(item)
        return self.shared(item.group, prefix) + self.own(item, item.prompt_tokens - prefix)

    def _window(self, place: int, length: int) -> list[Any]:
        start = int(self._places[place])
        found = list(self._source[start : start + length])
        while len(found) < length:
            found.extend(self._source[: length - len(found)])
        return found
