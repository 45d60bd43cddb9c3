#!/usr/bin/env bash
# Several machines, the same line on each of them, in any order; they meet at HEAD, which also serves HTTP.
#
#   MODEL=Qwen/Qwen3-32B HEAD=node0 NODES=2 launch/multi_node_c10d.sh -tp 8 -pp 2
#
# MODEL      a folder or a hub name, the same files on every machine
# HEAD       name or address of one of the machines that all of them can reach
# NODES      how many machines (default 2); MIN:MAX (with -dp auto) for a job that goes on with those that are there
# GPUS       ranks per machine (default: all GPUs)      PORT  of the HTTP server on HEAD (default 8000)
# ADDRESS    this machine's own address for the others, where its host name gives none that they can reach
# RDZV_PORT  on HEAD (default 29500)                    JOB   a name that tells jobs on the same HEAD apart
# RESTARTS   how often torchrun starts a failed job again (default 3; torchrun's own default is 0)
# RDZV_CONF  torchrun's timing, in seconds. The default notices a lost machine in about 6 s instead of 42, and lets
#            machines come up to 10 minutes apart. Where HEAD's own /etc/hosts has its name on 127.0.1.1, add
#            is_host=true there and is_host=false on the others.
set -euo pipefail

RDZV_CONF="${RDZV_CONF:-keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3,join_timeout=600}"

# Each round of the job has a store of its own: with torchrun's shared one (2.13) no machine could join later.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${GPUS:-gpu}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:?set HEAD to the machine where all meet}:${RDZV_PORT:-29500}" \
    --rdzv-id "${JOB:-spmd_serve}" --rdzv-conf "$RDZV_CONF" ${ADDRESS:+--local-addr "$ADDRESS"} \
    -m spmd_serve "${MODEL:?set MODEL to a folder or a hub name}" --port "${PORT:-8000}" "$@"
