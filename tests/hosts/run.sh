#!/usr/bin/env bash
# Two hosts made of network namespaces, two ranks on each, by torchrun: as root on Linux with iproute2.
# One host's link is cut in the middle of the run: the other must end within the timeout, with a sentence; both go on after.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=$(realpath -s "${PYTHON:-$root/.venv/bin/python}")
timeout_s=10
if [ "$(id -u)" != 0 ] || ! command -v ip > /dev/null; then
    echo "error: network namespaces need root and iproute2: run 'sudo apt-get install iproute2' and 'sudo make test-hosts'" >&2
    exit 2
fi

work=$(mktemp -d)
a=hopline-a-$$ b=hopline-b-$$
finish() {
    for name in $a $b; do
        ip netns pids "$name" 2> /dev/null | xargs -r kill -9 2> /dev/null || true
        ip netns del "$name" 2> /dev/null || true
    done
    rm -rf "$work"
}
trap finish EXIT
ip netns add "$a"
ip netns add "$b"
ip link add link0 netns "$a" type veth peer name link0 netns "$b"
number=1
for name in $a $b; do
    ip -n "$name" addr add "10.77.0.$number/24" dev link0
    ip -n "$name" link set link0 up
    ip -n "$name" link set lo up
    number=$((number + 1))
done

start() { # namespace, number of the host, run folder
    PYTHONPATH=$root/src ip netns exec "$1" "$python" -W ignore -m torch.distributed.run --nnodes 2 --node-rank "$2" \
        --nproc-per-node 2 --master-addr 10.77.0.1 --master-port 29577 -m hopline train demo epochs=30 model.hidden=16 \
        method.batch_size=256 evaluate_every=30 timeout_s=$timeout_s resume=true out="$3" > "$work/log-$2" 2>&1
}
both() { # run folder
    start "$b" 1 "$1" &
    start "$a" 0 "$1"
    wait
}

echo "--- never interrupted"
both "$work/whole"
tail -n 2 "$work/log-0"

echo "--- the link is cut in the middle"
start "$b" 1 "$work/cut" &
other=$!
start "$a" 0 "$work/cut" &
first=$!
until [ "$(grep -c '"event": "epoch"' "$work/cut/metrics.jsonl" 2> /dev/null || true)" -ge 5 ] 2> /dev/null; do sleep 0.1; done
ip -n "$b" link set link0 down
cut=$(date +%s)
wait $first && { echo "error: the first host went on without the other" >&2; exit 1; }
took=$(($(date +%s) - cut))
grep -h -o "error: .*" "$work/log-0" | head -n 2
echo "the first host ended after $took s (timeout $timeout_s s)"
grep -q "error: .*rank" "$work/log-0" || { cat "$work/log-0"; exit 1; }
[ "$took" -le $((timeout_s + 25)) ] || { echo "error: that was too late" >&2; exit 1; }
wait $other || true
ip -n "$b" link set link0 up

echo "--- both go on"
both "$work/cut"
grep -h "going on" "$work/log-0"
"$python" - "$work" << 'CHECK'
import json, sys, pathlib

def losses(name):
    lines = (pathlib.Path(sys.argv[1]) / name / "metrics.jsonl").read_text().splitlines()
    return {r["epoch"]: r["loss"] for r in map(json.loads, lines) if r["event"] == "epoch"}

whole, cut = losses("whole"), losses("cut")
assert len(whole) == 30, whole
assert whole == cut, (whole, cut)
print("the same losses, bit for bit, as without the cut:", cut[30])
CHECK
