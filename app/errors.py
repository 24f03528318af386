"""The errors that users see, and the one place that gives each its status, type and code.

    ApiError
    ├── InvalidRequestError        400 invalid_request (or a more exact code)
    │   └── ContextLengthError     400 context_length_exceeded
    ├── AuthenticationError        401 invalid_api_key
    ├── InsufficientTokensError    402 insufficient_tokens
    ├── PermissionDeniedError      403 insufficient_scope
    ├── NotFoundError              404 not_found
    │   └── ModelNotFoundError     404 model_not_found
    ├── MethodNotAllowedError      405 method_not_allowed
    ├── RequestTimeoutError        408 request_timeout
    ├── ConflictError              409 conflict (or a more exact code)
    ├── RequestTooLargeError       413 request_too_large
    ├── RangeError                 416 range_not_satisfiable
    ├── IdempotencyKeyReusedError  422 idempotency_key_reused
    ├── TooManyRequestsError       429 rate_limit_exceeded
    └── UnavailableError           503 unavailable, with retry-after

Messages say what was sent, what is allowed and what to do. An exception that is not an ApiError
is a fault of ours: 500 with the request id, logged once (app/main.py makes the envelope).
"""

from typing import Any


class ApiError(Exception):
    """An answer that is not a success. `details` lists single errors of a multi-error answer."""

    status = 500
    type = "api_error"
    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        details: list[dict[str, Any]] | None = None,
    ) -> None:
        """Keep what the envelope shows; `retry_after` is in seconds."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.retry_after = retry_after
        self.details = details

    def envelope(self, request_id: str) -> dict[str, Any]:
        """Write the body of the answer."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.details is not None:
            error["details"] = self.details
        return {"error": error, "request_id": request_id}


class InvalidRequestError(ApiError):
    """The request breaks a rule; nothing was stored or held."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    """P + M does not fit into the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(ApiError):
    """No key, or one that is unknown, revoked or expired."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class InsufficientTokensError(ApiError):
    """The account has fewer tokens than the Hold needs."""

    status = 402
    type = "insufficient_tokens"
    code = "insufficient_tokens"


class PermissionDeniedError(ApiError):
    """The key lacks the scope of this route."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class NotFoundError(ApiError):
    """No such thing, or it belongs to another account."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """No model of that name is served."""

    code = "model_not_found"


class MethodNotAllowedError(ApiError):
    """The path exists, but not with this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeoutError(ApiError):
    """The body did not arrive, or a stream was not read, in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class ConflictError(ApiError):
    """The thing is in a state that does not allow this."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class RequestTooLargeError(ApiError):
    """The body is over its cap."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class RangeError(ApiError):
    """The byte range asked for lies outside the file."""

    status = 416
    type = "invalid_request_error"
    code = "range_not_satisfiable"


class IdempotencyKeyReusedError(ApiError):
    """The Idempotency-Key came before with another body."""

    status = 422
    type = "invalid_request_error"
    code = "idempotency_key_reused"


class TooManyRequestsError(ApiError):
    """More than a limit allows at this moment."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class UnavailableError(ApiError):
    """A part of the service is away; the same request may succeed later."""

    status = 503
    type = "service_unavailable"
    code = "unavailable"
