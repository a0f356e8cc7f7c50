#!/usr/bin/env bash
# From nothing to a report on a CPU: install, then the quickstart experiment. Arguments go to it (train.steps=50 ...).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launchers/install.sh"
exec "$root/.venv/bin/python" -m dloop_train +experiment=quickstart "$@"
