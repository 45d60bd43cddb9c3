"""The tests of spmd_serve: they mirror the package, one file per module."""
