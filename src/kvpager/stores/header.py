"""The header of a stored block: everything that is needed to find, check and read any one of its pages.

::

    magic "KVPB", format version, flags, bytes of the header     PREFIX_BYTES that every version begins with
    sizes of all that follows, key, parent, tenant               fixed
    tokens, layout, kind of digest, digest, scores               as long as their sizes say
    a checksum a page                                            of its bytes as they are stored
    compressed: sizes of each page's planes                      see compress
    a checksum of the header                                     the last 8 bytes of it, in every version

Numbers are little-endian; checksums are XXH3 with 64 bits. The pages follow, in order, without gaps. A header may stand
alone, without checksums and pages: then it is a head, as `heads` hands out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Literal, get_args

import numpy as np

from kvpager.errors import InputError, StoreDamaged, StoreNewer
from kvpager.ports import Bytes, IntArray
from kvpager.stored import KEY_BYTES, TENANT_BYTES, BlockHead
from kvpager.stores.compress import Sizes, expand
from kvpager.stores.packages import Data, xxh3

__all__ = ["COMPRESSIONS", "PREFIX_BYTES", "VERSION", "Compression", "Header", "header_bytes"]

Compression = Literal["none", "zstd"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)

VERSION = 1
MAGIC = b"KVPB"
_PREFIX = struct.Struct("<4sHHI")
_SIZES = struct.Struct("<IIIQQIHHIIB")
_NAMES = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}s{TENANT_BYTES}s")
_SUM = struct.Struct("<Q")
PREFIX_BYTES = _PREFIX.size
_FIXED_BYTES = _PREFIX.size + _SIZES.size + _NAMES.size

_APPROXIMATE, _ALONE, _PARENT, _COMPRESSED = 1, 2, 4, 8
_ITEMSIZES = (1, 2, 4, 8)

# The most of each: far above what any model needs, and little enough that no header makes one allocate at will.
MOST = {
    "pages": 2**20,
    "page_bytes": 2**24,
    "depth": 2**32 - 1,
    "hits": 2**63 - 1,
    "tokens": 2**20,
    "layout": 2**12,
    "digest_kind": 2**8,
    "digest": 2**28,
    "scores": 2**26,
}
MOST_PAYLOAD = 2**30


@dataclass(frozen=True, eq=False)
class Header:
    """What stands before a block's pages.

    head         the block without its pages
    compression  of the pages
    itemsize     bytes of a number, 1, 2, 4 or 8: how many planes a compressed page has
    sums         XXH3 of each page as it is stored; none where the header stands alone
    sizes        stored bytes of each page's planes, where they are compressed
    """

    head: BlockHead
    compression: Compression = "none"
    itemsize: int = 1
    sums: tuple[int, ...] = ()
    sizes: Sizes | None = None

    TENANT_AT: ClassVar[int] = _FIXED_BYTES - TENANT_BYTES
    """Where in a blob its tenant stands."""

    @property
    def alone(self) -> bool:
        """Whether it stands for a head, and no pages follow."""
        return not self.sums

    @cached_property
    def header_bytes(self) -> int:
        """Bytes of the header: where the first page begins."""
        head = self.head
        parts = (head.tokens, head.layout.encode(), head.digest_kind.encode(), head.digest, head.scores)
        planes = 0 if self.sizes is None else self.sizes.size
        return _FIXED_BYTES + sum(map(len, parts)) + 8 * len(self.sums) + 4 * planes + _SUM.size

    @cached_property
    def _bounds(self) -> list[int]:
        """Where each page begins in the blob, and the end."""
        if self.sizes is None:
            steps: IntArray = np.full(len(self.sums), self.head.page_bytes, np.int64)
        else:
            steps = self.sizes.sum(axis=1, dtype=np.int64)
        bounds: list[int] = (self.header_bytes + np.concatenate([[0], np.cumsum(steps)])).tolist()
        return bounds

    @property
    def blob_bytes(self) -> int:
        """Bytes of the whole blob, header and pages."""
        return self._bounds[-1]

    def page_range(self, page: int) -> tuple[int, int]:
        """Where a page lies in the blob: its first byte, and how many are stored."""
        begin, end = self._bounds[page], self._bounds[page + 1]
        return begin, end - begin

    def page(self, page: int, data: Data) -> Bytes:
        """The page that is stored as `data`, uint8 [page_bytes]; raises StoreDamaged where it is not that page."""
        return self.pages([page], [data]).reshape(-1)

    def pages(self, pages: Sequence[int], slices: Sequence[Data]) -> Bytes:
        """As `page` for several, uint8 [n, page_bytes]; one call for many costs less where they are compressed."""
        sum_of = xxh3()
        for page, data in zip(pages, slices, strict=True):
            if len(data) != self.page_range(page)[1] or sum_of(data) != self.sums[page]:
                raise StoreDamaged(f"page {page} of block {self.name} does not match its checksum")
        stored = b"".join(slices)
        if self.sizes is not None:
            return expand(stored, self.sizes[list(pages)], self.head.page_bytes)
        return np.frombuffer(stored, np.uint8).reshape(len(pages), self.head.page_bytes)

    def damaged(self, blob: Data) -> list[int]:
        """The pages of a whole blob that do not match their checksums; those that were cut off are among them."""
        view, sum_of, bounds = memoryview(blob), xxh3(), self._bounds
        if self.sizes is None and len(view) == bounds[-1]:
            step = self.head.page_bytes
            found = [sum_of(view[begin : begin + step]) for begin in bounds[:-1]]
        else:
            found = [sum_of(view[begin:end]) for begin, end in pairwise(bounds)]
        if tuple(found) == self.sums and len(view) >= bounds[-1]:
            return []
        pairs = enumerate(zip(found, self.sums, bounds[1:], strict=True))
        return [page for page, (is_now, was, end) in pairs if is_now != was or end > len(view)]

    def require(self, key: bytes) -> None:
        """Raise StoreDamaged unless this is the block with that key, and its pages follow."""
        if self.head.key != key:
            raise StoreDamaged(f"block {self.name} lies where block {key[:6].hex()} should")
        if self.alone:
            raise StoreDamaged(f"block {self.name} has no pages where {self.head.pages} should be")

    @property
    def name(self) -> str:
        """The key as messages give it: the beginning of it."""
        return self.head.key[:6].hex()

    def pack(self) -> bytes:
        """The header's bytes. Raises InputError where a field is too long or of a wrong size."""
        head = self.head
        layout, kind = head.layout.encode(), head.digest_kind.encode()
        _check_fields(head, layout, kind)
        flags = (
            _APPROXIMATE * head.approximate
            | _ALONE * self.alone
            | _PARENT * bool(head.parent)
            | _COMPRESSED * (self.compression != "none")
        )
        body = b"".join(
            [
                _PREFIX.pack(MAGIC, VERSION, flags, self.header_bytes),
                _SIZES.pack(
                    head.pages,
                    head.page_bytes,
                    head.depth,
                    head.hits,
                    0 if self.alone else self.blob_bytes - self.header_bytes,
                    len(head.tokens),
                    len(layout),
                    len(kind),
                    len(head.digest),
                    len(head.scores),
                    self.itemsize,
                ),
                _NAMES.pack(head.key, head.parent, head.tenant),
                head.tokens,
                layout,
                kind,
                head.digest,
                head.scores,
                struct.pack(f"<{len(self.sums)}Q", *self.sums),
                b"" if self.sizes is None else self.sizes.astype("<u4").tobytes(),
            ]
        )
        return body + _SUM.pack(xxh3()(body))

    @classmethod
    def parse(cls, data: Data) -> Header:
        """The header at the beginning of a blob, of which at least `header_bytes` bytes are given.

        Raises StoreDamaged for anything but a header that was packed so, StoreNewer for one of a later version.
        """
        view = memoryview(data)
        size = header_bytes(view)
        if size > len(view):
            raise StoreDamaged(f"a block's header of {size} bytes is cut off after {len(view)}")
        if _SUM.unpack_from(view, size - _SUM.size)[0] != xxh3()(view[: size - _SUM.size]):
            raise StoreDamaged("a block's header does not match its checksum")
        _, version, flags, _ = _PREFIX.unpack_from(view)
        if version != VERSION:
            raise StoreNewer(f"a block has format version {version}, and this kvpager reads {VERSION}")
        return _Parser(view[: size - _SUM.size], flags).header()


