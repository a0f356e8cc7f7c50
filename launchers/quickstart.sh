#!/usr/bin/env bash
# Install, then run the quickstart experiment on a CPU. Arguments are its settings (train.steps=50 ...).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launchers/install.sh"
exec "$root/.venv/bin/python" -m dloop_train +experiment=quickstart "$@"
