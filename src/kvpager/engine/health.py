"""How an engine that runs in a thread of its own does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvpager.errors import EngineStopped, SteppedDown

if TYPE_CHECKING:
    from kvpager.config import PagerConfig
    from kvpager.engine.latencies import EngineLatencies
    from kvpager.engine.outputs import EngineStats

__all__ = ["Health", "Look", "State"]

State = Literal["loading", "standby", "ready", "draining", "stopped", "failed"]


@dataclass(frozen=True)
class Health:
    """How an engine does. `error` says what went wrong in state "failed"."""

    state: State
    error: str | None = None

    @property
    def alive(self) -> bool:
        """Whether it works, or is about to: false once it has failed or was stopped."""
        return self.state not in ("failed", "stopped")

    @property
    def refusal(self) -> EngineStopped:
        """What who asks it for something is told, where it takes no requests."""
        if self.state == "standby":
            return SteppedDown("this server is not the primary; ask the other one, or come again")
        if self.state == "failed":
            return EngineStopped(f"the engine has failed: {self.error}")
        return EngineStopped("the server is stopping and takes no more requests")


class Look(NamedTuple):
    """What an engine is at one moment."""

    stats: EngineStats
    latencies: EngineLatencies
    pager: PagerConfig
