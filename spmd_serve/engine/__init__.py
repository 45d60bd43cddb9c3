"""The part that builds and extends vLLM objects: configuration, ranks' shards, the driver's executor."""
