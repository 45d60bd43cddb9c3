"""The watcher stays small and starts fast: it imports nothing heavy."""

import subprocess
import sys

from tests.support.liveness import ROOT


def test_importing_liveness_imports_nothing_heavy() -> None:
    code = (
        "import sys; import spmd_serve.liveness, spmd_serve.liveness.watcher; "
        "heavy = {'torch', 'vllm', 'asyncio', 'multiprocessing', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=20)
