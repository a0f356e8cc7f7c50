#!/usr/bin/env bash
# Install if needed, then run the linter, the format check and the tests for a CPU. Arguments are passed to pytest (-k gate, -m slow ...).
# With slurm as the first argument: run the tests on a real Slurm of two nodes on this machine instead; needs root.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launchers/install.sh"
cd "$root"

# One thread per process, which sleeps while it waits: pytest runs a file on each core, and some tests start several
# processes.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

if [[ "${1:-}" == slurm ]]; then
    shift
    exec bash tests/slurm_tests.sh "$@"
fi

lint=0
.venv/bin/python -m ruff check --quiet . || lint=$?
.venv/bin/python -m ruff format --quiet --check . || lint=$?
[[ $lint == 0 ]] || echo "test: ruff found problems (above); the tests run anyway" >&2
tests=0
.venv/bin/python -m pytest -q -n auto --maxprocesses=8 --dist loadfile -m "not slow and not gpu and not slurm" "$@" || tests=$?
exit $((tests ? tests : lint))
