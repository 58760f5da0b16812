"""``LLM``: many prompts at once, offline, in this process."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from reprlib import repr as brief
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvpager import bars, build
from kvpager.config import DigestKind, DType, KernelName, Mode, PolicyName
from kvpager.engine.params import SamplingParams
from kvpager.engine.text import require_text
from kvpager.errors import EngineStopped, InputError, SessionBusy, StepError
from kvpager.models.chat import chat_ids
from kvpager.results import Answer, Completion, RequestResult

if TYPE_CHECKING:
    from kvpager.build import WeightsName
    from kvpager.engine.engine import Engine
    from kvpager.engine.outputs import EngineStats, Output
    from kvpager.models import LoadedModel

__all__ = ["LLM", "Completion", "Message", "Prompt", "RequestResult"]

Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = Mapping[str, str]
"""One turn of a conversation: `role` and `content`."""

MOST_WAITING = 2**31 - 1  # offline nobody is refused because others wait


class LLM:
    """A model with an engine in this process: give it prompts, get answers, whatever the memory.

    ::

        with LLM("smollm2-135m", pool="64MiB") as llm:
            for result in llm.generate(["One", "Two"], SamplingParams(max_tokens=32)):
                print(result.outputs[0].text)

    model                a folder, a .gguf file, a Hugging Face id, or "smollm2-135m"
    dtype, weights, threads   as :func:`kvpager.build.load_model` takes them
    max_model_len        the most tokens of prompt and answer together; None for the model's own limit
    max_num_seqs         answers that are written at once; more wait
    max_num_batched_tokens    the most tokens of one step
    enable_prefix_caching     compute what prompts share at their beginning once
    seed                 of the seeds of requests that have none
    store                a file or a Redis in which what was computed, prompts and answers, outlives this; None: nowhere
    store_limit          the most bytes of it
    The others are as in :class:`kvpager.build.PagerOptions`: `pool` or `memory` bound the memory and never change
    the answers, `budget` bounds attention and does.

    It belongs to the thread that made it. Raises ConfigError for settings that can't be, and what
    :func:`kvpager.build.load_model` raises.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        pool: str | None = None,
        memory: str | None = None,
        budget: int | None = None,
        mode: Mode = "recall",
        policy: PolicyName = "attention",
        digest: DigestKind = "2bit",
        page_size: int = 16,
        tile: int = 64,
        swap: str | None = None,
        swap_limit: str = "64GiB",
        kernel: KernelName = "auto",
        kv_dtype: DType | None = None,
        dtype: str = "auto",
        weights: WeightsName = "auto",
        threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        store: str | None = None,
        store_limit: str = "10GiB",
    ) -> None:
        options = build.PagerOptions(
            pool=pool,
            memory=memory,
            budget=budget,
            mode=mode,
            policy=policy,
            digest=digest,
            page_size=page_size,
            tile=tile,
            swap=swap,
            swap_limit=swap_limit,
            kernel=kernel,
            kv_dtype=kv_dtype,
            seed=seed,
        )
        options.settings()  # refused before a model is loaded
        kept = None if store is None else build.StoreOptions.at([store], limit=store_limit)
        build.require_engine()
        if kept is not None:
            build.require_storable(options)
            build.require_store(kept)
        from kvpager.engine.engine import EngineConfig

        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_queue=MOST_WAITING,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
        )
        self._loaded = build.load_model(model, dtype=dtype, weights=weights, threads=threads, identify=kept is not None)
        self._engine: Engine | None = build.make_engine(self._loaded, options, config, store=kept)
        self._numbers = count()

    @classmethod
    def over(cls, loaded: LoadedModel, engine: Engine) -> Self:
        """An LLM over a model and an engine that are there already; it closes the engine."""
        made = cls.__new__(cls)
        made._loaded, made._engine, made._numbers = loaded, engine, count()
        return made

    # -- answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sessions: Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[RequestResult]:
        """Answer prompts, texts or token ids: a result for each, in their order.

        `params` are for all of them, or one for each. `sessions`, a name or None for each, are conversations in the
        store, which go on from where they were left. `progress` shows a bar on standard error where that is a
        terminal. Raises InputError that names the first prompt that can't be answered, or SessionBusy, before any runs,
        and StepError while an answer is still being streamed. Ctrl-C ends all of them and closes the LLM.
        """
        several = _several(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        ids = [self._ids(prompt, index) for index, prompt in enumerate(several)]
        return self._answer(texts, ids, params, sessions, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sessions: Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[RequestResult]:
        """Answer a conversation, or several, inside the model's chat template; else as :meth:`generate`."""
        if not isinstance(messages, Sequence) or not messages:
            raise InputError("messages: there is none")
        talks: Any = [messages] if isinstance(messages[0], Mapping) else messages
        ids = [self.chat_ids(talk) for talk in talks]
        return self._answer([None] * len(ids), ids, params, sessions, progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, session: str | None = None
    ) -> Generator[Output]:
        """Answer one prompt and give what each step adds; leaving the loop ends the request.

        Raises with the first output what :meth:`generate` raises.
        """
        engine = self._idle()
        request_id = str(next(self._numbers))
        engine.add(request_id, self._ids(prompt, 0), SamplingParams() if params is None else params, session=session)
        try:
            while engine.has_work:
                yield from engine.step()
        finally:
            self._abort([request_id])

    def _answer(
        self,
        texts: Sequence[str | None],
        prompts: Sequence[list[int]],
        params: Any,
        sessions: Sequence[str | None] | None,
        progress: bool,
    ) -> list[RequestResult]:
        engine = self._idle()
        chosen = _each(params, len(prompts))
        names = _names(sessions, len(prompts))
        answers: dict[str, list[Answer]] = {}
        try:
            for index, (ids, own, session) in enumerate(zip(prompts, chosen, names, strict=True)):
                request_id = str(next(self._numbers))
                _add(engine, request_id, ids, own, session, f"prompts[{index}]: " if len(prompts) > 1 else "")
                answers[request_id] = [Answer() for _ in range(own.n)]
            self._run(engine, answers, progress)
        except KeyboardInterrupt:
            self.close()  # it may have broken into a step: nothing else is sure to work
            raise
        except BaseException:
            self._abort(answers)
            raise
        return [
            RequestResult(request_id, text, tuple(ids), own[0].prompt_logprobs, tuple(map(Answer.whole, own, count())))
            for text, ids, (request_id, own) in zip(texts, prompts, answers.items(), strict=True)
        ]

    @staticmethod
    def _run(engine: Engine, answers: Mapping[str, list[Answer]], progress: bool) -> None:
        """Step until all is done."""
        total, done = sum(map(len, answers.values())), 0
        with bars.progress("Answers", total) if progress else nullcontext(lambda done: None) as advance:
            while engine.has_work:
                for output in engine.step():
                    answers[output.request_id][output.index].add(output)
                    done += output.finish_reason is not None
                advance(done)

    def _abort(self, request_ids: Iterable[str]) -> None:
        """End requests as far as they run, and read over what the engine has to tell about them."""
        engine = self._engine
        if engine is None:
            return
        for request_id in request_ids:
            engine.abort(request_id)
        if engine.has_work:
            engine.step()

    # -- texts

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers made it."""
        return self._loaded.tokenizer

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation inside the model's chat template, up to where the answer begins.

        Raises InputError for a conversation that is none, and where the model has no chat template.
        """
        if not isinstance(messages, Sequence) or not messages:
            raise InputError("messages: there is none")
        for message in messages:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise InputError(f"messages: {message!r} is not like {{'role': 'user', 'content': 'Hello'}}")
            require_text(message["content"], "messages")
        return chat_ids(self._loaded, messages)

    def _ids(self, prompt: object, index: int) -> list[int]:
        if isinstance(prompt, str):
            require_text(prompt, f"prompts[{index}]")
            return list(self._loaded.tokenizer(prompt)["input_ids"])
        if not isinstance(prompt, Sequence) or any(isinstance(one, bool) or not isinstance(one, int) for one in prompt):
            raise InputError(f"prompts[{index}]: expected text or a list of token ids, got {brief(prompt)}")
        return list(prompt)

    def room(self, prompt_tokens: int, max_tokens: int) -> int:
        """`max_tokens`, or what the longest length leaves after a prompt, one at least."""
        longest = self._open().config.max_model_len or self._loaded.context_length
        return max_tokens if longest is None else max(1, min(max_tokens, longest - prompt_tokens))

    # -- life

    def stats(self) -> EngineStats:
        """The engine's counters and its pager's, memory told whole. Raises EngineStopped when closed."""
        return self._open().stats()

    def close(self) -> None:
        """Give back memory and swap; the model goes with the last reference. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Engine:
        if self._engine is None:
            raise EngineStopped("this LLM was closed")
        return self._engine

    def _idle(self) -> Engine:
        engine = self._open()
        if engine.has_work:
            raise StepError("an answer is still being streamed; read it to its end or close it first")
        return engine


def _several(prompts: object) -> Sequence[Any]:
    """A list of prompts, also from one alone; raises InputError for what is none."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InputError(f"prompts: expected text, token ids, or a list of them, got {type(prompts).__name__}")
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _each(params: object, prompts: int) -> Sequence[SamplingParams]:
    """Parameters for each prompt; raises InputError where their number is another."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise InputError(f"params: expected SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != prompts:
        raise InputError(f"params: there are {len(params)} for {prompts} prompts")
    return params


def _names(sessions: object, prompts: int) -> Sequence[str | None]:
    """A session's name or None for each prompt; raises InputError where their number is another."""
    if sessions is None:
        return [None] * prompts
    if isinstance(sessions, str) or not isinstance(sessions, Sequence):
        raise InputError(f"sessions: expected a list of names or None, got {brief(sessions)}")
    if len(sessions) != prompts:
        raise InputError(f"sessions: there are {len(sessions)} for {prompts} prompts")
    return sessions


def _add(
    engine: Engine, request_id: str, ids: list[int], params: SamplingParams, session: str | None, where: str
) -> None:
    try:
        engine.add(request_id, ids, params, session=session)
    except (InputError, SessionBusy) as error:
        raise type(error)(f"{where}{error}") from None
