#!/usr/bin/env bash
# Inside a Slurm allocation: python -m dloop_train with these arguments; stopped before the time limit, requeued, and gone on with. slurm*.sbatch run it.
#   DLOOP_VENV   virtual environment on the shared file system (default .venv in the folder that sbatch was called in)
#   DLOOP_ROOT   where artifacts go, on the shared file system (root=... among the arguments goes before it)
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
# Compute nodes often have no network: everything comes from the hub's cache, filled on a login node (hf download <target>).
# Submit with HF_HUB_OFFLINE=0, WANDB_MODE=online where yours have one; `wandb sync` uploads what was logged offline.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" WANDB_MODE="${WANDB_MODE:-offline}"
# Compiled kernels: many ranks writing one folder on a network file system trip over each other.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-$(id -u)}"
# Where nodes have several networks, submit with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME set to the fast one's interface.

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

# Slurm notices a lost node after minutes (SlurmdTimeout), the ranks that lost their connection at once.
a_node_is_lost() {
    [[ $SLURM_NNODES -gt 1 ]] && ! timeout 60 srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --overlap true
}

# By the log: SLURM_RESTART_COUNT also has the starts after a time limit.
losses() {
    grep -c "^slurm: a node does not answer" "$log" || true
}

if [[ $status == 75 || ( $status == 138 && $asked == yes ) ]]; then  # 75: stopped as asked; 138: asked before it could listen
    requeue "stopped before the time limit"
elif [[ $status != 0 && $ended == no && $(losses) -lt 10 ]] && a_node_is_lost; then
    requeue "a node does not answer"
fi
exit "$status"
