"""The error taxonomy, split by what the caller does next.

Library exceptions are mapped to one of these at the seam where they appear, once. A miss is not an
error: the store answers it as a value.
"""

from __future__ import annotations


class KvassError(Exception):
    """Root of every error that crosses a seam.

    `retryable` says whether the same call may succeed elsewhere or later; `http_status` is what the
    gateway answers when the error ends a request.
    """

    retryable: bool = False
    http_status: int = 500


class Invalid(KvassError):
    """The caller sent something wrong: say what, what was expected, and never retry."""

    http_status = 400

    def __init__(
        self, message: str, *, parameter: str | None = None, http_status: int = 400
    ) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.http_status = http_status


class Overloaded(KvassError):
    """A bound was reached; try again after `retry_after_s`."""

    retryable = True
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(KvassError):
    """The peer is gone or refuses; another one may serve."""

    retryable = True
    http_status = 503


class Leaving(Unavailable):
    """The peer ends in order, and said so: another one may serve, and nothing is wrong."""


class DeadlineExceeded(KvassError):
    """The deadline that travelled with the call has passed."""

    http_status = 504


class TransferFailed(KvassError):
    """Bytes did not arrive; the destination holds nothing that means anything."""

    retryable = True


class Incompatible(KvassError):
    """Two processes disagree on what all must agree on; `field` names the first difference."""

    http_status = 503

    def __init__(self, field: str, ours: object, theirs: object, *, who: str) -> None:
        mend = f"start every member of a cluster with the same value of {field}"
        if field == "device_kind":
            mend = (
                "run the workers of a cluster on one kind of machine, with one version of torch "
                "and of Kvass, and all with its compiled library (g++, then `make up`) or without"
            )
        super().__init__(
            f"{field} differs: this process has {ours!r}, {who} has {theirs!r}; {mend}"
        )
        self.field = field
        self.ours = ours
        self.theirs = theirs


class Unauthorized(KvassError):
    """A peer did not prove that it is of this cluster: not its secret, or no certificate of its."""

    http_status = 503


def breaks_an_invariant(error: Exception) -> bool:
    """Whether the member's own state can be trusted no more: then its process must end, which
    costs misses and resumed streams; any other bug costs the call or the piece of work that met
    it."""
    if isinstance(error, ExceptionGroup):
        return error.subgroup(AssertionError) is not None
    return isinstance(error, AssertionError)
