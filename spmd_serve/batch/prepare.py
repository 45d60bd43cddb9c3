"""Everything that can fail before a model is loaded: flags, input, output, its lock, and whether both fit."""

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from spmd_serve.batch.journal import Journal
from spmd_serve.batch.options import STDIO, BatchOptions, is_url
from spmd_serve.batch.outputs import FileOutput, Output, StreamOutput
from spmd_serve.batch.records import Header
from spmd_serve.batch.source import Source
from spmd_serve.errors import UsageError


@dataclass(frozen=True)
class Launch:
    """Who runs us, to tell a restart by torchrun from a new command.

    `job` is the same before and after a restart and never again for another job (the agent's host, pid and
    start time, say); empty: not known. `restarted`: torchrun says that this is not the first try.
    """

    job: str = ""
    restarted: bool = False


@dataclass(frozen=True)
class Prepared:
    """An open input and a locked output. A forked child may use it in place of the process that made it."""

    options: BatchOptions
    source: Source
    output: Output
    total: int | None
    """Lines to answer, those of earlier runs included; None for a pipe."""

    @property
    def is_complete(self) -> bool:
        """Whether every line is answered already, so that no model is needed."""
        return self.total is not None and len(self.output.done) == self.total

    def close(self) -> None:
        """May be called twice."""
        self.output.close()
        self.source.close()


def say(text: str) -> None:
    """One line to the log of this rank."""
    print(f"spmd_serve: {text}", file=sys.stderr, flush=True)


def prepare(
    options: BatchOptions,
    flags: Mapping[str, str] | None = None,
    launch: Launch = Launch(),
    say: Callable[[str], None] = say,
) -> Prepared:
    """Open input and output, and find out what is done already. `flags`: vLLM's that decide the answers.

    Reads a whole input file once (and an earlier output), so takes about a second a gigabyte.
    Raises UsageError in one line, and then leaves everything as it was.
    """
    options.check()
    source = Source.open(options.source, options.output_tmp_dir)
    try:
        output, total = _open_output(options, source, {**options.fingerprint(), **(flags or {})}, launch, say)
    except BaseException:
        source.close()
        raise
    return Prepared(options, source, output, total)


def _open_output(
    options: BatchOptions,
    source: Source,
    flags: Mapping[str, str],
    launch: Launch,
    say: Callable[[str], None],
) -> tuple[Output, int | None]:
    path = local_path(options)
    if path == STDIO or _is_stream(path):
        if launch.restarted:
            raise UsageError(
                f"torchrun has restarted a run whose answers went to {options.destination}: they can't be "
                "told from those to come; give -o FILE to be able to go on after a crash"
            )
        content = source.identify()
        return StreamOutput(path, ordered=options.ordered), None if content is None else content.lines
    _check_path(path, source)
    journal = Journal(path, say)
    try:
        if source.is_pipe and journal.begun_by(launch.job):
            raise UsageError(
                f"torchrun has restarted a run that was reading {source.name}: what was read of it is gone. "
                "Run the command again, with the whole input, to go on"
            )
        content = source.identify()
        header = Header(content, flags)
        journal.start(header, job=launch.job, restart=options.restart, retry_failed=options.retry_failed)
        complete = content is not None and len(journal.done) == content.lines
        if options.max_errors is not None and journal.failed > options.max_errors and not complete:
            raise UsageError(
                f"{journal.failed} lines in {path} have failed, --max-errors is {options.max_errors}: "
                "raise it, or ask for those lines again with --retry-failed"
            )
    except BaseException:
        journal.close()
        raise
    upload_to = options.destination if is_url(options.destination) else None
    output = FileOutput(journal, ordered=options.ordered, upload_to=upload_to, say=say)
    return output, None if content is None else content.lines


def local_path(options: BatchOptions) -> str:
    """The file that gets the answers. For a URL: named after it, without its query (signatures change)."""
    path = options.destination
    if not is_url(path):
        # The lock and the renames of a rewrite are for the file itself, whatever links lead to it.
        return os.path.realpath(path) if os.path.islink(path) and not _is_stream(path) else path
    parts = urlsplit(path)
    digest = hashlib.sha256(f"{parts.netloc}{parts.path}".encode()).hexdigest()[:8]
    name = os.path.basename(parts.path) or "answers.jsonl"
    return os.path.join(options.output_tmp_dir or ".", f"{digest}-{name}")


def _is_stream(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _check_path(path: str, source: Source) -> None:
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise UsageError(f"the output's directory {directory} does not exist: make it first")
    if os.path.isdir(path):
        raise UsageError(f"the output {path} is a directory: name a file")
    for taken in (path, path + ".state"):
        if source.is_same_file(taken):
            raise UsageError(f"the output {path} would overwrite the input {source.name}: name another -o")
