"""A server as one of a pair sees it: what the pair's thread has it do is done in the server's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from kvpager.errors import KVPagerError
from kvpager.journaled import Resumable
from kvpager.server.service import Service

__all__ = ["ServiceHost"]

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ServiceHost:
    """A replication.node.Host over a service whose engine is there; made in the service's event loop."""

    def __init__(self, service: Service, page_size: int) -> None:
        """`page_size`: tokens of a block."""
        self._service, self._page_size = service, page_size
        self._loop = asyncio.get_running_loop()

    @property
    def page_size(self) -> int:
        """Tokens of a block."""
        return self._page_size

    def go_on(self, resumables: Sequence[Resumable]) -> set[str]:
        """See Host."""
        return self._done(self._service.go_on(resumables), set())

    def step_down(self, flush: Callable[[], None] | None) -> None:
        """See Host."""
        self._done(self._service.step_down(flush), None)

    def warm(self, keys: Sequence[bytes]) -> None:
        """See Host."""
        self._done(self._service.engine.warm(keys), None)

    def _done(self, work: Coroutine[Any, Any, T], otherwise: T) -> T:
        """What the loop makes of it; where the server has ended, or ends meanwhile, nothing is to be done."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            return otherwise
        try:
            return future.result()
        except (KVPagerError, CancelledError) as error:
            _log.warning("the server has ended (%s)", type(error).__name__)
            return otherwise
