"""Files that a round may leave behind when it is killed: vLLM's socket folder and names in /dev/shm."""

import glob
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder of its local sockets."""
_MAX_FOLDER_CHARS = 70
"""A socket's whole path may have 107 characters, and vLLM appends a UUID to the folder."""
SHARED = Path("/dev/shm")


def scratch_folder(watcher: str) -> Path:
    """Return the round's socket folder, given the address of the node's watcher."""
    return Path(tempfile.gettempdir(), watcher.removeprefix("@"))


def make_scratch(watcher: str) -> Path | None:
    """Create the folder, or find the one that another process of this user has created.

    Return None if neither is possible.
    """
    folder = scratch_folder(watcher)
    if len(str(folder)) > _MAX_FOLDER_CHARS:
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
    """Make vLLM in this process and its children use the folder, unless the user has set another one."""
    if VARIABLE not in environ and (folder := make_scratch(watcher)):
        environ[VARIABLE] = str(folder)


def remove_scratch(watcher: str) -> None:
    """Remove the folder; the watcher does this when no process of the round is left."""
    shutil.rmtree(scratch_folder(watcher), ignore_errors=True)


def shared_name(round_id: str, replica: int, machine: str) -> str:
    """Return the prefix of a rank's names in /dev/shm, equal for ranks of a replica that share a /dev/shm.

    `machine` is the boot id. Containers on one machine have separate /dev/shm mounts, each with its own
    device number, which is therefore part of the prefix.
    """
    place = f"{machine}/{os.uname().nodename}/{SHARED.stat().st_dev if SHARED.is_dir() else 0}"
    return f"{round_id}r{replica}m{zlib.crc32(place.encode()):08x}"


def remove_shared(prefix: str) -> None:
    """Unlink all names in /dev/shm with this prefix, none if it is empty; open mappings stay valid."""
    for path in SHARED.glob(f"{glob.escape(prefix)}*") if prefix else ():
        path.unlink(missing_ok=True)
