"""What can go wrong, and the exit code that says so."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every spmd_serve process."""

    OK = 0
    FAILED = 1
    USAGE = 2
    LINES_FAILED = 3
    STOPPED = 4


class SpmdError(Exception):
    """Base of all errors that are shown to a person as one line, without a traceback."""

    exit_code = ExitCode.FAILED


class UsageError(SpmdError):
    """A mistake in flags, environment, model files or launch: says what, where and the cure."""

    exit_code = ExitCode.USAGE


class PeerLost(SpmdError):
    """Somebody of this job is gone or silent: names the rank, its host and the cause."""


class Stopped(SpmdError):
    """Ended when asked to, before the work was done."""

    exit_code = ExitCode.STOPPED


def missing_package(problem: Exception) -> UsageError | None:
    """What to tell a person when torch or vLLM, or a part of them, cannot be imported; None for others."""
    name = problem.name if isinstance(problem, ImportError) else None
    if (name or "").partition(".")[0] not in ("torch", "vllm"):
        return None
    return UsageError(
        f"{problem}: install vllm>=0.32,<0.33, which brings its torch: "
        "pip install 'spmd-serve[gpu]' (or [cpu])"
    )


def is_of_a_peer(problem: BaseException) -> bool:
    """Whether an error says only that somebody else is gone: then somebody else knows the cause."""
    text = str(problem)
    return isinstance(problem, PeerLost) or "closed by peer" in text or "Connection reset" in text
