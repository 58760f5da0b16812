"""Dense attention written out plainly: what every paged result is compared with."""

from __future__ import annotations

import numpy as np

from kvpager.ports import FloatArray


def dense_attention(
    queries: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    *,
    start: int,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    visible: np.ndarray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Output [Hq, T, D] and probabilities [Hq, T, N]; `visible` is bool [H, T, N] on top of causality and window."""
    heads, tokens, dim = queries.shape
    group = heads // keys.shape[0]
    wide_keys, wide_values = (np.repeat(array.astype(np.float64), group, axis=0) for array in (keys, values))
    scores = np.einsum("htd,hnd->htn", queries.astype(np.float64), wide_keys) * (scale or dim**-0.5)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    asking = start + np.arange(tokens)[:, None]
    asked = np.arange(keys.shape[1])[None]
    hidden = asked > asking
    if window is not None:
        hidden = hidden | (asked <= asking - window)
    scores[:, hidden] = -np.inf
    if visible is not None:
        scores[~np.repeat(visible, group, axis=0)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ wide_values).astype(np.float32), weights.astype(np.float32)
