# Sourced by the launch scripts: what torchrun is told so that a rank stays on the processors near its GPU.

# Nothing on a host with one NUMA node, or without numactl, which torchrun does the binding by.
numa_binding() {
    local nodes=(/sys/devices/system/node/node[0-9]*)
    if [ "${#nodes[@]}" -gt 1 ] && command -v numactl >/dev/null; then
        echo "--numa-binding node"
    fi
}
