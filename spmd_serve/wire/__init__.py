"""Bytes between processes: frames, the restricted encoding of objects, authentication. Never imports vllm."""
