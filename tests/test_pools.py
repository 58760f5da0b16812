"""From a user's options and a request to the pager's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpager.config import KVShape, PagerConfig
from kvpager.core.pager import Pager
from kvpager.errors import ConfigError
from kvpager.pools import PagerOptions, full_frames, least_frames, pager_config, pool_frames

SHAPE = KVShape(layers=4, kv_heads=2, query_heads=4, head_dim=16, dtype="float32")
PAGE = SHAPE.page_bytes(16)
TOKENS = 4000


@pytest.mark.parametrize(
    ("text", "frames"),
    [("512", 512), ("25%", 500), ("100%", 2000), ("1MiB", 2**20 // PAGE), ("0.5 %", 10), ("1 MB", 10**6 // PAGE)],
)
def test_a_pool_is_frames_a_size_or_a_share_of_the_full_kv(text: str, frames: int) -> None:
    assert full_frames(TOKENS, SHAPE, 16) == 250 * 4 * 2
    assert pool_frames(text, TOKENS, SHAPE, 16) == frames


@pytest.mark.parametrize("text", ["0", "0%", "101%", "-5", "much", "", "10B", "nan%", "5 apples"])
def test_a_pool_that_is_none_of_these_is_refused_by_its_value(text: str) -> None:
    with pytest.raises(ConfigError, match="pool: "):
        pool_frames(text, TOKENS, SHAPE, 16)


@pytest.mark.promise(6)
@pytest.mark.parametrize("pool", ["1", "10", "1%", "64KiB"])
def test_a_pool_below_the_minimum_is_refused_with_the_number_needed(pool: str) -> None:
    least = least_frames(PagerConfig(), SHAPE, TOKENS)
    with pytest.raises(ConfigError, match=rf"pool: {pool} gives \d+ frames?, .* at least {least} "):
        pager_config(PagerOptions(pool=pool, swap="memory"), TOKENS, SHAPE)
    pager_config(PagerOptions(pool=str(least), swap="memory"), TOKENS, SHAPE)


def test_pool_and_memory_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="either --memory or --pool"):
        pager_config(PagerOptions(pool="512", memory="64MiB"), TOKENS, SHAPE)


def test_the_default_pool_is_the_requests_full_kv_and_at_most_256_mib() -> None:
    options = PagerOptions(swap="memory")
    assert pager_config(options, TOKENS, SHAPE).pool == 2000
    assert pager_config(options, 10, SHAPE).pool == least_frames(PagerConfig(), SHAPE, 10)
    assert pager_config(options, 10**7, SHAPE).pool == 256 * 2**20 // PAGE


@pytest.mark.promise(7)
@pytest.mark.parametrize("budget", [None, 512])
@pytest.mark.parametrize("memory", ["1MiB", "2MiB", "1GiB"])
def test_memory_bounds_frames_digests_and_tables_together(memory: str, budget: int | None) -> None:
    config = pager_config(PagerOptions(memory=memory, budget=budget, swap="memory"), TOKENS, SHAPE)
    with Pager(SHAPE, config) as pager:
        stats = pager.stats()
        limit = {"1MiB": 2**20, "2MiB": 2**21, "1GiB": 2**30}[memory]
        assert stats.resident_bytes <= limit
        assert stats.frames <= full_frames(TOKENS, SHAPE, 16)


def test_swap_is_a_file_under_the_cache_directory_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pager_config(PagerOptions(), TOKENS, SHAPE).swap == tmp_path / "kvpager" / "swap"
    assert pager_config(PagerOptions(swap="memory"), TOKENS, SHAPE).swap == "memory"
    assert pager_config(PagerOptions(swap="x/y"), TOKENS, SHAPE).swap == Path("x/y")
    assert pager_config(PagerOptions(mode="discard", budget=512), TOKENS, SHAPE).swap == "memory"


def test_settings_reach_the_configuration() -> None:
    options = PagerOptions(budget=512, policy="lru", digest="minmax", page_size=8, tile=16, swap="memory", seed=3)
    config = pager_config(options, TOKENS, SHAPE)
    assert (config.budget, config.policy, config.digest) == (512, "lru", "minmax")
    assert (config.page_size, config.tile, config.seed, config.max_tokens) == (8, 16, 3, TOKENS)
