#!/usr/bin/env bash
# Two hosts by `torchrun --nnodes 1:2`, of which one is lost in the middle of an epoch: the other goes on alone from the
# checkpoint, by itself. Both are agents on this machine; the one that stays keeps the store in which they meet.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=$(realpath -s "${PYTHON:-$root/.venv/bin/python}")
epochs=30
settings="epochs=$epochs model.hidden=16 method.batch_size=256 evaluate_every=$epochs checkpoint_s=0.2 timeout_s=10"
work=$(mktemp -d)
first="" second=""
finish() {
    for agent in $first $second; do
        pkill -9 -P "$agent" 2> /dev/null || true
        kill -9 -- "-$agent" 2> /dev/null || true
    done
    rm -rf "$work"
}
trap finish EXIT
export PYTHONPATH=$root/src
port=$("$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')

agent() { # whether it keeps the store, log
    # shellcheck disable=SC2086
    exec setsid "$python" -W ignore -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint "127.0.0.1:$port" --rdzv-id elastic --local-addr 127.0.0.1 \
        --rdzv-conf "is_host=$1,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3" \
        -m hopline train demo $settings resume=true out="$work/cut" > "$2" 2>&1
}
fail() {
    echo "error: $1" >&2
    cat "$work"/log-* >&2
    exit 1
}
wait_for() { # what, command: at most 90 s
    local deadline=$(($(date +%s) + 90))
    until eval "$2"; do
        [ "$(date +%s)" -lt "$deadline" ] || fail "no $1 within 90 s"
        sleep 0.05
    done
}
since() { "$python" -c "import sys, time; print(f'{time.time() - float(sys.argv[1]):.1f}')" "$1"; }

echo "--- two ranks, never interrupted"
# shellcheck disable=SC2086
"$python" -W ignore -m hopline train demo $settings devices=2 out="$work/whole" > "$work/log-whole" 2>&1 || fail "that failed"

echo "--- one of two agents is killed"
agent true "$work/log-first" &
first=$!
agent false "$work/log-second" &
second=$!
wait_for "five epochs" "grep -q '\"event\": \"epoch\", \"epoch\": 5,' '$work/cut/metrics.jsonl' 2> /dev/null"
sleep 0.2
grep -q "; 2 ranks$" "$work/log-first" || fail "the agents did not meet"
ranks=$(pgrep -P "$second")
kill -9 -- "-$second"
killed=$(date +%s.%N)
for rank in $ranks; do
    wait_for "end of rank $rank, whose agent was killed" "! kill -0 $rank 2> /dev/null"
done
wait_for "error that names the lost rank" "grep -q 'error: rank 1 stopped answering' '$work/log-first'"
ended=$(since "$killed")
wait_for "restart from the checkpoint" "grep -q 'resuming from .*; now 1 rank, before 2' '$work/log-first'"
back=$(since "$killed")
grep -h -o "resuming from .*" "$work/log-first" | sed "s|$work/||"
wait "$first" || fail "the agent that was left ended with status $?"
first="" second=""
ps -eo args | grep -F "out=$work" | grep -v grep && fail "processes are left"

"$python" - "$work" $epochs << 'CHECK'
import json, sys, pathlib

def epochs(name):
    lines = (pathlib.Path(sys.argv[1]) / name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "epoch"]

whole, cut, count = epochs("whole"), epochs("cut"), int(sys.argv[2])
assert [r["epoch"] for r in cut] == list(range(1, count + 1)), [r["epoch"] for r in cut]
seeds = {round(r["seeds_per_s"] * r["seconds"]) for r in whole}
assert len(seeds) == 1, seeds
assert {round(r["seeds_per_s"] * r["seconds"]) for r in cut} == seeds, "an epoch has not trained every seed once"
same = sum(a["loss"] == b["loss"] for a, b in zip(whole, cut))
assert 5 <= same < count, same
assert abs(cut[-1]["loss"] / whole[-1]["loss"] - 1) < 0.05, (cut[-1], whole[-1])
print(f"{count} epochs of {seeds.pop():,} seeds each, the first {same} with the losses of two ranks bit for bit")
CHECK
echo "the rank that was left ended after $ended s, and went on alone after $back s"
