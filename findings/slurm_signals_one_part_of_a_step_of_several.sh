#!/usr/bin/env bash
# `scancel --signal=TERM JOB.STEP` reaches one part of a step that `srun A : B` started; the other parts run on.
#
# Expected: JOB.STEP names the step (squeue shows its parts as 1.0+0 and 1.0+1), so the signal reaches all its tasks, as
# SIGKILL does. It is how a program is asked to save its state and end.
# Seen: in a plain job the tasks of the first part get the signal, those of the second do not, and scancel fails with 225
# "Invalid job id specified" although it has delivered the signal. The second part has no name: JOB.STEP+1 is refused.
# In a heterogeneous job component 0 gets the signal, and scancel returns 0. JOB+1.STEP means component 0 too; only the
# job number that component 1 has of its own (NUMBER.STEP) reaches the others. A signal to JOB reaches all in both.
# Version: Slurm 22.05.8 and munge, Debian 12's packages (unpacked, not installed), Linux x86-64. Needs apt-get and dpkg.
# Source: https://slurm.schedmd.com/scancel.html, https://slurm.schedmd.com/heterogeneous_jobs.html; kill_job_step in
# src/slurmctld/job_mgr.c passes a signal on to the other components for SIGKILL alone.
# Exits with 0 as long as it is so, with 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
daemons=()
finish() {
    scancel --quiet --user="$(id -un)" 2>/dev/null || true
    for _ in {1..100}; do [ -n "$(squeue --noheader 2>/dev/null)" ] || break; sleep 0.2; done
    for ((index = ${#daemons[@]} - 1; index >= 0; index--)); do kill "${daemons[$index]}" 2>/dev/null || true; done
    wait || true
    rm -rf "$folder"
}
trap finish EXIT

# Unpack the packages. Daemons have to be called by the names that Debian's installation links to them.
mkdir -p "$folder"/{debs/partial,root,state,spool/a1,spool/b1,spool/b2}
apt-get install --quiet=2 --yes --reinstall --download-only --no-install-recommends -o Debug::NoLocking=1 \
    -o APT::Sandbox::User="$(id -un)" -o Dir::Cache::archives="$folder/debs" \
    {slurmctld,slurmd,slurm-client,slurm-wlm-basic-plugins}='22.05.8*' munge libmunge2 > /dev/null
for package in "$folder"/debs/*.deb; do dpkg --extract "$package" "$folder/root"; done
for daemon in slurmctld slurmd slurmstepd; do ln -s "$daemon-wlm" "$folder/root/usr/sbin/$daemon"; done
plugins="$(echo "$folder"/root/usr/lib/*/slurm-wlm)"
export PATH="$folder/root/usr/bin:$folder/root/usr/sbin:$PATH" LD_LIBRARY_PATH="$plugins:${plugins%/*}"
for variable in ${!SLURM_*} ${!SBATCH_*}; do unset "$variable"; done
export SLURM_CONF="$folder/slurm.conf"
slurmctld -V

# Run a controller and three nodes on loopback.
mapfile -t ports < <(python3 -c 'import socket
listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(listener.getsockname()[1] for listener in listeners), sep="\n")')
cat > "$SLURM_CONF" <<CONF
ClusterName=finding
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthInfo=socket=$folder/munge.socket
PluginDir=$plugins
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
KillWait=2
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
NodeName=a1 NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=4
NodeName=b1 NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=4
NodeName=b2 NodeAddr=127.0.0.1 Port=${ports[3]} CPUs=4
PartitionName=a Nodes=a1
PartitionName=b Nodes=b1,b2
PartitionName=all Nodes=ALL Default=YES
CONF
start() {
    "$@" >> "$folder/daemons.log" 2>&1 &
    daemons+=($!)
}
head -c 128 /dev/urandom > "$folder/munge.key"
chmod 400 "$folder/munge.key"
start munged --force --foreground --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munge.pid" --log-file="$folder/munge.log" --seed-file="$folder/munge.seed"
for _ in {1..100}; do [ ! -S "$folder/munge.socket" ] || break; sleep 0.1; done
start slurmctld -D
for node in a1 b1 b2; do start slurmd -D -N "$node" -d "$folder/root/usr/sbin/slurmstepd"; done
for _ in {1..150}; do
    [ "$(sinfo --noheader --format=%T 2>/dev/null | sort -u)" != idle ] || break
    sleep 0.2
done
[ "$(sinfo --noheader --format=%T | sort -u)" = idle ] || { tail -n 40 "$folder/daemons.log"; exit 1; }
cd "$folder"

cat > task.sh <<'TASK'
trap 'touch "signalled.$SLURMD_NODENAME"; exit' TERM
touch "ready.$SLURMD_NODENAME"
while :; do sleep 0.1; done
TASK
cat > plain.sh <<'JOB'
#!/bin/bash
srun --ntasks=1 --nodelist=a1 bash task.sh : --ntasks=2 --ntasks-per-node=1 --nodelist=b1,b2 bash task.sh
JOB
cat > heterogeneous.sh <<'JOB'
#!/bin/bash
srun bash task.sh : bash task.sh
JOB
plain=(--nodes=3 --ntasks=3 plain.sh)
heterogeneous=(--partition=a --nodes=1 --ntasks=1 : --partition=b --nodes=2 --ntasks=2 heterogeneous.sh)

wait_for_files() {
    for _ in {1..150}; do
        [ "$(find . -name "$1.*" | wc -l)" != 3 ] || return 0
        sleep 0.2
    done
    echo "not on all nodes: $1"
    return 1
}
signal() {
    local what="$1" name="$2" code=0 job target reached
    rm -f ready.* signalled.*
    job="$(sbatch --parsable --output=job.out "${@:3}")"
    wait_for_files ready
    target="${name/JOB/$job}"
    scancel --signal=TERM "${target/NUMBER/$((job + 1))}" 2> scancel.err || code=$?
    sleep 3
    reached="$(find . -name "signalled.*" | sed 's/.*\.//' | sort | tr '\n' ' ')"
    echo "$what, scancel --signal=TERM $name: exit code $code, reached: ${reached:-none }" | sed 's/ $//' | tee -a out.txt
    sed "s/$job/JOB/" scancel.err | tee -a out.txt
    scancel --signal=TERM "$job" 2> /dev/null || true # the job is over if the first signal reached all
    wait_for_files signalled
    scancel "$job"
    while [ -n "$(squeue --noheader)" ]; do sleep 0.2; done
}
signal "plain job" JOB "${plain[@]}"
signal "plain job" JOB.0 "${plain[@]}"
signal "plain job" JOB.0+1 "${plain[@]}"
signal "heterogeneous job" JOB "${heterogeneous[@]}"
signal "heterogeneous job" JOB.0 "${heterogeneous[@]}"
signal "heterogeneous job" JOB+1.0 "${heterogeneous[@]}"
signal "heterogeneous job" NUMBER.0 "${heterogeneous[@]}"

diff out.txt - <<'SEEN'
plain job, scancel --signal=TERM JOB: exit code 0, reached: a1 b1 b2
plain job, scancel --signal=TERM JOB.0: exit code 225, reached: a1
scancel: error: Kill job error on job step id JOB: Invalid job id specified
plain job, scancel --signal=TERM JOB.0+1: exit code 1, reached: none
scancel: error: Invalid job id JOB.0+1
heterogeneous job, scancel --signal=TERM JOB: exit code 0, reached: a1 b1 b2
heterogeneous job, scancel --signal=TERM JOB.0: exit code 0, reached: a1
heterogeneous job, scancel --signal=TERM JOB+1.0: exit code 0, reached: a1
heterogeneous job, scancel --signal=TERM NUMBER.0: exit code 0, reached: b1 b2
SEEN
