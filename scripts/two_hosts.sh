#!/usr/bin/env bash
# Trains a tiny model on two hosts: two network namespaces of this machine, which reach each other over a virtual cable.
# Needs root and Linux. With a job file as argument it trains that one, with --resume and the like behind it. The
# environment variable JOB_B names another job file for the second host, with a cache folder of its own, say.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
id=$$
a="dba$id" b="dbb$id"  # names of an interface have at most 15 characters
folder=$(mktemp -d)

cleanup() {
    ip netns pids "$a" 2>/dev/null | xargs -r kill 2>/dev/null || true
    ip netns pids "$b" 2>/dev/null | xargs -r kill 2>/dev/null || true
    ip netns del "$a" 2>/dev/null || true
    ip netns del "$b" 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT

ip netns add "$a"
ip netns add "$b"
ip link add "$a" type veth peer name "$b"
ip link set "$a" netns "$a"
ip link set "$b" netns "$b"
ip -n "$a" addr add 10.77.0.1/24 dev "$a"
ip -n "$b" addr add 10.77.0.2/24 dev "$b"
for each in "$a" "$b"; do
    ip -n "$each" link set lo up
    ip -n "$each" link set "$each" up
done

if [ $# -eq 0 ]; then
    "$python" "$root/scripts/tiny_job.py" "$folder" --accumulation 4 --steps 6
    set -- "$folder/job.toml"
fi

host() {  # name, address, whether the meeting point is here
    ip netns exec "$1" env GLOO_SOCKET_IFNAME="$1" NCCL_SOCKET_IFNAME="$1" OMP_NUM_THREADS=1 \
        "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node "${NPROC:-1}" --local-addr "$2" \
        --rdzv-backend c10d --rdzv-id "two-hosts-$id" --rdzv-endpoint 10.77.0.1:29400 \
        --rdzv-conf "is_host=$3" "$root/__main__.py" train "${@:4}"
}

host "$b" 10.77.0.2 0 "${JOB_B:-$1}" "${@:2}" &
other=$!
host "$a" 10.77.0.1 1 "$@"
wait "$other"
echo "both hosts have ended well"
