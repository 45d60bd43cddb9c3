#!/usr/bin/env bash
# Installs what the tests need and runs all of them; arguments go to pytest (launch/test.sh -k hosts;
# -n 0: one test after the other).
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Simulated hosts need `ip`; without root their tests skip and say so.
if ! command -v ip >/dev/null && ((EUID == 0)); then
    run_step "installing iproute2" bash -c 'apt-get update && apt-get install --yes --no-install-recommends iproute2'
fi
use_environment cpu quickstart test
cd "$ROOT"
# Two at a time, for the long tests wait for most of their time; by file, for the tests of a file share a server; in
# the order that tests/conftest.py gives. A test that overruns its time limit ends its process, and so the run.
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"
