"""Exceptions with a one-line message for the user, and the exit codes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every spmd_serve process."""

    OK = 0
    FAILED = 1
    USAGE = 2
    LINES_FAILED = 3
    STOPPED = 4


class SpmdError(Exception):
    """Base class of errors that are shown as one line, without a traceback."""

    exit_code = ExitCode.FAILED


class UsageError(SpmdError):
    """A mistake in flags, environment, model files or launch; the message names the remedy."""

    exit_code = ExitCode.USAGE


class PeerLost(SpmdError):
    """Another process of this job is gone or silent; the message names its rank, its node and the cause."""


class Stopped(SpmdError):
    """The process was asked to end before its work was done."""

    exit_code = ExitCode.STOPPED


def missing_package(problem: Exception) -> UsageError | None:
    """Return a UsageError if `problem` means that torch or vLLM cannot be imported; None for other errors."""
    name = problem.name if isinstance(problem, ImportError) else None
    if (name or "").partition(".")[0] not in ("torch", "vllm"):
        return None
    return UsageError(
        f"{problem}: install vllm>=0.32,<0.33, which brings its torch: "
        "pip install 'spmd-serve[gpu]' (or [cpu])"
    )


def is_of_a_peer(problem: BaseException) -> bool:
    """Return whether an error only reports the loss of another process, and so is not the root cause."""
    text = str(problem)
    return isinstance(problem, PeerLost) or "closed by peer" in text or "Connection reset" in text
