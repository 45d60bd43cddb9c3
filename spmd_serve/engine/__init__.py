"""Everything that builds or extends vLLM objects: configuration, the ranks' workers, the executor."""
