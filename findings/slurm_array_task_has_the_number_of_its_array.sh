#!/usr/bin/env bash
# By SLURM_JOB_ID one task of every job array requeues and cancels all tasks; `scancel` by that of another cancels none.
#
# Expected: SLURM_JOB_ID differs from task to task, so `scontrol requeue $SLURM_JOB_ID` (usual before a time limit) and
# `scancel $SLURM_JOB_ID` mean the task that they run in. SLURM_ARRAY_JOB_ID is the number of the array.
# Seen: the task that is split off last has the array's number as its SLURM_JOB_ID: `scontrol requeue` by it restarts all
# running tasks, and `scancel` ends all. By the number of another task `scontrol requeue` restarts that task alone, while
# `scancel` does nothing, prints nothing and returns 0 (with -v: "Invalid job id specified"). Only the form ARRAY_TASK
# (${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID) means one task in all of them.
# Version: Slurm 22.05.8 and munge, Debian 12's packages (unpacked, not installed), Linux x86-64. Needs apt-get and dpkg.
# Source: https://slurm.schedmd.com/job_array.html, "Job ID and Environment Variables": its example shows the equal numbers
# (SLURM_JOB_ID=36 and SLURM_ARRAY_JOB_ID=36) and does not say what follows; job_str_signal in src/slurmctld/job_mgr.c.
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

cat > task.sh <<'JOB'
#!/bin/bash
echo "$SLURM_JOB_ID" > "number.$SLURM_ARRAY_TASK_ID"
touch "started.$SLURM_ARRAY_TASK_ID.${SLURM_RESTART_COUNT:-0}"
sleep 600
JOB
submit() {
    rm -f started.*
    array="$(sbatch --parsable --array=0-2 --ntasks=1 --requeue --output=/dev/null task.sh)"
    for _ in {1..150}; do
        [ "$(find . -name "started.*.0" | wc -l)" != 3 ] || break
        sleep 0.2
    done
    last="$(grep --files-with-matches --line-regexp "$array" number.?)" last="${last##*.}"
    other=$(((last + 1) % 3))
}
count_running() { squeue --noheader --array --user="$(id -un)" --states=running --format=%i | wc -l; }
try() {
    local number code
    submit
    case "$2" in
        other) number="$(cat "number.$other")" ;;
        last) number="$(cat "number.$last")" ;;
        array_task) number="${array}_$last" ;;
    esac
    $1 "$number" && code=0 || code=$?
    sleep 3
    echo "$1 by $3: exit code $code, $((3 - $(count_running))) of 3 tasks" | tee -a out.txt
    scancel "$array"
    while [ -n "$(squeue --noheader)" ]; do sleep 0.2; done
}
for command in "scontrol requeue" scancel; do
    try "$command" other "SLURM_JOB_ID of another task"
    try "$command" last "SLURM_JOB_ID of the task that has the array's number"
    try "$command" array_task "ARRAY_TASK of that task"
done

diff out.txt - <<'SEEN'
scontrol requeue by SLURM_JOB_ID of another task: exit code 0, 1 of 3 tasks
scontrol requeue by SLURM_JOB_ID of the task that has the array's number: exit code 0, 3 of 3 tasks
scontrol requeue by ARRAY_TASK of that task: exit code 0, 1 of 3 tasks
scancel by SLURM_JOB_ID of another task: exit code 0, 0 of 3 tasks
scancel by SLURM_JOB_ID of the task that has the array's number: exit code 0, 3 of 3 tasks
scancel by ARRAY_TASK of that task: exit code 0, 1 of 3 tasks
SEEN
