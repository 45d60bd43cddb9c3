"""A folder for the local sockets that vLLM makes and does not remove: of one round of a job, on one host."""

import os
import shutil
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's, for the folder of its local sockets."""
_LONGEST = 70
"""Characters of the folder's path: a socket's whole path has 107 at most, and vLLM adds a UUID."""


def scratch_folder(watcher: str) -> Path:
    """Where it is, for the processes that know the address of their host's watcher."""
    return Path(tempfile.gettempdir(), watcher.removeprefix("@"))


def make_scratch(watcher: str) -> Path | None:
    """Make it, or find that another process of this user has; None where that is not possible."""
    folder = scratch_folder(watcher)
    if len(str(folder)) > _LONGEST:
        return None
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() else None
    except OSError:
        return None
    return folder


def use_scratch(watcher: str, environ: MutableMapping[str, str]) -> None:
    """Have vLLM in this process and below use it, unless the user has named a folder."""
    if VARIABLE not in environ and (folder := make_scratch(watcher)):
        environ[VARIABLE] = str(folder)


def remove_scratch(watcher: str) -> None:
    """The watcher's last deed, when no process of the round is left."""
    shutil.rmtree(scratch_folder(watcher), ignore_errors=True)
