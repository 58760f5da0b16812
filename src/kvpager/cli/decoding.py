"""The loop of ``kvpager generate``: prefill in chunks, then a token at a time, with text that streams cleanly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvpager.engine.text import TextStream, decoder
from kvpager.pools import PREFILL_CHUNK

if TYPE_CHECKING:
    import torch

    from kvpager.core.pager import Pager
    from kvpager.hf import PagerCache
    from kvpager.models import LoadedModel

__all__ = ["Generation", "Sampler", "generate", "prefill"]


@dataclass(frozen=True)
class Generation:
    """What :func:`generate` wrote, and how long it took. `token_ids` ends before the end mark."""

    token_ids: list[int]
    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    steps: int  # forward passes after the prefill

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens read a second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens written a second after the first, which the prefill gives; None without such."""
        return self.steps / self.decode_seconds if self.steps else None


class Sampler:
    """Picks the next token from logits: the likeliest at temperature 0, else a draw with a generator of its own."""

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        import torch

        self.temperature = temperature
        self.top_p = top_p
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """The next token's id; `logits` is [vocabulary], any float dtype."""
        import torch

        if self.temperature == 0:
            return int(logits.argmax())
        # Subtracting the maximum first keeps tiny temperatures from overflowing.
        scaled = (logits.double() - logits.max().double()) / self.temperature
        probability, ids = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
        before = probability.cumsum(-1) - probability
        probability[before >= self.top_p] = 0.0  # the likeliest one stays always
        return int(ids[torch.multinomial(probability, 1, generator=self._generator)])


def generate(
    loaded: LoadedModel,
    cache: PagerCache,
    prompt: list[int],
    *,
    max_tokens: int,
    sampler: Sampler,
    ignore_eos: bool = False,
    on_prefill: Callable[[int], None] = lambda done: None,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Read `prompt`, then write up to `max_tokens` tokens; stops before an end mark of the model unless `ignore_eos`.

    `on_prefill` gets the tokens read so far; `on_text` gets text as it is complete. The cache must be empty.
    """
    import torch

    stream = TextStream(decoder(loaded.tokenizer, skip_special_tokens=True))
    give = on_text if on_text is not None else lambda text: None
    finish: Literal["stop", "length"] = "length"
    steps = 0
    with torch.inference_mode():
        started = time.perf_counter()
        logits = prefill(loaded.model, cache, prompt, on_prefill)
        token = sampler(logits)
        decode_started = time.perf_counter()
        for remaining in range(max_tokens, 0, -1):
            if token in loaded.end_ids and not ignore_eos:
                finish = "stop"
                break
            if text := stream.push(token):
                give(text)
            if remaining > 1:
                token = sampler(_forward(loaded.model, cache, [token]))
                steps += 1
        ended = time.perf_counter()
    if text := stream.finish():
        give(text)
    return Generation(
        token_ids=stream.ids,
        text=stream.text,
        finish_reason=finish,
        prompt_tokens=len(prompt),
        prefill_seconds=decode_started - started,
        decode_seconds=ended - decode_started,
        steps=steps,
    )


def chunk_size(pager: Pager) -> int:
    """Tokens of the prompt that one forward reads: whole tiles, and no more than a discarding pool has frames for."""
    config = pager.config
    most = -(-PREFILL_CHUNK // config.tile) * config.tile
    if config.mode == "recall":
        return most
    spare = max(
        0, pager.stats().frames - pager.minimum_frames()
    )  # the minimum is for one tile; more takes one layer's pages
    return min(most, config.tile * (1 + spare * config.page_size // (pager.shape.kv_heads * config.tile)))


def chunks(length: int, step: int) -> Iterable[tuple[int, int]]:
    """(start, stop) of the prefill's chunks of `step` tokens; the last may be shorter."""
    return ((start, min(start + step, length)) for start in range(0, length, step))


def prefill(model: Any, cache: PagerCache, prompt: list[int], on_prefill: Callable[[int], None]) -> torch.Tensor:
    """Read a prompt in chunks: logits after its last token. `on_prefill` gets the tokens read so far."""
    logits = None
    for start, stop in chunks(len(prompt), chunk_size(cache.pager)):
        logits = _forward(model, cache, prompt[start:stop])
        on_prefill(stop)
    assert logits is not None, "a prompt has at least one token"
    return logits


def _forward(model: Any, cache: PagerCache, token_ids: list[int]) -> torch.Tensor:
    """Logits after the last of `token_ids`, float [vocabulary]."""
    import torch

    inputs = torch.tensor([token_ids], device=model.device)
    output = model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1]
    return logits
