#!/usr/bin/env bash
# Install if needed, then the linter and the tests that a CPU can run. Arguments go to pytest (-k gate, -m slow ...).
# With slurm as the first argument: instead the tests on a real Slurm, two nodes on this machine, which root can start.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launchers/install.sh"
cd "$root"

# One thread, and threads that sleep while they wait: a file of tests runs on each core, and some start several processes.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

if [[ "${1:-}" == slurm ]]; then
    shift
    exec bash tests/slurm_tests.sh "$@"
fi

lint=0
.venv/bin/python -m ruff check --quiet . || lint=$?
[[ $lint == 0 ]] || echo "test: ruff has complaints (above); the tests run all the same" >&2
tests=0
.venv/bin/python -m pytest -q -n auto --maxprocesses=8 --dist loadfile -m "not slow and not gpu and not slurm" "$@" || tests=$?
exit $((tests ? tests : lint))
