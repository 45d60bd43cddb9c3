"""The HTTP part, in rank 0's child process: vLLM's stock app on a port that was bound before loading."""
