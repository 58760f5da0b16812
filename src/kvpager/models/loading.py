"""Loading a model: find it, check it, see that it fits, then read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvpager.config import ITEMSIZE, DType
from kvpager.errors import ConfigError, ModelError
from kvpager.models.find import Source, find
from kvpager.models.folder import FolderInfo, read_folder
from kvpager.models.gguf import read_gguf
from kvpager.models.memory import free_memory, require_memory
from kvpager.models.packages import require_packages
from kvpager.models.weights import from_folder, from_gguf, stays_packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LoadedModel", "held_bytes", "load"]

SAFETENSORS_FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with what a caller needs to know about it.

    name            as it was asked for
    context_length  the most tokens that it can read and write together; None where it does not say
    weight_bytes    bytes of its weights and buffers in memory
    dtype           number format of its activations and hence of its keys and values
    end_ids         tokens that end an answer
    identity        all that its keys and values depend on but tokens, as text; "" where nobody asked for it
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    context_length: int | None
    weight_bytes: int
    dtype: DType
    end_ids: frozenset[int]
    identity: str = ""


def load(
    name: str = "smollm2-135m",
    *,
    dtype: str = "auto",
    attn_implementation: str = "kvpager",
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model by name: a known name, a Hugging Face folder, a .gguf file, or a hub id.

    `dtype` "auto" takes the checkpoint's own, but bfloat16 for float16 and GGUF, since CPUs are slow with float16.
    `attn_implementation` "kvpager" needs :func:`kvpager.hf.register` first. `progress` gets a line before what
    takes long. Raises ModelNotFound, ModelCorrupt, ModelTooLarge (before anything big is read), UnsupportedModel,
    MissingDependency, or ModelError.
    """
    if dtype not in ("auto", *ITEMSIZE):
        raise ConfigError(f"dtype: {dtype!r} is not one of auto, {', '.join(ITEMSIZE)}")
    require_packages()
    if attn_implementation == "kvpager":
        _require_registered()
    source = find(name, progress if progress is not None else lambda line: None)
    read = _load_gguf if source.is_gguf else _load_folder
    return _loaded(name, *read(source, name, dtype, attn_implementation))


def _require_registered() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "kvpager" not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise ModelError("attn_implementation 'kvpager' is not registered; call kvpager.hf.register() first")


def _load_folder(
    source: Source, name: str, dtype: str, attn_implementation: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    info = read_folder(source.path)
    chosen = _own_dtype(info) if dtype == "auto" else dtype
    require_memory(sum(info.parameters.values()) * ITEMSIZE[chosen], name, free_memory())
    return from_folder(source.path, name, dtype=chosen, attn_implementation=attn_implementation)


def _load_gguf(
    source: Source, name: str, dtype: str, attn_implementation: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    info = read_gguf(source.path)
    chosen = "bfloat16" if dtype == "auto" else dtype
    packed = stays_packed(info.architecture)
    # Unpacking holds the weights twice: as read from the file, and as the model keeps them.
    needed = info.file_bytes if packed else 2 * info.parameters * ITEMSIZE[chosen]
    require_memory(needed, name, free_memory())
    return from_gguf(source.path, name, dtype=chosen, attn_implementation=attn_implementation, packed=packed)


def _own_dtype(info: FolderInfo) -> str:
    """The dtype that config.json names, else the one of most weights; bfloat16 instead of float16."""
    named = info.config.get("dtype") or info.config.get("torch_dtype")
    if named not in ITEMSIZE:
        named = SAFETENSORS_FLOATS.get(
            max(info.parameters, key=info.parameters.__getitem__, default="BF16"), "bfloat16"
        )
    return "bfloat16" if named == "float16" else str(named)


def _loaded(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    chosen = str(model.dtype).removeprefix("torch.")
    if chosen not in ITEMSIZE:
        raise ModelError(f"{name}: weights of type {chosen} can't be run; use --dtype float32 or bfloat16")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        context_length=int(context) if context else None,
        weight_bytes=held_bytes(model),
        dtype=cast(DType, chosen),
        end_ids=_end_ids(model, tokenizer),
    )


def held_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's parameters and buffers in memory, those that are shared counted once."""
    return sum(part.nbytes for part in (*model.parameters(), *model.buffers()))


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    settings = model.generation_config
    ids = settings.eos_token_id if settings is not None else None
    if ids is None:
        ids = tokenizer.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])
