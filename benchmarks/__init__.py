"""This server measured beside stock vLLM: `python -m benchmarks.serving` from the repository's root."""
