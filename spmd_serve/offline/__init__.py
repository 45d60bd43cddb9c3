"""`LLM` for scripts under torchrun: every rank calls the same lines, each replica's first rank drives."""
