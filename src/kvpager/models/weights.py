"""Reading models and tokenizers from local files with transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.errors import ModelCorrupt, ModelError, UnsupportedModel
from kvpager.models.packages import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["from_folder", "from_gguf", "stays_packed"]


def from_folder(
    path: Path, name: str, *, dtype: str, attn_implementation: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a Hugging Face folder; see :func:`_read` for what is raised."""
    return _read(path, name, dtype=dtype, attn_implementation=attn_implementation)


def from_gguf(
    path: Path, name: str, *, dtype: str, attn_implementation: str, packed: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a GGUF file; `packed` leaves the weights in their blocks (see :func:`stays_packed`)."""
    from transformers import GgufConfig

    model, tokenizer = _read(
        path.parent,
        name,
        dtype=dtype,
        attn_implementation=attn_implementation,
        gguf_file=path.name,
        quantization_config=GgufConfig(gguf_file=path.name, dequantize=not packed),
    )
    if not packed and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it is a plain model now, and is to be saved as one
    return model, tokenizer


def stays_packed(architecture: str) -> bool:
    """Whether transformers can run a GGUF of this architecture without unpacking it on this machine.

    It needs its ``kernels`` package and an accelerator; on a CPU every pass would unpack all weights again.
    """
    if importlib.util.find_spec("kernels") is None:
        return False
    import torch
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    accelerated = torch.cuda.is_available() or torch.backends.mps.is_available()
    return accelerated and bool(is_gguf_arch_supported(architecture))


def _read(
    folder: Path, name: str, *, dtype: str, attn_implementation: str, gguf_file: str | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read local files only: no network, no pickles, no code that comes with the model.

    Raises UnsupportedModel for what is no decoder-only language model, ModelCorrupt when weights are missing,
    ModelError for all else that transformers refuses.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf_file is not None:
        local["gguf_file"] = gguf_file
    try:
        with quiet():
            if gguf_file is None:  # reading a GGUF's metadata takes seconds, and its architecture is checked below
                config = AutoConfig.from_pretrained(folder, **local)
                if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
                    raise UnsupportedModel(f"{name}: {config.model_type} is not a decoder-only language model")
            tokenizer = AutoTokenizer.from_pretrained(folder, **local)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                attn_implementation=attn_implementation,
                use_safetensors=True,
                output_loading_info=True,
                **local,
                **options,
            )
    except (UnsupportedModel, MemoryError):
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        kind = "" if isinstance(error, (OSError, ValueError)) and line else f"{type(error).__name__}: "
        raise ModelError(f"{name} can't be loaded: {kind}{line}") from error
    model, info = loaded
    # transformers fills what a file lacks with random numbers.
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelCorrupt(f"{name} lacks weights, {missing[0]} among {len(missing)}; get it again")
    model.eval().requires_grad_(False)
    return model, tokenizer
