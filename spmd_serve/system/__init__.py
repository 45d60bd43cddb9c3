"""This machine: processes, signals, log, addresses, cores, torchrun's environment. Standard library only."""
