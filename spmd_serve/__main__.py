"""``python -m spmd_serve`` and ``torchrun … -m spmd_serve``."""

from spmd_serve.main import main, run_as_spawned_child

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    run_as_spawned_child()
