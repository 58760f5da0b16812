"""The composition root: from what a user asked for to a wired model, pager and cache.

Everything here works on plain options, so that the command line, tests and later the server build the
same things in the same way. Heavy packages (torch, transformers) are imported only by the functions that need them.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvpager import stores
from kvpager.config import parse_size
from kvpager.errors import ConfigError, SwapError
from kvpager.kernels.choose import REBUILD, native_available, set_threads
from kvpager.pools import PagerOptions, engine_pager_config, pager_config, require_frames
from kvpager.stores.packages import xxh3, zstandard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpager.engine.engine import Engine, EngineConfig
    from kvpager.hf import PagerCache
    from kvpager.journaled import JournalSink
    from kvpager.models import LoadedModel
    from kvpager.stored import BlockStore, Fence

__all__ = [
    "WEIGHTS",
    "PagerOptions",
    "StoreOptions",
    "WeightsName",
    "load_model",
    "make_cache",
    "make_engine",
    "open_store",
    "require_engine",
    "require_server",
    "require_storable",
    "require_store",
    "warm_up",
    "yield_while_waiting",
]

WeightsName = Literal["auto", "int8", "unpacked"]
WEIGHTS: tuple[str, ...] = get_args(WeightsName)


@dataclass(frozen=True)
class StoreOptions:
    """What a user says about keeping what was computed (see docs/stores.md). Raises ConfigError that names the field.

    path          the database's file; it and its folder are made where they are missing; None for no file
    url           a Redis that nodes share, behind the file (see docs/redis.md); it may have a password in it
    limit         text: the most bytes that it may take on disk
    tenant_limit  text: the most of them that one tenant's blocks and sessions may take; None for no such bound
    synchronous   "normal": what was stored survives the process's end at any moment; "full": and a loss of power
    compression   of pages, lossless: "none", or "zstd"
    publish       which blocks go to Redis: "selective", "all", "none"
    publish_hits  "selective": after so many hits
    shared_limit  text: the most bytes that all nodes together store in Redis
    ttl_s         for so many seconds after its last use a block or session stays in Redis
    timeout_s     for so many seconds a request waits for Redis
    """

    path: str | None = None
    limit: str = "10GiB"
    tenant_limit: str | None = None
    synchronous: stores.Synchronous = "normal"
    compression: stores.Compression = "none"
    url: str | None = field(default=None, repr=False)
    publish: stores.PublishingPolicy = "selective"
    publish_hits: int = 1
    shared_limit: str = "10GiB"
    ttl_s: int = 7 * 86400
    timeout_s: float = 0.1

    @classmethod
    def at(cls, places: Sequence[str], **options: Any) -> StoreOptions:
        """Options for a path, a Redis's URL, or one of each, in any order."""
        urls = [place for place in places if stores.is_redis_url(place)]
        paths = [place for place in places if not stores.is_redis_url(place)]
        if not places or len(urls) > 1 or len(paths) > 1:
            raise ConfigError("store: at most one path and one URL of a Redis are allowed, and one at least")
        return cls(path=paths[0] if paths else None, url=urls[0] if urls else None, **options)

    @property
    def told(self) -> dict[str, Any]:
        """All options, for people and JSON: without what is secret."""
        return {**asdict(self), "url": None if self.url is None else str(stores.redis_place(self.url))}

    @property
    def places(self) -> str:
        """Where it is, for people: without what is secret."""
        return " and ".join(place for place in (self.path, self.told["url"]) if place is not None)

    def __post_init__(self) -> None:
        if self.path is None and self.url is None:
            raise ConfigError("store: there is neither the path of a file nor the URL of a Redis")
        if self.path is not None:
            stores.require_path(self.path)
            place = Path(self.path).expanduser()
            if not self.path or (place.exists() and not place.is_file()):
                raise ConfigError(f"store: {self.path!r} is not the path of a file")
            above = next((folder for folder in place.parents if folder.exists()), None)
            if above is not None and not above.is_dir():
                raise ConfigError(f"store: {self.path!r} can't be made, since {above} is a file and no folder")
        if self.url is not None:
            stores.redis_place(self.url)
        limit = parse_size(self.limit, "store_limit")
        if limit < stores.LEAST_LIMIT_BYTES:
            raise ConfigError(
                f"store_limit: {self.limit} is less than {stores.LEAST_LIMIT_BYTES // 2**20} MiB, the least"
            )
        if self.tenant_limit is not None and parse_size(self.tenant_limit, "store_tenant_limit") > limit:
            raise ConfigError(f"store_tenant_limit: {self.tenant_limit} is more than store_limit, {self.limit}")
        if self.synchronous not in stores.SYNCHRONOUS:
            raise ConfigError(f"store_sync: {self.synchronous!r} is not one of {', '.join(stores.SYNCHRONOUS)}")
        if self.compression not in stores.COMPRESSIONS:
            raise ConfigError(f"store_compression: {self.compression!r} is not one of {', '.join(stores.COMPRESSIONS)}")
        self.redis_settings()
        self.publishing()

    def redis_settings(self, itemsize: int = 2) -> stores.RedisSettings:
        """How a Redis is used; its pages are numbers of `itemsize` bytes."""
        return stores.RedisSettings(
            limit_bytes=parse_size(self.shared_limit, "store_shared_limit"),
            ttl_s=self.ttl_s,
            timeout_s=self.timeout_s,
            compression=self.compression,
            itemsize=itemsize,
        )

    def publishing(self) -> stores.Publishing:
        """What goes to a Redis."""
        return stores.Publishing(self.publish, self.publish_hits)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SwapError(f"swap: {path} can't be made ({error.strerror}); give --swap memory or a path") from error


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    weights: WeightsName = "auto",
    threads: int | None = None,
    identify: bool = False,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model with kvpager's attention; `threads` sets PyTorch's and the kernels' for this process.

    `weights` says who computes the linear layers: "auto" packs bfloat16 weights for the compiled kernels where they
    are built, "int8" rounds them to 8 bits on the way, and "unpacked" leaves the model's own modules in charge.
    `identify` fills in the model's `identity`, as a store needs it: all weights are read for that.

    Raises ModelNotFound, ModelCorrupt, ModelTooLarge, UnsupportedModel, MissingDependency, or ConfigError for int8
    without compiled kernels or of a model that is not bfloat16.
    """
    from kvpager.models import load, require_packages

    if weights not in WEIGHTS:
        raise ConfigError(f"weights: {weights!r} is not one of {', '.join(WEIGHTS)}")
    if weights == "int8" and not native_available():
        raise ConfigError(f"weights: 'int8' needs the compiled kernels; {REBUILD}")
    require_packages()
    yield_while_waiting()
    import torch

    import kvpager.hf

    if threads is not None:
        torch.set_num_threads(threads)
    set_threads(threads)
    kvpager.hf.register()
    loaded = load(name, dtype=dtype, attn_implementation="kvpager", progress=progress)
    if weights == "int8" and loaded.dtype != "bfloat16":
        raise ConfigError(f"weights: 'int8' are rounded from bfloat16, and {name} was loaded as {loaded.dtype}")
    if identify:
        loaded = replace(loaded, identity=_identity(loaded, weights, threads))
    return loaded if weights == "unpacked" or not native_available() else _packed(loaded, weights)


def _identity(loaded: LoadedModel, weights: WeightsName, threads: int | None) -> str:
    """All that the model's keys and values depend on: weights, and who computes with them. No name is in it."""
    import torch
    import transformers

    from kvpager import __version__
    from kvpager.models.fingerprint import fingerprint

    computes = weights if native_available() else "unpacked"
    versions = f"kvpager={__version__},torch={torch.__version__},transformers={transformers.__version__}"
    return f"model={fingerprint(loaded.model, threads)},weights={computes},{versions}"


