"""What a round of a job makes on a host and leaves there when it is killed: local sockets, shared memory."""

import glob
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's, for the folder of its local sockets."""
_LONGEST = 70
"""Characters of the folder's path: a socket's whole path has 107 at most, and vLLM adds a UUID."""
SHARED = Path("/dev/shm")


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


def shared_name(round_id: str, replica: int, machine: str) -> str:
    """How a rank's names in /dev/shm begin: alike for those ranks of a replica that see the same /dev/shm.

    `machine`: the boot id. Containers of one machine have a /dev/shm each, with a device number each.
    """
    place = f"{machine}/{os.uname().nodename}/{SHARED.stat().st_dev if SHARED.is_dir() else 0}"
    return f"{round_id}r{replica}m{zlib.crc32(place.encode()):08x}"


def remove_shared(beginning: str) -> None:
    """Take these names out of /dev/shm; who has the memory open keeps it."""
    for path in SHARED.glob(f"{glob.escape(beginning)}*") if beginning else ():
        path.unlink(missing_ok=True)
