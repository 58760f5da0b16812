"""kvpager under transformers: an attention, its mask and a cache for ``generate()``.

::

    import kvpager.hf

    kvpager.hf.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvpager")
    cache = kvpager.hf.PagerCache(model.config, PagerConfig(pool="64MiB"))
    model.generate(**inputs, cache=cache)

Importing this package registers nothing; it needs the extra ``kvpager[hf]`` (PyTorch and transformers).
"""

from __future__ import annotations

from kvpager.errors import MissingDependency

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        "kvpager.hf needs PyTorch and transformers; install them with: pip install 'kvpager[hf]'"
    ) from error

from kvpager.hf.attention import register
from kvpager.hf.cache import PagerCache
from kvpager.hf.shape import kv_shape

__all__ = ["PagerCache", "kv_shape", "register"]