def _packed(loaded: LoadedModel, weights: WeightsName) -> LoadedModel:
    """The same model with packed modules in the place of its own, as far as they fit it."""
    import torch

    from kvpager.hf.accelerate import accelerate
    from kvpager.models.loading import held_bytes

    report = accelerate(loaded.model, "int8" if weights == "int8" else "bfloat16")
    if not report.replaced:
        return loaded
    if not report.left:
        # what is left to PyTorch is small, and its threads would wait by spinning on the kernels' cores
        torch.set_num_threads(1)
    return replace(loaded, weight_bytes=held_bytes(loaded.model) + report.packed_bytes)


def yield_while_waiting() -> None:
    """Let PyTorch's threads sleep while they wait for each other, unless the user has said otherwise.

    By default they spin. Where other programs want the cores too, that costs far more than it saves: with a load of
    8 on two cores a decode step took 9 times as much processor time. A short spin (about a tenth of a millisecond)
    bridges the gap between two small products: 9.1 tokens/s instead of 7.7. Read when PyTorch is imported first.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def make_cache(model: LoadedModel, options: PagerOptions, tokens: int) -> PagerCache:
    """A cache for one request of `tokens` tokens; the caller closes it.

    Raises ConfigError for options that don't fit, UnsupportedModel for an architecture that can't be paged.
    """
    from kvpager.hf import PagerCache, kv_shape

    dtype = options.kv_dtype or model.dtype
    shape = kv_shape(model.model.config, dtype)
    config = pager_config(options, tokens, shape)
    if options.swap is None and isinstance(config.swap, Path):
        _make_folder(config.swap)
    cache = PagerCache(model.model.config, config, dtype=dtype)
    try:
        least = cache.pager.minimum_frames(tokens=tokens)
        require_frames(f"memory: {options.memory}", cache.stats().frames, least, shape.page_bytes(config.page_size))
    except ConfigError:
        cache.close()
        raise
    return cache


def require_engine() -> None:
    """Raise MissingDependency, with the command that helps, unless an engine can be made here."""
    from kvpager.models import require_packages

    require_packages()


def require_server() -> None:
    """Raise MissingDependency, with the command that helps, unless a server can be run here."""
    from kvpager.models.packages import require_packages

    require_engine()
    require_packages(("fastapi", "uvicorn", "pydantic"), what="the server needs", extra="serve")


def require_store(options: StoreOptions) -> None:
    """Raise MissingDependency, with the command that helps, unless such a store can be opened here."""
    xxh3()
    if options.compression == "zstd":
        zstandard()
    if options.url is not None:
        stores.redis_tier(options.url)


def open_store(
    options: StoreOptions, itemsize: int = 2, fence: Callable[[], Fence | None] = lambda: None
) -> BlockStore:
    """The store that the options name; its pages are numbers of `itemsize` bytes, which compression goes by.

    `fence`: what must still be held to write to Redis. What the outside does is no error: the store says it in its
    `stats`. Raises MissingDependency.
    """
    far = None
    if options.url is not None:
        far = stores.redis_tier(options.url, options.redis_settings(itemsize), options.publishing(), fence)
    return stores.open_store(
        None if options.path is None else Path(options.path).expanduser(),
        limit_bytes=parse_size(options.limit, "store_limit"),
        tenant_limit_bytes=None if options.tenant_limit is None else parse_size(options.tenant_limit),
        synchronous=options.synchronous,
        compression=options.compression,
        itemsize=itemsize,
        far=far,
    )


def require_storable(options: PagerOptions) -> None:
    """Raise ConfigError for paging that leaves nothing to store."""
    if options.mode == "discard":
        raise ConfigError("store: blocks of mode 'discard' are never whole, so there is nothing to store")


def make_engine(
    loaded: LoadedModel,
    options: PagerOptions,
    config: EngineConfig,
    *,
    store: StoreOptions | None = None,
    journal: JournalSink | None = None,
    fence: Callable[[], Fence | None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """An engine over a loaded model; the thread that calls this owns it, and closes it. It reads `clock`, in seconds.

    With a `store` what it computes outlives it; the model must have been loaded with `identify`. The engine closes it.
    What another process needs to go on with its requests is told to `journal`; `fence` as for `open_store`.

    Raises ConfigError for options that don't fit, UnsupportedModel for an architecture that can't be paged, and
    MissingDependency.
    """
    from kvpager.engine.engine import Engine
    from kvpager.hf import kv_shape
    from kvpager.models.memory import free_memory

    shape = kv_shape(loaded.model.config, options.kv_dtype or loaded.dtype)
    longest = config.max_model_len or loaded.context_length
    if longest is None:
        raise ConfigError("max_model_len: the model doesn't say how many tokens it can read; give a number")
    pager = engine_pager_config(options, config, shape, longest, free_memory())
    if options.swap is None and isinstance(pager.swap, Path):
        _make_folder(pager.swap)
    if store is not None:
        require_storable(options)
        if not loaded.identity:
            raise ConfigError("store: a model whose blocks are stored is loaded with identify=True")
        pager = replace(pager, namespace=loaded.identity)
    opened = None if store is None else open_store(store, shape.itemsize, fence)
    try:
        engine = Engine(loaded, pager, config, kv_dtype=options.kv_dtype, store=opened, journal=journal, clock=clock)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    try:
        least = engine.pager.minimum_frames(tokens=longest)
        require_frames(f"memory: {options.memory}", engine.pager.frames, least, shape.page_bytes(pager.page_size))
    except ConfigError:
        engine.close()
        raise
    return engine


def warm_up(engine: Engine) -> None:
    """Run a small request and forget it, so that the first one of a client finds everything in place."""
    from kvpager.engine.params import SamplingParams

    engine.add("warm-up", [0] * 8, SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0), client=None)
    while engine.has_work:
        engine.step()
