"""Errors as HTTP answers, in the shape that OpenAI's clients read."""

from __future__ import annotations

from http import HTTPStatus

from routebook.errors import RoutebookError, WorkerError


class HTTPError(RoutebookError):
    """A request that is answered with an HTTP status other than 200.

    Args:
        message: what is wrong, with the value and the remedy.
        param: the field that it is about.
    """

    status = HTTPStatus.BAD_REQUEST

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadRequestError(HTTPError):
    """The request does not say what it should."""


class UnauthorizedError(HTTPError):
    """The key is not there, or is not the right one."""

    status = HTTPStatus.UNAUTHORIZED


class NotFoundError(HTTPError):
    """There is no such thing."""

    status = HTTPStatus.NOT_FOUND


class NotAcceptableError(HTTPError):
    """The answer cannot be given in the form that was asked for."""

    status = HTTPStatus.NOT_ACCEPTABLE


class QueueFullError(HTTPError):
    """Too much is under way already; nothing was started."""

    status = HTTPStatus.TOO_MANY_REQUESTS


class GenerationFailedError(HTTPError):
    """The engine failed while it served the request."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR


def error_body(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """The JSON value of an error."""
    kind = HTTPStatus(status).phrase.replace(" ", "") + ("" if status < 500 else "Error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def status_of(error: RoutebookError) -> HTTPStatus:
    """The HTTP status that an error is answered with: 400 for what the caller can mend."""
    if isinstance(error, HTTPError):
        return error.status
    if isinstance(error, WorkerError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, ValueError):
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus.INTERNAL_SERVER_ERROR
