#!/usr/bin/env bash
# Run python -m dloop_train with these arguments inside a Slurm allocation; slurm*.sbatch call it.
# Before the time limit the run stops and the job is requeued; it then continues.
#   DLOOP_VENV   virtual environment on the shared file system (default .venv in the folder that sbatch was called in)
#   DLOOP_ROOT   folder of the artifacts, on the shared file system (root=... among the arguments has precedence)
set -euo pipefail
root="${DLOOP_ROOT:-artifacts}"
for argument in "$@"; do
    [[ "$argument" == root=* ]] && root="${argument#root=}"
done
mkdir -p "$root/slurm"
log="$root/slurm/$SLURM_JOB_NAME-$SLURM_JOB_ID.log"
echo "dloop_train: $log"
exec >> "$log" 2>&1
echo "slurm: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1)), $(date)"

source "${DLOOP_VENV:-.venv}/bin/activate"
# Compute nodes often have no network: models come from the hub's cache, filled on a login node (hf download <target>).
# If your nodes have one, submit with HF_HUB_OFFLINE=0 and WANDB_MODE=online.
# Without one, `wandb sync` uploads the offline logs later.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" WANDB_MODE="${WANDB_MODE:-offline}"
# Compiled kernels go to a folder on the node, since many ranks writing one network folder disturb each other.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-$(id -u)}"
# If nodes have several networks, submit with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME set to the fast interface.

python -m dloop_train "$@" &
command=$!
signalled=no asked=no ended=no
trap 'signalled=yes asked=yes; kill -USR1 "$command" 2>/dev/null || true' USR1   # the time limit is near
trap 'signalled=yes ended=yes; kill -TERM "$command" 2>/dev/null || true' TERM
while :; do
    signalled=no status=0
    wait "$command" || status=$?
    [[ $signalled == yes ]] || break   # a trapped signal ends `wait` before the command ends
done

requeue() {
    echo "slurm: $1; job $SLURM_JOB_ID goes back into the queue, and then on from what is on disk"
    scontrol requeue "$SLURM_JOB_ID" || echo "slurm: it may not be requeued; submit it again with the same arguments"
}

# Slurm detects a lost node after minutes (SlurmdTimeout), but ranks fail at once, so this probes all nodes.
a_node_is_lost() {
    [[ $SLURM_NNODES -gt 1 ]] && ! timeout 60 srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --overlap true
}

# Counted in the log, since SLURM_RESTART_COUNT also counts starts after a time limit.
losses() {
    grep -c "^slurm: a node does not answer" "$log" || true
}

# 75: stopped on request. 138: ended by USR1 (128 + 10), which came before the handler was installed.
if [[ $status == 75 || ( $status == 138 && $asked == yes ) ]]; then
    requeue "stopped before the time limit"
elif [[ $status != 0 && $ended == no && $(losses) -lt 10 ]] && a_node_is_lost; then
    requeue "a node does not answer"
fi
exit "$status"
