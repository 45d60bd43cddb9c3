#!/usr/bin/env bash
# Install what the tests need, then run a tier of them:
#   launch/test.sh unit      lint, types, and the tests without processes, torch or vLLM (seconds)
#   launch/test.sh process   real ranks without a model (minutes)
#   launch/test.sh           everything that must pass before a change lands
# Further arguments go to pytest: launch/test.sh -k hosts; with -n 0 the tests run one after the other.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

tier="tests"
case "${1:-}" in
    unit | process)
        tier="tests/$1"
        shift
        ;;
esac
# Simulated nodes need `ip`; without root their tests are skipped and say so.
if [[ "$tier" != tests/unit ]] && ! command -v ip >/dev/null && ((EUID == 0)); then
    run_step "installing iproute2" bash -c 'apt-get update && apt-get install --yes --no-install-recommends iproute2'
fi
use_environment cpu quickstart test
cd "$ROOT"
bin="$(dirname "$PYTHON")"
# Two files at a time, because long tests mostly wait; by file, because the tests of a file share a server; in the order
# that tests/conftest.py gives. A test that overruns its time limit ends its process, and with it the run.
tests=("$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0)
if [[ "$tier" == tests/process ]] || [[ "$#" -gt 0 && "$tier" == tests ]]; then
    for argument in "$@"; do
        if [[ "$argument" == tests/* ]]; then tier=""; fi # the caller names files
    done
    exec "${tests[@]}" ${tier:+"$tier"} "$@"
fi
say "lint"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/shellcheck" -x launch/*.sh launch/*.sbatch .ci/run
say "types"
"$bin/mypy"
say "tests"
exec "${tests[@]}" "$tier" "$@"
