"""What can be wrong with a file among a request's inputs."""

from __future__ import annotations

from omniq.errors import InputTooLarge, InvalidRequest, UnsupportedInput


def _fields(field: str, message: str) -> list[dict[str, str]]:
    return [{"field": field, "message": message}]


def invalid(field: str, message: str) -> InvalidRequest:
    """The input cannot be used."""
    return InvalidRequest(f"{field}: {message}", fields=_fields(field, message))


def too_large(field: str, message: str) -> InputTooLarge:
    """The input has more bytes or pixels than are allowed."""
    return InputTooLarge(f"{field}: {message}", fields=_fields(field, message))


def unsupported(field: str, message: str) -> UnsupportedInput:
    """The input is a file of another kind than the pipeline takes."""
    return UnsupportedInput(f"{field}: {message}", fields=_fields(field, message))
