#!/usr/bin/env bash
# Several machines with fixed numbers: nothing to elect, for launchers that know who is who (MPI, Ansible, pdsh).
#
#   machine 0:  MODEL=Qwen/Qwen3-32B HEAD=node0 NODES=2 NODE_RANK=0 launch/multi_node_static.sh -tp 8 -pp 2
#   machine 1:  MODEL=Qwen/Qwen3-32B HEAD=node0 NODES=2 NODE_RANK=1 launch/multi_node_static.sh -tp 8 -pp 2
#
# MODEL      a folder or a hub name, the same files on every machine
# HEAD       name or address of machine 0, which all can reach; it also serves HTTP
# NODES      how many machines (default 2)          NODE_RANK    this machine's number, 0 on HEAD
# GPUS       ranks per machine (default: all GPUs)  PORT         of the HTTP server on HEAD (default 8000)
# RDZV_PORT  on HEAD (default 29500)                RESTARTS     of a failed job (default 3)
# ADDRESS    this machine's own address for the others, where its host name gives none that they can reach
#
# torchrun's static rendezvous has no keep-alive of its own, so no --rdzv-conf: spmd_serve notices lost machines.
set -euo pipefail

exec torchrun --nnodes "${NODES:-2}" --node-rank "${NODE_RANK:?set NODE_RANK to the number of this machine}" \
    --nproc-per-node "${GPUS:-gpu}" --max-restarts "${RESTARTS:-3}" \
    --master-addr "${HEAD:?set HEAD to machine 0}" --master-port "${RDZV_PORT:-29500}" \
    ${ADDRESS:+--local-addr "$ADDRESS"} \
    -m spmd_serve "${MODEL:?set MODEL to a folder or a hub name}" --port "${PORT:-8000}" "$@"
