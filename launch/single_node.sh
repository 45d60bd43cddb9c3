#!/usr/bin/env bash
# One machine: one rank per GPU, tensor parallel over all of them unless said otherwise.
#
#   MODEL=Qwen/Qwen3-8B launch/single_node.sh [flags of spmd_serve and vLLM]
#
# MODEL  a folder or a hub name              GPUS  ranks to start (default: all GPUs here)
# PORT   of the HTTP server (default 8000)   RESTARTS  how often torchrun starts a failed job again (default 3)
set -euo pipefail

# --standalone: a rendezvous of its own on a free port, so that two jobs on one machine do not meet.
exec torchrun --standalone --nproc-per-node "${GPUS:-gpu}" --max-restarts "${RESTARTS:-3}" \
    -m spmd_serve "${MODEL:?set MODEL to a folder or a hub name}" --port "${PORT:-8000}" "$@"
