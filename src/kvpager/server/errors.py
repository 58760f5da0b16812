"""One shape for every error that the server answers with: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvpager.errors import (
    EngineStopped,
    InputError,
    MissingDependency,
    QueueFull,
    RequestTooLarge,
    SessionBusy,
    SteppedDown,
)

__all__ = ["ApiError", "ErrorResponse", "as_api_error", "not_valid"]

RETRY_AFTER_S = 1  # of answers that ask to come again: a place may be free after a few steps

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_STATUS_CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}
_FIELDS = {"json_schema": "response_format", "prompt_logprobs": "logprobs"}  # where clients have another name
_FIELD = re.compile(r"(\w+)(?:\.[\w.]+| of [^:]{1,30})?: ")


class ApiError(HTTPException):
    """An answer other than 200. `param` names the field at fault; `code` is one that clients can tell apart.

    It is an HTTPException, since FastAPI lets nothing else pass while it reads a body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code if code is not None else _STATUS_CODES.get(status)

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


class ErrorResponse(Response):
    """An error as a response. Its JSON is ASCII, so that whatever a message quotes can be sent."""

    media_type = "application/json"

    def __init__(self, error: ApiError) -> None:
        super().__init__(json.dumps(error.body()), status_code=error.status_code, headers=error.headers)


def as_api_error(error: Exception) -> ApiError:
    """What to answer for an exception: misuse is told as it is, a fault of ours without its details."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, RequestTooLarge):
        return ApiError(400, message, param=_param(message), code="context_length_exceeded")
    if isinstance(error, InputError):
        return ApiError(400, message, param=_param(message), code="invalid_value")
    if isinstance(error, MissingDependency):
        return ApiError(400, message, code="unsupported_parameter")
    if isinstance(error, QueueFull):
        return ApiError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, SessionBusy):
        return ApiError(409, message, param="session", code="session_busy", headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, EngineStopped):
        code = "stepped_down" if isinstance(error, SteppedDown) else "engine_stopped"
        return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})
    return ApiError(500, "The server had an error; its log says which.", code="internal_error")


def not_valid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's errors about a body, which fails first of all as JSON."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"The body is not JSON: {reason} (character {path[0]}).", code="invalid_json")
    if not path:
        return ApiError(400, "The body is not a JSON object.", code="invalid_json")
    missing = first["type"] == "missing"
    what = ".".join(path)
    message = f"{what}: it is required" if missing else f"{what}: {str(first['msg']).removeprefix('Value error, ')}"
    code = "missing_required_parameter" if missing else "invalid_type" if "type" in first["type"] else "invalid_value"
    return ApiError(400, message, param=path[0], code=code)


def _param(message: str) -> str | None:
    """The request's field that a message of kvpager begins with."""
    match = _FIELD.match(message)
    return _FIELDS.get(match.group(1), match.group(1)) if match else None
