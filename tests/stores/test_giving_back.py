"""Room goes back to the disk in few steps: a tenant that erases much does not keep the writer from all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpager.stores.database import Database
from tests.stores.sqlite_rig import MIB, MINE, YOURS, chain, found, on_disk, store

SIZE = 40 * MIB


@pytest.mark.parametrize("kept", ["behind", "before", "between"])
def test_what_is_erased_is_given_back_in_steps_of_the_size_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    path = tmp_path / "folder" / "store.db"
    tier = store(path, 64 * MIB)
    theirs = [chain(8, seed, tenant=YOURS) for seed in range(100, 103)]
    own = [chain(16, seed, tenant=MINE) for seed in range(SIZE // MIB)]
    for place, one in enumerate(own):
        if place in {"behind": (), "before": (0, 1, 2), "between": (10, 20, 30)}[kept]:
            tier.put(theirs[{0: 0, 1: 1, 2: 2, 10: 0, 20: 1, 30: 2}[place]])
        tier.put(one)
    if kept == "behind":
        for one in theirs:
            tier.put(one)
    before = on_disk(path)
    steps: list[int] = []
    vacuum, most = Database.vacuum, 0

    def counted(self: Database, nbytes: int) -> bool:
        nonlocal most
        done = vacuum(self, nbytes)
        steps.append(on_disk(path))
        most = max(most, on_disk(path))
        return done

    monkeypatch.setattr(Database, "vacuum", counted)
    assert tier.erase(MINE) == 16 * len(own)
    assert len(steps) <= 3 * SIZE / tier._changes.log_bytes
    assert most <= before + 2 * tier._changes.log_bytes
    assert on_disk(path) < before - SIZE * 9 // 10
    assert all(all(found(tier, one)) for one in theirs)
    assert tier.verify().damaged == ()
    tier.close()
