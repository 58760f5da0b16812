"""The tier of a chain that nodes share: what goes there, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpager.stored import Scores, StoredBlock
from kvpager.stores.level import Level
from kvpager.stores.limits import Limits
from kvpager.stores.publishing import Publisher, Publishing
from kvpager.stores.sharing import Sharer
from kvpager.stores.tier import FarTier

__all__ = ["Far", "Shared"]


@dataclass(frozen=True)
class Far:
    """How a far tier is opened, what is published there, and how many seconds a read may take that is not slow."""

    open: Callable[[], FarTier]
    publishing: Publishing = field(default_factory=Publishing)
    slow_s: float = 1.0


class Shared:
    """A far level and what is published there.

    Blocks that are put are published if that was decided before. What is decided later is read from the near tiers,
    where there are some; else the pager is told to offer it again.
    """

    def __init__(
        self,
        far: Far,
        limits: Limits,
        clock: Callable[[], float],
        near: Callable[[Sequence[bytes]], list[StoredBlock]],
    ) -> None:
        """`near`: blocks that near tiers have. Raises what opening a Level does."""
        self.level = Level(far.open, limits, clock, far.slow_s)
        self._publisher = Publisher(far.publishing)
        self._sharer = Sharer(self.level, near)

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        """Take those that are to be published; returns how many of the first need not be offered again."""
        wanted = self._publisher.wants([block.head.key for block in blocks])
        places = [place for place, is_wanted in enumerate(wanted) if is_wanted]
        taken = self.level.put([blocks[place] for place in places])
        return len(blocks) if taken == len(places) else places[taken]

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these are to be published, and not known to be there."""
        wanted, known = self._publisher.wants(keys), self.level.known(keys)
        return [is_wanted and not is_known for is_wanted, is_known in zip(wanted, known, strict=True)]

    def publish(self, keys: Sequence[bytes], near: bool) -> None:
        """These are to be published; `near`: from near tiers, as far as they are there."""
        self._publisher.choose(keys)
        if near:
            self._sharer.share(self._unknown(keys))

    def count(self, news: Sequence[Scores], near: bool) -> list[bytes]:
        """Take in hits; returns what is to be offered again, because no near tier has it."""
        chosen = self._unknown(self._publisher.count(news))
        if not near:
            return chosen
        self._sharer.share(chosen)
        return []

    def forget(self, keys: Sequence[bytes] | None = None) -> None:
        """These must not be published from near tiers any more; None for all."""
        self._sharer.forget(keys)

    def flush(self, timeout: float) -> bool:
        """Wait until what is to be read from near tiers has been; returns whether that is so."""
        return self._sharer.flush(timeout)

    def stop(self, timeout: float) -> None:
        """Publish nothing more from near tiers."""
        self._sharer.stop(timeout)

    def _unknown(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key, is_known in zip(keys, self.level.known(keys), strict=True) if not is_known]
