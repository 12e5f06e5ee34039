#!/usr/bin/env bash
# In a step of a heterogeneous job the first node of SLURM_STEP_NODELIST and SLURM_JOB_NODELIST need not be that of task 0.
#
# Expected: `scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1`, the usual way to MASTER_ADDR, is the host of task 0
# (SLURM_PROCID 0, SLURM_NODEID 0) unless the user has asked for another placement of tasks.
# Seen: in the tasks of `srun A : B` both lists hold the nodes of all components, sorted by name, and task 0 is on the first
# node of component 0. With component 0 on b1 and b2 and component 1 on a1, all tasks find a1 first, where the last task
# is: everyone waits for a host that does not listen. With the components the other way round it works. The batch script
# sees the nodes of component 0 alone, so the same line is right there.
# Version: Slurm 22.05.8 and munge, Debian 12's packages (unpacked, not installed), Linux x86-64. Needs apt-get and dpkg.
# Source: https://slurm.schedmd.com/heterogeneous_jobs.html, https://slurm.schedmd.com/srun.html (SLURM_STEP_NODELIST: "List
# of nodes allocated to the step").
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
[ "$SLURM_PROCID" != 0 ] || echo "  task 0 of $SLURM_NTASKS is on node $SLURM_NODEID: $SLURMD_NODENAME"
[ "$SLURM_PROCID" != 0 ] || for name in SLURM_STEP_NODELIST SLURM_JOB_NODELIST; do
    echo "  first of $name (${!name}): $(scontrol show hostnames "${!name}" | head -n 1)"
done
TASK
cat > job.sh <<'JOB'
#!/bin/bash
echo "  first of SLURM_JOB_NODELIST in the batch script ($SLURM_JOB_NODELIST): $(scontrol show hostnames | head -n 1)"
if [ -n "$SLURM_HET_SIZE" ]; then srun bash task.sh : bash task.sh; else srun bash task.sh; fi
JOB
try() {
    echo "$1"
    timeout 60 sbatch --wait --output=job.out "${@:2}" job.sh > sbatch.out
    cat job.out
}
a=(--partition=a --nodes=1 --ntasks=1)
b=(--partition=b --nodes=2 --ntasks=2)
{
    try "plain job:" --nodes=3 --ntasks=3
    try "heterogeneous job, a1 before b1 and b2:" "${a[@]}" : "${b[@]}"
    try "heterogeneous job, b1 and b2 before a1:" "${b[@]}" : "${a[@]}"
} | tee out.txt

diff out.txt - <<'SEEN'
plain job:
  first of SLURM_JOB_NODELIST in the batch script (a1,b[1-2]): a1
  task 0 of 3 is on node 0: a1
  first of SLURM_STEP_NODELIST (a1,b[1-2]): a1
  first of SLURM_JOB_NODELIST (a1,b[1-2]): a1
heterogeneous job, a1 before b1 and b2:
  first of SLURM_JOB_NODELIST in the batch script (a1): a1
  task 0 of 3 is on node 0: a1
  first of SLURM_STEP_NODELIST (a1,b[1-2]): a1
  first of SLURM_JOB_NODELIST (a1,b[1-2]): a1
heterogeneous job, b1 and b2 before a1:
  first of SLURM_JOB_NODELIST in the batch script (b[1-2]): b1
  task 0 of 3 is on node 0: b1
  first of SLURM_STEP_NODELIST (a1,b[1-2]): a1
  first of SLURM_JOB_NODELIST (a1,b[1-2]): a1
SEEN
