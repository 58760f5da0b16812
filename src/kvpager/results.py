"""What becomes of prompts: answers as they grow, and whole ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpager.engine.outputs import FinishReason, Output, TokenLogprob, Usage

__all__ = ["Answer", "Completion", "RequestResult"]


@dataclass(frozen=True)
class Completion:
    """One answer: `index` is its number among the request's n.

    logprobs       of its tokens, where the parameters ask for them
    stop_reason    the stop string or token id that ended it; None for the model's own end mark
    usage          what it cost: tokens, cached tokens, pages, coverage, times
    error          why it failed, with finish_reason "error"
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage | None
    error: str | None = None


@dataclass(frozen=True)
class RequestResult:
    """What became of one prompt: its token ids and its n answers. `prompt` is None where ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    outputs: tuple[Completion, ...]

    @property
    def usage(self) -> Usage | None:
        """That of the first answer, with the tokens of all n; None where there is none."""
        told = [output.usage for output in self.outputs if output.usage is not None]
        return replace(told[0], completion_tokens=sum(one.completion_tokens for one in told)) if told else None


class Answer:
    """One answer while it grows: outputs of an engine, and what they come to."""

    def __init__(self) -> None:
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self._outputs: list[Output] = []

    def add(self, output: Output) -> None:
        """What a step has added."""
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self._outputs.append(output)

    def whole(self, index: int) -> Completion:
        """The answer with number `index`, once it has ended."""
        last = self._outputs[-1]
        assert last.finish_reason is not None, "the engine has no work and an answer has not ended"
        told = [one for output in self._outputs for one in output.logprobs or ()]
        return Completion(
            index=index,
            text="".join(output.text for output in self._outputs),
            token_ids=tuple(token for output in self._outputs for token in output.token_ids),
            logprobs=tuple(told) if any(output.logprobs is not None for output in self._outputs) else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            usage=last.usage,
            error=last.error,
        )
