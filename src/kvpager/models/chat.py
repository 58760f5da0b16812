"""Conversations as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpager.errors import InputError
from kvpager.models.loading import LoadedModel

__all__ = ["chat_ids"]


def chat_ids(loaded: LoadedModel, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation inside the model's chat template, up to where the answer begins.

    The template's own marks are read as marks in messages too. Raises InputError where the model has no template, or
    where the template refuses the messages.
    """
    tokenizer: Any = loaded.tokenizer
    if not tokenizer.chat_template:
        raise InputError(f"{loaded.name} has no chat template")
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=True
        )["input_ids"]
    except Exception as error:  # a template is a program of the model's makers, and raises what it likes
        raise InputError(f"messages: the model's chat template refuses them: {error}") from error
    return list(ids)
