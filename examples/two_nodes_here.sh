#!/bin/bash
# Two nodes on one machine: two network namespaces, joined by a pair of virtual interfaces, each with a host name.
#
#     sudo RANKS_PER_NODE=2 examples/two_nodes_here.sh examples/train_two_encoders.py --steps 50
#
# Nothing but that pair connects them: a job that finds its way here has no address of loopback in it, and its ranks
# count two hosts. Needs Linux, root, and ip (iproute2). TORCHRUN is the program to start, torchrun of PATH by default.

set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: two_nodes_here.sh SCRIPT [ARGUMENTS...]" >&2
    exit 2
fi

torchrun=${TORCHRUN:-torchrun}
ranks=${RANKS_PER_NODE:-2}
names=("gpp$$a" "gpp$$b")
addresses=(10.213.7.1 10.213.7.2)
port=29511
started=()

clean_up() {
    for process in "${started[@]}"; do
        kill "$process" 2>/dev/null || true
    done
    for name in "${names[@]}"; do
        ip netns delete "$name" 2>/dev/null || true  # and its end of the pair
    done
}
trap clean_up EXIT

for name in "${names[@]}"; do
    ip netns add "$name"
    ip -n "$name" link set lo up
done
ip link add veth0 netns "${names[0]}" type veth peer name veth0 netns "${names[1]}"
for node in 0 1; do
    ip -n "${names[node]}" address add "${addresses[node]}/24" dev veth0
    ip -n "${names[node]}" link set veth0 up
done

for node in 0 1; do
    # The name of a host tells nodes apart; gloo would look it up and find nothing, hence the interface.
    ip netns exec "${names[node]}" unshare --uts -- bash -c 'hostname "$0"; exec "$@"' "node$node" \
        env GLOO_SOCKET_IFNAME=veth0 NCCL_SOCKET_IFNAME=veth0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
        "$torchrun" --nnodes 2 --node-rank "$node" --nproc-per-node "$ranks" \
        --master-addr "${addresses[0]}" --master-port "$port" "$@" &
    started+=($!)
done

code=0
for process in "${started[@]}"; do
    wait "$process" || code=$?
done
exit "$code"
