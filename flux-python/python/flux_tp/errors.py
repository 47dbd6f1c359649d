"""Exceptions of flux_tp.

All are a :class:`FluxError`. Those that name ranks have ``ranks``, a tuple, and ``rank``, its first.
After a :class:`PeerLostError`, :class:`PeerLeftError`, :class:`TimeoutError`, :class:`DisagreedError`
or :class:`AbortedError` of a call the communicator is broken: results are undefined, and every later
call raises the same.
"""

from __future__ import annotations

import builtins

__all__ = [
    "AbortedError",
    "BuildError",
    "ConnectError",
    "DisagreedError",
    "FluxError",
    "OperandError",
    "PeerLeftError",
    "PeerLostError",
    "TimeoutError",
]


class FluxError(RuntimeError):
    """An error of flux."""

    ranks: tuple[int, ...]
    """The ranks at fault, as far as known."""
    reason: int | None
    """The number that the aborting rank gave, of an :class:`AbortedError`."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), reason: int | None = None) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.reason = reason

    @property
    def rank(self) -> int | None:
        """The first of :attr:`ranks`."""
        return self.ranks[0] if self.ranks else None


class ConnectError(FluxError):
    """The ranks could not be connected."""


class BuildError(FluxError):
    """An op could not be built. All ranks have left the build."""


class OperandError(FluxError, ValueError):
    """An operand or argument cannot be used. Nothing was launched; peers wait until this rank makes a good call."""


class PeerLostError(FluxError):
    """A peer's process is gone."""


class PeerLeftError(FluxError):
    """A peer has closed its communicator before a call that this rank has begun."""


class TimeoutError(FluxError, builtins.TimeoutError):  # noqa: A001 (it is one)
    """A peer did not come within the communicator's timeout."""


class DisagreedError(FluxError):
    """The ranks do not make the same calls with the same arguments in the same order."""


class AbortedError(FluxError):
    """A peer has given the communicator up."""
