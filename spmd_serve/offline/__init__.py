"""`LLM` for scripts under torchrun: every rank makes the same calls; each replica's first rank drives."""
