"""Finding, checking and loading models: a known name, a Hugging Face folder, a .gguf file, or a hub id.

Start with :func:`load`. Weights are read from safetensors or GGUF only, never from pickles, and no code that
comes with a model is run.
"""

from __future__ import annotations

from kvpager.models.loading import LoadedModel, load
from kvpager.models.packages import require_packages

__all__ = ["LoadedModel", "load", "require_packages"]
