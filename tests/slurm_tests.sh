#!/usr/bin/env bash
# The tests that need a Slurm cluster, on one of two nodes that is started for them and stopped behind them. Where that cannot be, says why and ends well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

skip() {
    echo "slurm tests skipped: $1"
    exit 0
}

[[ "$(uname)" == Linux ]] || skip "nodes are Linux network namespaces"
[[ $EUID == 0 ]] || skip "network namespaces and Slurm's daemons need root"
missing=
for program in slurmctld slurmd sbatch munged ip; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
if [[ -n "$missing" ]]; then
    command -v apt-get >/dev/null || skip "there is no$missing, and no apt-get to install it with"
    echo "slurm tests: installing slurm-wlm, munge and iproute2"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm slurmctld slurmd slurm-client munge iproute2; } >/dev/null ||
        skip "apt-get could not install slurm-wlm, munge and iproute2"
fi
unshare --net --uts --mount true 2>/dev/null || skip "this machine does not let root make network namespaces (a container without CAP_SYS_ADMIN?)"

folder="$(mktemp -d)"
bash tests/slurm_cluster.sh start "$folder"
trap 'bash tests/slurm_cluster.sh stop "$folder"; rm -rf "$folder"' EXIT
export SLURM_CONF="$folder/slurm.conf" DLOOP_TEST_CLUSTER="$folder"
.venv/bin/python -m pytest -q -m slurm tests/test_slurm.py "$@"
