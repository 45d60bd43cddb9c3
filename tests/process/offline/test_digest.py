"""Digests of arguments are equal in two processes."""

import subprocess
import sys
from pathlib import Path

from spmd_serve.offline.digest import digest
from tests.unit.offline.test_digest import SAME


def test_another_process_comes_to_the_same() -> None:
    """Texts are hashed with another seed there, and objects lie elsewhere."""
    program = (
        "from tests.unit.offline.test_digest import SAME\n"
        "from spmd_serve.offline.digest import digest\n"
        "print(*(digest(make()) for make in SAME.values()), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [digest(make()) for make in SAME.values()]
