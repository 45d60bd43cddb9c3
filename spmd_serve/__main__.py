"""``python -m spmd_serve`` and ``torchrun … -m spmd_serve``."""

from spmd_serve.main import main

if __name__ == "__main__":
    main()
