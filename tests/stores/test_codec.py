"""Blocks as bytes and back: bit for bit, or StoreDamaged."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager.errors import InputError, MissingDependency, StoreDamaged, StoreNewer
from kvpager.stored import StoredBlock
from kvpager.stores import packages
from kvpager.stores.codec import decode, encode, encode_head, read_head
from kvpager.stores.header import COMPRESSIONS, MOST_PAYLOAD, PREFIX_BYTES, Compression, Header, header_bytes
from tests.stores.made import blocks, flipped, made_block, resealed

ROOT = Path(__file__).parents[2]
compressions = pytest.mark.parametrize("compression", COMPRESSIONS)


def assert_same(found: StoredBlock, block: StoredBlock) -> None:
    assert found.head == block.head
    assert found.payload.dtype == np.uint8
    assert np.array_equal(found.payload, block.payload)


@given(block=blocks(), compression=st.sampled_from(COMPRESSIONS), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_a_block_comes_back_bit_for_bit(block: StoredBlock, compression: Compression, itemsize: int) -> None:
    blob = encode(block, compression, itemsize)
    assert_same(decode(blob, block.head.key), block)
    assert read_head(blob) == block.head
    assert read_head(encode_head(block.head)) == block.head


@given(block=blocks(), compression=st.sampled_from(COMPRESSIONS))
def test_one_page_is_read_by_the_header_and_its_slice_alone(block: StoredBlock, compression: Compression) -> None:
    blob = encode(block, compression)
    header = Header.parse(blob[: header_bytes(blob[:PREFIX_BYTES])])
    header.require(block.head.key)
    assert header.blob_bytes == len(blob)
    for page in reversed(range(block.head.pages)):
        begin, size = header.page_range(page)
        assert np.array_equal(header.page(page, blob[begin : begin + size]), block.payload[page])
    assert header.damaged(blob) == []
    order = [*reversed(range(block.head.pages)), 0]
    slices = [blob[begin : begin + size] for begin, size in map(header.page_range, order)]
    assert np.array_equal(header.pages(order, slices), block.payload[order])


@compressions
def test_any_flipped_bit_is_told(compression: Compression) -> None:
    block = made_block(pages=3, page_bytes=64)
    blob = encode(block, compression)
    for bit in range(8 * len(blob)):
        with pytest.raises(StoreDamaged):
            decode(flipped(blob, bit), block.head.key)
    for bit in range(8 * header_bytes(blob)):
        with pytest.raises(StoreDamaged):
            read_head(flipped(blob, bit))


@given(data=st.data(), block=blocks(), compression=st.sampled_from(COMPRESSIONS))
def test_any_flipped_bit_of_any_block_is_told(
    data: st.DataObject, block: StoredBlock, compression: Compression
) -> None:
    blob = encode(block, compression)
    with pytest.raises(StoreDamaged):
        decode(flipped(blob, data.draw(st.integers(0, 8 * len(blob) - 1))), block.head.key)


@compressions
def test_a_flipped_bit_in_a_page_costs_that_page_alone(compression: Compression) -> None:
    block = made_block(pages=3, page_bytes=64)
    blob = encode(block, compression)
    header = Header.parse(blob)
    for bit in range(8 * header.header_bytes, 8 * len(blob)):
        changed = flipped(blob, bit)
        (wrong,) = header.damaged(changed)
        for page in range(3):
            begin, size = header.page_range(page)
            if page == wrong:
                assert begin <= bit // 8 < begin + size
                with pytest.raises(StoreDamaged, match=f"page {page} "):
                    header.page(page, changed[begin : begin + size])
            else:
                assert np.array_equal(header.page(page, changed[begin : begin + size]), block.payload[page])


@compressions
def test_any_other_length_is_told(compression: Compression) -> None:
    block = made_block(pages=3, page_bytes=64)
    blob = encode(block, compression)
    header = Header.parse(blob)
    for length in range(len(blob)):
        with pytest.raises(StoreDamaged):
            decode(blob[:length], block.head.key)
        begins = [header.page_range(page)[0] for page in range(3)]
        assert header.damaged(blob[:length]) == [
            page for page in range(3) if length < begins[page] + header.page_range(page)[1]
        ]
    with pytest.raises(StoreDamaged, match="its header says"):
        decode(blob + b"\0", block.head.key)


@given(st.binary(max_size=300))
def test_bytes_of_others_are_told(data: bytes) -> None:
    for read in (read_head, Header.parse, lambda blob: decode(blob, bytes(32))):
        with pytest.raises(StoreDamaged):
            read(data)
        with pytest.raises(StoreDamaged):
            read(b"KVPB" + data)


def test_another_block_and_a_head_without_pages_are_told() -> None:
    one, other = made_block(1), made_block(2)
    with pytest.raises(StoreDamaged, match=f"block {other.head.key[:6].hex()} lies where block"):
        decode(encode(other), one.head.key)
    with pytest.raises(StoreDamaged, match="has no pages"):
        decode(encode_head(one.head), one.head.key)


def test_pages_that_changed_places_are_told() -> None:
    block = made_block(pages=2, page_bytes=64)
    blob = encode(block)
    begin = header_bytes(blob)
    swapped = blob[:begin] + blob[begin + 64 :] + blob[begin : begin + 64]
    assert Header.parse(blob).damaged(swapped) == [0, 1]


@given(data=st.data(), compression=st.sampled_from(COMPRESSIONS))
def test_a_header_that_lies_with_a_right_checksum_is_an_error_of_the_store(
    data: st.DataObject, compression: Compression
) -> None:
    """Nothing is believed for its checksum alone: no other exception, nothing read beyond the blob."""
    block = made_block(pages=2, page_bytes=16)
    changed = bytearray(encode(block, compression))
    end = header_bytes(changed)
    at = data.draw(st.integers(12, end - 9))
    value = data.draw(st.binary(min_size=1, max_size=min(8, end - 8 - at)))
    changed[at : at + len(value)] = value
    with suppress(StoreDamaged):
        assert decode(resealed(bytes(changed)), block.head.key).payload.shape[0] >= 1


def test_sizes_are_bounded_before_anything_is_allocated() -> None:
    blob = bytearray(encode(made_block(pages=2, page_bytes=16)))
    struct.pack_into("<II", blob, PREFIX_BYTES, 2**20, 2**24)
    with pytest.raises(StoreDamaged, match=f"more than {MOST_PAYLOAD} bytes"):
        read_head(resealed(bytes(blob)))


def test_a_later_version_is_told_apart_from_damage() -> None:
    blob = bytearray(encode(made_block()))
    struct.pack_into("<H", blob, 4, 2)
    with pytest.raises(StoreDamaged):
        read_head(blob)
    with pytest.raises(StoreNewer, match="format version 2, and this kvpager reads 1"):
        read_head(resealed(bytes(blob)))


def test_a_frame_that_is_no_frame_is_damage_even_with_right_checksums() -> None:
    block = made_block(pages=1, page_bytes=256)
    header = Header.parse(encode(block, "zstd"))
    assert header.sizes is not None
    for pages in (b"\xff" * int(header.sizes.sum()), bytes(int(header.sizes.sum()))):
        forged = replace(header, sums=(packages.xxh3()(pages),))
        with pytest.raises(StoreDamaged, match="compressed page"):
            decode(forged.pack() + pages, block.head.key)


def test_compression_is_per_plane_and_never_costs_more_than_the_plane() -> None:
    still = StoredBlock(made_block(page_bytes=512).head, np.zeros((3, 512), np.uint8))
    assert len(encode(still, "zstd")) < len(encode(still)) - 1400
    noise = np.random.default_rng(0).integers(0, 256, (3, 512), dtype=np.uint8)
    random = StoredBlock(still.head, noise)
    header = Header.parse(encode(random, "zstd"))
    assert header.sizes is not None
    assert (header.sizes == 256).all()
    real = made_block(page_bytes=512)  # bfloat16: the high bytes gain, the low ones do not
    header = Header.parse(encode(real, "zstd"))
    assert header.sizes is not None
    assert (header.sizes[:, 0] == 256).all()
    assert (header.sizes[:, 1] < 160).all()


def test_payloads_in_any_memory_order_are_taken() -> None:
    block = made_block(pages=4, page_bytes=64)
    scattered = StoredBlock(block.head, np.asfortranarray(block.payload))
    for compression in COMPRESSIONS:
        assert encode(scattered, compression) == encode(block, compression)


def test_what_can_not_be_stored_is_refused() -> None:
    block = made_block(pages=3, page_bytes=64)
    with pytest.raises(InputError, match=r"payload is uint8 \(2, 64\), and uint8 \(3, 64\)"):
        encode(StoredBlock(block.head, block.payload[:2]))
    with pytest.raises(InputError, match="payload is float32"):
        encode(StoredBlock(block.head, block.payload.astype(np.float32)))
    with pytest.raises(InputError, match="compression is 'gzip', and one of none, zstd"):
        encode(block, "gzip")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="itemsize is 3"):
        encode(block, "zstd", itemsize=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key": b"short"}, "key has 5 bytes, and 32"),
        ({"parent": b"short"}, "parent has 5 bytes, and 0 or 32"),
        ({"tenant": b""}, "tenant has 0 bytes, and 16"),
        ({"pages": 0}, "pages is 0, and 1 to"),
        ({"page_bytes": 0}, "page_bytes is 0, and 1 to"),
        ({"pages": 2**20, "page_bytes": 2**20}, "more than 1073741824 bytes"),
        ({"depth": -1}, "depth is -1"),
        ({"hits": 2**63}, "hits is 9223372036854775808"),
        ({"tokens": bytes(2**20 + 1)}, "tokens is 1048577, and 0 to 1048576"),
        ({"layout": "x" * 5000}, "layout is 5000"),
        ({"digest_kind": "x" * 300}, "digest_kind is 300"),
    ],
)
def test_fields_out_of_bounds_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode_head(replace(made_block().head, **fields))  # type: ignore[arg-type]


def test_another_process_makes_the_same_bytes(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from kvpager.stores.codec import decode, encode
        from tests.stores.made import made_block
        block = made_block(7)
        decode(Path(sys.argv[1]).read_bytes(), block.head.key)
        sys.stdout.buffer.write(encode(block))
    """
    blob = encode(made_block(7))
    (tmp_path / "blob").write_bytes(blob)
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "blob")]
    for seed in ("1", "2"):
        done = subprocess.run(command, capture_output=True, cwd=ROOT, env={"PYTHONHASHSEED": seed}, check=True)
        assert done.stdout == blob


