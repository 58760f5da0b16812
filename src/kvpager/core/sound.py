"""Whether a saved sequence can have come from `save`: it is looked at before anything is made of it.

Checksums tell what has changed on a disk, and not what somebody wrote there. What does not fit together is nothing that
a sequence could go on from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpager.core.blocks import packed
from kvpager.core.state import State, approximate_settings
from kvpager.stored import KEY_BYTES

if TYPE_CHECKING:
    from kvpager.core.saving import SavedSequence

__all__ = ["FORMAT", "sound"]

FORMAT = 2


def sound(state: State, saved: SavedSequence, root: bytes) -> bool:
    """Whether all parts of a saved sequence fit together, this pager, and a tenant's `root`.

    Whether its numbers are what a model has computed can't be told; whether its keys are those of its tokens can.
    """
    header, arrays = saved.header, saved.arrays
    told = (header.get("format"), header.get("namespace"))
    if told != (FORMAT, state.blocks.keys.namespace) or type(told[0]) is not int:
        return False
    return _header(header, state.config.page_size) and _arrays(state, header, arrays) and _chain(state, saved, root)


def _header(header: Mapping[str, Any], size: int) -> bool:
    """Whether the numbers of a header are what a sequence of so many tokens has."""
    length: Any = header.get("length")
    chain, exact = header.get("chain"), header.get("exact")
    starts = [header.get(name, length) for name in ("approximate_from", "private_from")]
    whole = [length, chain, exact, *(start for start in starts if start is not None)]
    texts = [header.get(name) for name in ("scores", "approximate")]
    if not all(type(one) is int for one in whole) or not all(isinstance(one, str) for one in texts):
        return False
    if not 1 <= length < 2**31 or not all(start is None or 0 <= start < length for start in starts):
        return False
    approximate, private = (length if start is None else start for start in starts)
    return bool(approximate <= private and (exact, chain) == (approximate // size, private // size))


def _arrays(state: State, header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bool:
    """Whether there are the arrays that there have to be, in their types and sizes."""
    full, rest = divmod(header["length"], state.config.page_size)
    pages = state.shape.layers * state.shape.kv_heads
    keys = min(len(arrays["keys"]), full) if "keys" in arrays and arrays["keys"].ndim else 0
    scores = arrays["open_scores"].size if "open_scores" in arrays else 0
    bytes_ = np.dtype(np.uint8)
    wanted: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        "tokens": (np.dtype(np.int64), (header["length"],)),
        "keys": (bytes_, (keys, KEY_BYTES)),
        "slots": (bytes_, (rest, pages * state.residency.storage.token_bytes)),
        "open_scores": (bytes_, (scores,)),
    }
    # a journal may not know of the last blocks, of the open one, or of its scores; what it knows has to fit
    if not {"tokens", "keys"} <= arrays.keys() <= wanted.keys() or (not rest and len(arrays) > 2):
        return False
    fits = all((array.dtype, array.shape) == wanted[name] for name, array in arrays.items())
    return fits and bool((arrays["tokens"] >= 0).all())


def _chain(state: State, saved: SavedSequence, root: bytes) -> bool:
    """Whether the keys under which others may find its first blocks are those of its tokens and this tenant."""
    size, exact, chain = state.config.page_size, saved.header["exact"], saved.header["chain"]
    if saved.header["approximate"] != approximate_settings(state.config):
        chain = min(chain, exact)  # nothing goes on from what another budget left out
    parent, tokens = root, saved.tokens
    for depth in range(min(chain, len(saved.arrays["keys"]))):
        parent = state.blocks.keys.key(parent, packed(tokens[depth * size : (depth + 1) * size]), depth >= exact)
        if parent != saved.arrays["keys"][depth].tobytes():
            return False
    return True
