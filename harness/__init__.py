"""Helpers that both tests and benchmarks use: servers, processes, ports, waits and tiny models."""
