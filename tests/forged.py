"""Records that somebody forged: one part of a valid one changed in its type, its size or its value."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvpager.stores.records import DTYPES

__all__ = ["Parts", "forged"]

Parts = tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]
"""A record's header, of numbers, texts and objects of such, and its arrays."""

VALUES = [None, True, False, -1, 0, 1, 7, 2**31, 2**63, 10**30, -(2**70), 1.5, 1e300, "", "x", "\ud800", [], [1], {}]


def forged(draw: st.DrawFn, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> tuple[str, Parts]:
    """The name of what was changed ("a.b" inside an object, or an array's), and the record with it; copies."""
    names = [name for name, value in header.items() if not isinstance(value, dict)]
    names += [f"{name}.{inner}" for name, value in header.items() if isinstance(value, dict) for inner in value]
    name = draw(st.sampled_from([*sorted(names), *sorted(arrays)]), label="what")
    if name in arrays:
        changed = dict(arrays)
        array = _array(draw, arrays[name])
        if array is None:
            del changed[name]
        else:
            changed[draw(st.sampled_from([name, name, name, name, name + "?"]))] = array
        return name, (header, changed)
    copy = {key: dict(value) if isinstance(value, dict) else value for key, value in header.items()}
    outer, _, inner = name.partition(".")
    place, key = (copy[outer], inner) if inner else (copy, outer)
    _value(draw, place, key)
    return name, (copy, dict(arrays))


def _value(draw: st.DrawFn, place: dict[str, Any], name: str) -> None:
    old = place[name]
    whole = old if type(old) is int else 0
    near = st.integers(-20, 20).map(lambda more: whole + more)
    value = draw(st.one_of(st.just("gone"), st.sampled_from(VALUES), near, st.sampled_from(list(place.values()))))
    if value == "gone":
        del place[name]
    else:
        place[name] = value


def _array(draw: st.DrawFn, array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    how = draw(
        st.sampled_from(["gone", "none", "type", "bits", "flat", "deep", "short", "long", "value", "fill", "flip"])
    )
    if how == "gone":
        return None
    if how == "type":
        with np.errstate(all="ignore"):
            return array.astype(draw(st.sampled_from(DTYPES)))
    if how == "bits" and array.size and array.ndim:
        return array.view(draw(st.sampled_from(["|i1", "|u1"])))
    if how == "flat":
        return array.reshape(-1)
    if how == "deep":
        return array[None]
    if how == "short":
        return array[: len(array) // 2]
    if how == "long":
        return np.concatenate([array, array])
    if how in ("value", "fill", "flip") and array.size:
        return _changed(draw, array, how)
    return array[:0]


def _changed(draw: st.DrawFn, array: npt.NDArray[Any], how: str) -> npt.NDArray[Any]:
    copy = array.copy()
    place = draw(st.integers(0, copy.size - 1))
    limits = np.iinfo(copy.dtype)
    some = st.one_of(st.sampled_from([limits.min, limits.max, 0, 1]), st.integers(limits.min, limits.max))
    if how == "flip":
        data = copy.reshape(-1).view(np.uint8)
        data[draw(st.integers(0, data.size - 1))] ^= 1 << draw(st.integers(0, 7))
    elif how == "fill":
        copy[...] = draw(some)
    else:
        copy.reshape(-1)[place] = draw(some)
    return copy
