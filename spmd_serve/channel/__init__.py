"""The control channel: the driver's messages to all ranks, the ranks' answers to it. Never imports vllm."""
