"""Looking at a store in Redis, checking it, making room in it, carrying it elsewhere: for people, not for a pager."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpager.errors import InputError, StoreDamaged
from kvpager.stored import TENANT_BYTES, StoredBlock
from kvpager.stores.archive import Entry, export_blocks
from kvpager.stores.codec import encode
from kvpager.stores.moving import Moved, import_from
from kvpager.stores.redis import RedisStore
from kvpager.stores.redis_books import BLOCK, RECORD
from kvpager.stores.redis_links import Command
from kvpager.stores.redis_settings import RedisSettings
from kvpager.stores.redis_values import as_bytes, block_of
from kvpager.stores.rows import unseal
from kvpager.stores.sqlite import TenantSizes
from kvpager.stores.tier import TierSizes
from kvpager.stores.verify import Damage, Progress, Report

__all__ = ["RedisDesk"]

_PATIENT_S = 5.0  # nobody's request waits here
_AT_ONCE = 16


def _nothing(done: int, total: int) -> None:
    """No progress is shown."""


class RedisDesk(RedisStore):
    """A RedisStore with what `kvpager store` does. All that is there is looked through, not what the books say.

    What comes and goes meanwhile may be missed, or come twice. Methods raise StoreError.
    """

    def __init__(self, url: str, *, limit_bytes: int) -> None:
        super().__init__(url, RedisSettings(limit_bytes=limit_bytes, timeout_s=_PATIENT_S))

    @property
    def path(self) -> str:
        """Where it is, without what is secret."""
        return str(self.place)

    def tenants(self) -> list[TenantSizes]:
        """What each tenant has, who has most first."""
        counts: dict[bytes, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for kind in (BLOCK, RECORD):
            for keys in self.stored_keys(kind):
                sizes = self.client.run([("STRLEN", self._name(kind, key)) for key in keys], patient=True)
                heads = self.heads(keys) if kind == BLOCK else [None] * len(keys)
                for whose, size, head in zip(self.whose(kind, keys), sizes, heads, strict=True):
                    if whose is not None:
                        count = counts[whose]
                        count[0 if kind == BLOCK else 1] += 1
                        count[2] += size
                        count[3] += 0 if head is None else head.pages * head.page_bytes
        found = [TenantSizes(whose, *count) for whose, count in counts.items()]
        return sorted(found, key=lambda one: (-one.bytes, one.tenant))

    def sizes(self) -> TierSizes:
        """What all tenants have."""
        tenants = self.tenants()
        self.books.look()
        return TierSizes(
            sum(one.blocks for one in tenants),
            sum(one.records for one in tenants),
            sum(one.payload_bytes for one in tenants),
            sum(one.bytes for one in tenants),
            self.settings.limit_bytes,
            self.books.sizes.dropped,
        )

    def verify(self, progress: Progress = _nothing) -> Report:
        """Check every block and record; changes nothing."""
        blocks = self._all(BLOCK)
        records = self._all(RECORD)
        damaged: list[Damage] = []
        total, pages, nbytes = len(blocks) + len(records), 0, 0
        for start in range(0, len(blocks), _AT_ONCE):
            some = blocks[start : start + _AT_ONCE]
            for row, (key, blob) in enumerate(zip(some, self._values(BLOCK, some), strict=True), start + 1):
                nbytes += len(blob)
                try:
                    pages += block_of(key, blob).head.pages if blob else 0
                except StoreDamaged as error:
                    damaged.append(Damage("block", key, None, str(error), row))
            progress(start + len(some), total)
        for done, key in enumerate(records, len(blocks) + 1):
            (value,) = self._values(RECORD, [key])
            nbytes += len(value)
            try:
                if value:
                    unseal(key, value[TENANT_BYTES:])
            except StoreDamaged as error:
                damaged.append(Damage("record", key, None, str(error), done))
            progress(done, total)
        return Report(len(blocks), pages, len(records), nbytes, tuple(damaged))

    def drop_damaged(self, report: Report) -> None:
        """Forget the blocks and records that `verify` found damaged."""
        self.drop([one.key for one in report.damaged if one.kind == "block"])
        for one in report.damaged:
            if one.kind == "record":
                self.drop_record(one.key)

    def prune(
        self, *, to_bytes: int | None = None, older_seconds: float | None = None, tenant: bytes | None = None
    ) -> int:
        """Forget some; returns how many blocks and records. See SqliteStore.prune; age is what Redis says of use."""
        if to_bytes is not None and tenant is not None:
            raise InputError("prune: to_bytes is of the whole store, and can't be asked for with a tenant")
        count = 0
        if older_seconds is not None:
            count += self._forget_idle(older_seconds, tenant)
        elif tenant is not None:
            count += self.erase(tenant)
        if to_bytes is not None:
            gone = self.books.shrink(to_bytes)
            self._make_way(gone)
            count += len(gone)
        return count

    def export(self, path: str | Path, tenant: bytes | None = None, progress: Progress = _nothing) -> Moved:
        """Write blocks and records (of a tenant) to an archive, for `import_` elsewhere."""
        records = [key for key in self._all(RECORD) if tenant in (None, self.whose(RECORD, [key])[0])]
        heads = [head for keys in self.stored_keys(BLOCK) for head in self.heads(keys) if head is not None]
        depths = {head.key: head.depth for head in heads if tenant in (None, head.tenant)}
        blocks = sorted(depths, key=lambda key: depths[key])
        written = {"block": 0, "record": 0}
        total = len(blocks) + len(records)

        def entries() -> Iterator[Entry]:
            for start in range(0, len(blocks), _AT_ONCE):
                some = blocks[start : start + _AT_ONCE]
                for head, payload in zip(self.heads(some), self.get(some), strict=True):
                    if head is not None and payload is not None:
                        written["block"] += 1
                        yield Entry("block", head.key, head.tenant, encode(StoredBlock(head, payload)))
                progress(start + len(some), total)
            for key in records:
                (value,) = self._values(RECORD, [key])
                record = self.load_record(key) if value else None
                if record is not None:
                    written["record"] += 1
                    yield Entry("record", key, value[:TENANT_BYTES], record)
            progress(total, total)

        count = export_blocks(Path(path), entries())
        return Moved(written["block"], written["record"], total - count)

    def import_(self, path: str | Path, progress: Progress = _nothing) -> Moved:
        """Store what an archive holds; what is there already stays as it is."""
        return import_from(Path(path), self, progress)

    def _forget_idle(self, seconds: float, tenant: bytes | None) -> int:
        """Forget what was not read or written for so long: that is asked of all before anything is read."""
        idle = [
            (kind, key)
            for kind in (BLOCK, RECORD)
            for keys in self.stored_keys(kind)
            for key, age in zip(keys, self._idle(kind, keys), strict=True)
            if age >= seconds
        ]
        if tenant is not None:
            idle = [(kind, key) for kind, key in idle if self.whose(kind, [key]) == [tenant]]
        self._make_way(idle)
        for kind in (BLOCK, RECORD):
            self.books.forget(kind, [key for one, key in idle if one == kind])
        return len(idle)

    def _idle(self, kind: bytes, keys: Sequence[bytes]) -> list[int]:
        commands: list[Command] = [("OBJECT", "IDLETIME", self._name(kind, key)) for key in keys]
        return [age if isinstance(age, int) else 0 for age in self.client.run(commands, patient=True)]

    def _all(self, kind: bytes) -> list[bytes]:
        return list(dict.fromkeys(key for keys in self.stored_keys(kind) for key in keys))

    def _values(self, kind: bytes, keys: Sequence[bytes]) -> list[bytes]:
        commands: list[Command] = [("GET", self._name(kind, key)) for key in keys]
        return [as_bytes(reply) for reply in self.client.run(commands, patient=True)]
