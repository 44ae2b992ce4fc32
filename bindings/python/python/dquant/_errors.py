"""Exceptions. Message and hint are those of the command line."""


class Error(Exception):
    """Any failure of Dquant.

    `message` says what failed, on which object and why; `hint` the next thing to try, or is None. Printed, the hint
    has a line of its own.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class InvalidError(Error, ValueError):
    """The request is invalid, or a machine or its files are not as needed: exit code 2 of the command line."""


class StateError(InvalidError):
    """A saved position belongs to another plan, seed or dataset."""


class UnreachableError(Error):
    """The DPU or the target does not reply: exit code 3 of the command line."""


class StreamError(Error):
    """The stream ended early. Every batch before the fault was delivered; `next_batch` is where to open it again."""


class SlotsHeldError(Error):
    """The batches in use hold every slot of the ring, so no batch can arrive. The stream goes on when one is dropped."""


class ForkError(Error):
    """A stream is used in a forked child of the process that opened it."""