def header_bytes(prefix: Data) -> int:
    """Bytes of the header that begins with these PREFIX_BYTES bytes (or more); raises StoreDamaged."""
    if len(prefix) < PREFIX_BYTES:
        raise StoreDamaged(f"a block of {len(prefix)} bytes is too short to have a header")
    magic, _, _, size = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise StoreDamaged("these bytes are no block of kvpager's")
    if size < _FIXED_BYTES + _SUM.size:
        raise StoreDamaged(f"a block's header can't have {size} bytes")
    return int(size)


def _check_fields(head: BlockHead, layout: bytes, kind: bytes) -> None:
    sizes = {
        "pages": head.pages,
        "page_bytes": head.page_bytes,
        "depth": head.depth,
        "hits": head.hits,
        "tokens": len(head.tokens),
        "layout": len(layout),
        "digest_kind": len(kind),
        "digest": len(head.digest),
        "scores": len(head.scores),
    }
    for name, size in sizes.items():
        least = int(name in ("pages", "page_bytes"))
        if not least <= size <= MOST[name]:
            raise InputError(f"a block's {name} is {size}, and {least} to {MOST[name]} is allowed")
    if head.pages * head.page_bytes > MOST_PAYLOAD:
        raise InputError(f"a block has {head.pages} pages of {head.page_bytes} bytes, more than {MOST_PAYLOAD} bytes")
    for name, value, allowed in (
        ("key", head.key, (KEY_BYTES,)),
        ("parent", head.parent, (0, KEY_BYTES)),
        ("tenant", head.tenant, (TENANT_BYTES,)),
    ):
        if len(value) not in allowed:
            raise InputError(f"a block's {name} has {len(value)} bytes, and {' or '.join(map(str, allowed))} is needed")