def test_the_bytes_are_as_they_were_when_the_format_was_fixed() -> None:
    """A change of the format needs a new version, and this blob to be readable still (or told as older)."""
    block = StoredBlock(
        replace(made_block(1, pages=1, page_bytes=4).head, digest_kind="", digest=b"", scores=b"s"),
        np.array([[1, 2, 3, 4]], np.uint8),
    )
    assert encode(block).hex() == (
        "4b56504201000500ca000000"  # magic, version, flags, bytes of the header
        "010000000400000001000000010000000000000004000000000000002000000010000000000000000100000002"  # sizes
        "227ba5f2c6c9109fe5c44a0696f393379607493a377f522ee27d9a7ae3227d89"  # key
        "49ac5de219edae62f9fdeea0fc3f3af48fd832f22fac50820ac11174d6e068bd"  # parent
        "00000000000000000000000000000000"  # tenant
        "0000000000000000010000000000000002000000000000000300000000000000"  # tokens
        "62666c6f61743136205b332c2031365d"  # layout
        "73"  # scores
        "2246ac33907b8b98"  # checksum of the page
        "13c602335f20df14"  # checksum of the header
        "01020304"  # page
    )


def test_a_missing_package_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, compression in (("xxhash", "none"), ("zstandard", "zstd")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(MissingDependency, match=rf"{name}, not installed; run: pip install 'kvpager\[store\]'"):
                encode(made_block(), compression)  # type: ignore[arg-type]
