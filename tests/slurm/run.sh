#!/usr/bin/env bash
# A Slurm cluster of one node on this machine, and training runs of two tasks on it: `make test-slurm`, as root on Debian.
# Everything but the packages goes into a temporary folder, and the daemons end with this script.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=$(realpath -s "${PYTHON:-$root/.venv/bin/python}")
if [ "$(id -u)" != 0 ]; then
    echo "error: the daemons need root: run 'sudo make test-slurm'" >&2
    exit 2
fi
if ! command -v slurmctld munged > /dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge > /dev/null
fi

work=$(mktemp -d)
finish() {
    for daemon in slurmd slurmctld munged; do
        [ -s "$work/$daemon.pid" ] && kill "$(cat "$work/$daemon.pid")" 2> /dev/null
    done
    for _ in $(seq 50); do # a daemon that is just ending still writes its state
        rm -rf "$work" 2> /dev/null && break
        sleep 0.2
    done
}
trap finish EXIT
chmod 755 "$work"

install -d -o munge -g munge "$work/munge"
runuser -u munge -- munged --socket="$work/munge/socket" --pid-file="$work/munge/pid" --log-file="$work/munge/log" \
    --seed-file="$work/munge/seed"
ln -s "$work/munge/pid" "$work/munged.pid"

host=$(hostname -s)
cat > "$work/slurm.conf" << CONF
ClusterName=hopline
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
SlurmctldPort=16817
SlurmdPort=16818
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
mkdir "$work/state" "$work/spool"
export SLURM_CONF=$work/slurm.conf
slurmctld
slurmd -N "$host"
for _ in $(seq 30); do
    [ "$(sinfo -h -o %t 2> /dev/null)" = idle ] && break
    sleep 1
done
sinfo

# One task per device, one task per node with devices=2 under it, and tasks with a process group of their own: the same run.
submit() { # name, tasks, what python runs
    cat > "$work/$1.sh" << JOB
#!/bin/bash
#SBATCH --ntasks=$2 --cpus-per-task=1 --output=$work/$1.log --time=10
PYTHONPATH=$root/src srun $python $3
JOB
    sbatch --wait "$work/$1.sh" || { cat "$work/$1.log" "$work"/slurm*.log; exit 1; }
    echo "--- $1"
    cat "$work/$1.log"
}
train="train demo epochs=2 model.hidden=32"
submit tasks 2 "-m hopline $train out=$work/tasks"
submit devices 1 "-m hopline $train out=$work/devices devices=2"
submit own_group 2 "$root/tests/slurm/own_group.py 16819 $train out=$work/own_group"
sampler=$root/examples/own_sampler/train.py
submit sampler_tasks 2 "$sampler"
submit sampler_devices 1 "$sampler 2"

"$python" - "$work" << 'CHECK'
import json, sys, pathlib

def losses(name):
    lines = (pathlib.Path(sys.argv[1]) / name / "metrics.jsonl").read_text().splitlines()
    return [r["loss"] for r in map(json.loads, lines) if r["event"] == "epoch"]

assert len(losses("tasks")) == 2, losses("tasks")
for other in ("devices", "own_group"):
    assert losses("tasks") == losses(other), (losses("tasks"), other, losses(other))
print("all three ways give the same losses:", losses("tasks"))

def printed(name):
    lines = (pathlib.Path(sys.argv[1]) / f"{name}.log").read_text().splitlines()
    return [line for line in lines if "2 ranks" in line]

assert len(printed("sampler_tasks")) == 2, printed("sampler_tasks")
assert printed("sampler_tasks") == printed("sampler_devices"), (printed("sampler_tasks"), printed("sampler_devices"))
print("and examples/own_sampler:", *printed("sampler_tasks"), sep="\n  ")
CHECK
