"""A request in full as bytes: what is written now and then, so that the stream before it can be dropped."""

from __future__ import annotations

from typing import Any

from kvpager.journaled import Told
from kvpager.replication.book import KEY_BYTES, Answer, Held, Misfit
from kvpager.replication.fields import ACCEPTED_RUNS, read_accepted, read_end, write_accepted, write_end
from kvpager.replication.limits import Limits
from kvpager.replication.packing import Damaged, Fields, pack, pack_tokens, text_of, unpack, unpack_tokens

__all__ = ["pack_request", "unpack_request"]

ANSWER_RUNS = 4  # tokens, keys, slots, scores


def pack_request(held: Held) -> bytes:
    """Its bytes."""
    taken, runs = write_accepted(held.accepted, held.page)
    answers = []
    for answer in held.answers:
        answers.append(_written(answer))
        runs += [pack_tokens(answer.tokens), bytes(answer.keys), bytes(answer.slots), answer.scores]
    header = {"beginning": held.beginning, "last": held.last, "taken": taken, "answers": answers}
    return pack(text_of(header), runs)


def _written(answer: Answer) -> dict[str, Any]:
    return {
        "header": answer.header,
        "begin": answer.begin,
        "singles": list(answer.singles),
        "logprobs": list(answer.logprobs),
        "end": None if answer.end is None else write_end(answer.end),
    }


def unpack_request(data: bytes, limits: Limits) -> Held:
    """The request of these bytes. Raises Damaged."""
    header, runs = unpack(data, limits)
    if len(runs) < ACCEPTED_RUNS:
        raise Damaged("runs")
    accepted, page = read_accepted(header.fields("taken"), runs[:ACCEPTED_RUNS], limits)
    try:
        held = Held(accepted, page, header.text("beginning", 64), header.whole("last"))
    except Misfit as error:
        raise Damaged(str(error)) from error
    told = header.objects("answers", len(held.answers))
    if len(told) != len(held.answers) or len(runs) != ACCEPTED_RUNS + ANSWER_RUNS * len(told):
        raise Damaged("answers")
    for index, (answer, fields) in enumerate(zip(held.answers, told, strict=True)):
        place = ACCEPTED_RUNS + ANSWER_RUNS * index
        _read(held, index, answer, fields, runs[place : place + ANSWER_RUNS], limits)
    return held


def _read(held: Held, index: int, answer: Answer, fields: Fields, runs: list[bytes], limits: Limits) -> None:
    tokens, keys, slots, scores = runs
    answer.tokens = unpack_tokens(tokens, limits)
    answer.logprobs = list(fields.mappings("logprobs"))
    if (end := fields.maybe_fields("end")) is not None:
        answer.end = Told(held.accepted.id, index, (), None, None, **read_end(end))
    header = fields.maybe_mapping("header")
    if header is None:
        return
    length, begin = header.get("length"), fields.whole("begin")
    if type(length) is not int or not 0 <= length <= len(held.accepted.prompt) + len(answer.tokens):
        raise Damaged("length")
    if begin != length // held.page * held.page or len(keys) != begin // held.page * KEY_BYTES:
        raise Damaged("keys")
    if (length == begin) != (not slots) or (slots and len(slots) % (length - begin)):
        raise Damaged("slots")
    answer.header, answer.begin, answer.scores = header, begin, scores
    answer.keys, answer.slots = bytearray(keys), bytearray(slots)
    answer.singles = tuple(fields.ranges("singles"))
