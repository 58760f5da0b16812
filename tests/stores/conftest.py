"""Fixtures of the tests of stores."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpager.stores.chain import Chain
from kvpager.stores.limits import Limits
from kvpager.stores.tier import Tier
from tests.stores.chain_rig import Make
from tests.stores.fake import Clock, FakeTier, key_of
from tests.stores.sqlite_rig import BLOCKS, MINE, close_processes, store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store may lie: neither it nor its folder is there."""
    return tmp_path / "folder" / "store.db"


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Path]:
    """Where a store of 40 blocks and a record lies, closed."""
    path = tmp_path / "folder" / "store.db"
    tier = store(path)
    tier.put(BLOCKS)
    tier.save_record(key_of(1), MINE, b"a record")
    tier.close()
    yield path
    left = (
        [name for name in os.listdir(path.parent) if "-wal" in name or "-shm" in name] if path.parent.exists() else []
    )
    assert [name for name in left if "damaged" not in name] == []  # whoever used it has closed it


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits() -> dict[str, float]:
    """Of the chains that `make` makes, unless it is told others."""
    return {}


@pytest.fixture
def make(tier: FakeTier, clock: Clock, limits: dict[str, float]) -> Iterator[Make]:
    """Makes a chain over tiers, or what opens them; over `tier` where none is named."""
    made: list[Chain] = []

    def build(*tiers: Tier | Callable[[], Tier], **more: float) -> Chain:
        openers = [one if callable(one) else lambda one=one: one for one in tiers or (tier,)]
        chain = Chain(openers, Limits(**{**limits, **more}), clock)  # type: ignore[arg-type]
        made.append(chain)
        return chain

    yield build
    for chain in made:
        chain.close()


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    """Also where a test failed."""
    yield
    close_processes()
