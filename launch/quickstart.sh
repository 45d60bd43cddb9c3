#!/usr/bin/env bash
# From a bare machine with Python 3.11 to an answer of a real model, served by two ranks on the CPU.
#
#   launch/quickstart.sh [--once] [--port N]
#
# Makes .venv here (a few minutes, once), fetches SmolLM2-135M-Instruct into ~/.cache/spmd_serve (a minute, once),
# serves it as two pipeline stages under torchrun, asks it a question, and goes on serving until Ctrl-C.
# --once: stop after the answer.   --port N: listen there instead of on 8000.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

QUESTION="What is the capital of France?"
MODEL="${XDG_CACHE_HOME:-$HOME/.cache}/spmd_serve/SmolLM2-135M-Instruct"
READY_LIMIT_S=300
STOP_LIMIT_S=45 # torchrun gives its ranks 30
PORT=8000
ONCE=no
LOG=""

while (($# > 0)); do
    case "$1" in
        --once) ONCE=yes ;;
        --port)
            [[ "${2:-}" =~ ^[0-9]+$ ]] || { echo "$NAME: --port needs a number" >&2 && exit 2; }
            PORT="$2"
            shift
            ;;
        -h | --help)
            sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *)
            echo "$NAME: unknown argument $1 (known: --once, --port N)" >&2
            exit 2
            ;;
    esac
    shift
done

# shellcheck disable=SC2329  # called by environment.sh at the end
clean_up() {
    if (($1 == 0 || $1 >= 128)); then rm -f "$LOG"; fi # after a failure the log is what the user needs
}

if (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; then
    fail "port $PORT is taken: choose another with --port N"
fi

use_environment cpu quickstart
if [[ ! -f "$MODEL/config.json" ]]; then
    run_step "fetching the model SmolLM2-135M-Instruct (93 MB, once)" \
        "$PYTHON" "$ROOT/launch/fetch_model.py" --out "$MODEL"
fi

# float32 is quicker than bfloat16 on CPUs without bfloat16 units. The model has 9 attention heads, which two
# ranks can't share, so they split its layers: -tp 1 -pp 2. 1 GiB a rank is plenty of KV cache for this model.
export VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
COMMAND=(torchrun --standalone --nproc-per-node 2 -m spmd_serve "$MODEL" -tp 1 -pp 2
    --host 127.0.0.1 --port "$PORT" --served-model-name SmolLM2-135M-Instruct
    --dtype float32 --max-model-len 1024 --max-num-seqs 8 --enforce-eager)
LOG="$(mktemp "${TMPDIR:-/tmp}/spmd_serve-quickstart.XXXXXX")"
say "starting: ${COMMAND[*]}"
PATH="$(dirname "$PYTHON"):$PATH" "${COMMAND[@]}" >"$LOG" 2>&1 &
SERVER_PID=$!

# In the background, so that a signal gets through meanwhile. It says by itself why there is no answer.
"$PYTHON" "$ROOT/launch/ask.py" "http://127.0.0.1:$PORT" "$QUESTION" \
    --wait "$READY_LIMIT_S" --pid "$SERVER_PID" --log "$LOG" &
wait $! || exit 1

if [[ "$ONCE" == yes ]]; then exit 0; fi
cat <<END
$NAME: serving on http://127.0.0.1:$PORT until Ctrl-C; its log is $LOG. Try:

  curl http://127.0.0.1:$PORT/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Who was Albert Einstein?"}]}'

END
code=0
wait "$SERVER_PID" || code=$?
fail "the server ended by itself with exit code $code: $(tail -n 1 "$LOG") (all of it in $LOG)"
