"""Models named by their Hugging Face id: from the local copy first, else from the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvpager.errors import ModelError, ModelNotFound
from kvpager.models.folder import read_folder
from kvpager.models.memory import free_memory, require_memory
from kvpager.models.packages import quiet

__all__ = ["fetch"]

PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]
ANSWER_SECONDS = 5.0  # how long the hub may take to answer at all


def fetch(repo: str, progress: Callable[[str], None]) -> Path:
    """The folder of a hub model, downloaded unless a copy is there.

    Raises ModelNotFound when there is no copy and the hub has none or can't be reached (within seconds),
    ModelTooLarge before a download that could not be loaded, ModelError when the download breaks off.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, allow_patterns=PATTERNS, local_files_only=True))
        read_folder(folder)
    except LocalEntryNotFoundError:
        pass
    except ModelError:
        pass  # an earlier download broke off; the next one goes on from there
    else:
        return folder
    size = _size(repo)
    require_memory(size, repo, free_memory())
    progress(f"Downloading {repo} ({size / 1e9:.2f} GB)")
    try:
        with quiet():
            return Path(snapshot_download(repo, allow_patterns=PATTERNS))
    except Exception as error:
        raise ModelError(f"{repo}: the download broke off ({_first_line(error)}); run the command again") from error


def _size(repo: str) -> int:
    """Bytes of the model's safetensors files, as the hub says."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = HfApi().model_info(repo, timeout=ANSWER_SECONDS, files_metadata=True)
    except RepositoryNotFoundError:
        raise ModelNotFound(f"{repo}: no file or folder here, and no public model on the Hugging Face hub") from None
    except Exception as error:
        raise ModelNotFound(
            f"{repo}: no file or folder here, no local copy from the Hugging Face hub, and the hub can't be reached "
            f"({_first_line(error)})"
        ) from error
    files = [file for file in info.siblings or [] if file.rfilename.endswith(".safetensors")]
    if not files:
        raise ModelNotFound(f"{repo}: the hub has no .safetensors weights for it, and pickles are not loaded")
    return sum(file.size or 0 for file in files)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
