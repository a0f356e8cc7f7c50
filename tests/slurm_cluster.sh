#!/usr/bin/env bash
# A Slurm cluster of two nodes on this machine, for the tests: slurm_cluster.sh start|stop|node <folder> [1|2]. Needs root and a folder that this script may fill.
# Each node has a network and a host name of its own (n1, n2), 16 cores and 4 GPUs that are not there; the files are this machine's.
set -euo pipefail
action="${1:?start, stop or node}" folder="${2:?folder for the daemons}"
export SLURM_CONF="$folder/slurm.conf"
net=10.77.0 bridge=dloopbr0

write_settings() {
    local host; host="$(hostname -s)"
    printf '127.0.0.1 localhost\n%s.1 n1\n%s.2 n2\n%s.254 %s\n' $net $net $net "$host" > "$folder/hosts"
    for gpu in 0 1 2 3; do  # gres.conf wants devices: clones of /dev/null
        [[ -e "$folder/gpu$gpu" ]] || mknod "$folder/gpu$gpu" c 1 3
    done
    echo "Name=gpu File=$folder/gpu[0-3]" > "$folder/gres.conf"
    cat > "$SLURM_CONF" <<SETTINGS
ClusterName=dloop
SlurmctldHost=$host($net.254)
SlurmctldPort=16917
SlurmdPort=16918
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job starts when the old one's credential has expired: 120 s by default.
AuthInfo=cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# A node that was down returns as soon as its daemon does.
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=120
KillWait=5
GresTypes=gpu
NodeName=n1 NodeAddr=$net.1 CPUs=16 RealMemory=24000 Gres=gpu:4 State=UNKNOWN
NodeName=n2 NodeAddr=$net.2 CPUs=16 RealMemory=24000 Gres=gpu:4 State=UNKNOWN
PartitionName=test Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
SETTINGS
}

make_networks() {
    ip link add $bridge type bridge
    ip addr add $net.254/24 dev $bridge
    ip link set $bridge up
    for node in 1 2; do
        ip netns add dloop$node
        ip link add dloopv$node type veth peer name eth0 netns dloop$node
        ip link set dloopv$node master $bridge up
        ip -n dloop$node addr add $net.$node/24 dev eth0
        ip -n dloop$node link set eth0 up
        ip -n dloop$node link set lo up
    done
}

start_node() {
    # Not `ip netns exec`: it mounts /sys anew, and slurmd misses the cgroups there.
    nsenter --net="/run/netns/dloop$1" unshare --uts --mount sh -c \
        "hostname n$1; mount --bind '$folder/hosts' /etc/hosts; exec slurmd -N n$1 -f '$SLURM_CONF'"
}

start() {
    if ip link show $bridge >/dev/null 2>&1; then
        echo "slurm_cluster: $bridge is there, so another cluster of the tests runs on this machine (or one was not stopped: $0 stop <its folder>)" >&2
        exit 1
    fi
    trap 'status=$?; [[ $status == 0 ]] || stop; exit $status' EXIT
    mkdir -p "$folder"/{state,spool/n1,spool/n2}
    chmod 755 "$folder"
    if ! munge -n >/dev/null 2>&1; then
        mkdir -p /run/munge
        chown munge:munge /run/munge
        setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged
        touch "$folder/munged"  # ours to end
    fi
    write_settings
    make_networks
    slurmctld -f "$SLURM_CONF"
    start_node 1
    start_node 2
    for _ in $(seq 100); do
        [[ "$(sinfo -h -t idle -o %D 2>/dev/null)" == 2 ]] && return
        sleep 0.2
    done
    echo "slurm_cluster: the nodes did not come up within 20 s; see $folder/*.log" >&2
    exit 1
}

stop() {
    scancel --user=root 2>/dev/null || true
    local controller; controller="$(cat "$folder/slurmctld.pid" 2>/dev/null || true)"
    for _ in $([[ -n "$controller" ]] && seq 50); do  # it writes its state into the folder to the last
        kill "$controller" 2>/dev/null || break
        sleep 0.2
    done
    for node in 1 2; do
        ip netns pids dloop$node 2>/dev/null | xargs --no-run-if-empty kill -9 2>/dev/null || true  # daemons, steps and whatever they started
        ip netns delete dloop$node 2>/dev/null || true
    done
    ip link delete $bridge 2>/dev/null || true
    if [[ -e "$folder/munged" && -s /run/munge/munged.pid ]]; then
        kill "$(</run/munge/munged.pid)" 2>/dev/null || true
    fi
}

case "$action" in
    start) start ;;
    stop) stop ;;
    node) start_node "${3:?1 or 2}" ;;
    *) echo "slurm_cluster: start, stop or node, not $action" >&2; exit 2 ;;
esac