class _Parser:
    """Takes a header apart whose checksum was right; sizes are looked at all the same before they are believed."""

    def __init__(self, body: memoryview, flags: int) -> None:
        self._body, self._flags = body, flags
        self._at = _FIXED_BYTES

    def _take(self, size: int) -> memoryview:
        if size > len(self._body) - self._at:
            raise StoreDamaged("a part of a block's header is longer than the header")
        self._at += size
        return self._body[self._at - size : self._at]

    def header(self) -> Header:
        sizes = _SIZES.unpack_from(self._body, _PREFIX.size)
        pages, page_bytes, depth, hits, stored, tokens, layout, kind, digest, scores, itemsize = sizes
        key, parent, tenant = _NAMES.unpack_from(self._body, _PREFIX.size + _SIZES.size)
        try:
            head = BlockHead(
                key=key,
                parent=parent if self._flags & _PARENT else b"",
                tenant=tenant,
                depth=depth,
                tokens=bytes(self._take(tokens)),
                approximate=bool(self._flags & _APPROXIMATE),
                layout=str(self._take(layout), "utf-8"),
                pages=pages,
                page_bytes=page_bytes,
                digest_kind=str(self._take(kind), "utf-8"),
                digest=bytes(self._take(digest)),
                scores=bytes(self._take(scores)),
                hits=hits,
            )
            _check_fields(head, head.layout.encode(), head.digest_kind.encode())
        except (UnicodeDecodeError, InputError) as error:
            raise StoreDamaged(f"a block's header makes no sense: {error}") from error
        if itemsize not in _ITEMSIZES or page_bytes % itemsize or self._flags >= 2 * _COMPRESSED:
            raise StoreDamaged(f"a block's header makes no sense: flags {self._flags}, numbers of {itemsize} bytes")
        header = self._pages(head, itemsize)
        if self._at != len(self._body) or (0 if header.alone else header.blob_bytes - header.header_bytes) != stored:
            raise StoreDamaged("a block's header makes no sense: its sizes do not add up")
        return header

    def _pages(self, head: BlockHead, itemsize: int) -> Header:
        compression: Compression = "zstd" if self._flags & _COMPRESSED else "none"
        if self._flags & _ALONE:
            return Header(head, compression, itemsize)
        sums = struct.unpack(f"<{head.pages}Q", self._take(8 * head.pages))
        if compression == "none":
            return Header(head, compression, itemsize, sums)
        table = np.frombuffer(self._take(4 * head.pages * itemsize), "<u4").reshape(head.pages, itemsize)
        if (table > head.page_bytes // itemsize).any():
            raise StoreDamaged("a block's header makes no sense: a compressed page is larger than the page")
        return Header(head, compression, itemsize, sums, table)
