"""kvpager's store under an unmodified vLLM: a connector for its blocks of keys and values; see docs/vllm.md.

vLLM asks a connector in two places. In the scheduler it says which requests get blocks, and `books.Books` answers how
many tokens the store has beyond those that vLLM has itself, and writes down for each step what the worker is to load
and to save (`plan.Plan`). In the worker, where the blocks lie, `transfers.Transfers` carries that out. Both open the
same store: the scheduler only asks for keys.

Keys are kvpager's chain keys over the tokens of vLLM's blocks, in a namespace of their own (`keys.Identity`): vLLM and
kvpager never find each other's blocks in a store that they share. One block of vLLM is one stored block; its pages are
the layers, each with the bytes of that layer's keys and values as vLLM lays them out.

Saving. A block is offered in the step that fills it and copied out after that step's forward pass; the store writes it
behind. Where the store has no room at the moment the block is offered again after each later step, until its
request ends or is preempted, and is given up then, before vLLM may fill it anew.

Loading goes on beside the steps of other requests, in a thread, into blocks that vLLM holds for that and makes
findable for others only when they are whole. (vLLM can also load within a step, layer by layer. But a block that fails
then is findable before it has been computed again, and another request reads what is not there.) Each block
is read and checked as a whole before anything of it is copied. Those that are missing or damaged are reported,
with all that follow, and vLLM computes them.

Requests with LoRA adapters, images or embeddings in the prompt, and resumable ones are neither saved nor found: their
tokens don't say all that their blocks depend on.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVPagerConnector"]


def __getattr__(name: str) -> Any:
    # The rest of this package needs no vLLM, so neither does importing it.
    if name == "KVPagerConnector":
        from kvpager.vllm.connector import KVPagerConnector

        return KVPagerConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
