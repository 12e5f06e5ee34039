"""``hetero devices`` prints the device types that a cluster file may name, and the hosts that one describes."""

import argparse
from pathlib import Path
from typing import Any

from hetero.console import console
from hetero.report.tables.devices import devices_table, source_lines
from hetero.report.tables.hosts import host_source_lines, hosts_table
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from hetero.standard_output import answer


def add_devices(commands: Any) -> None:
    """Add the parser of ``hetero devices``."""
    parser = commands.add_parser("devices", help="print the device types that a cluster file may name")
    parser.add_argument(
        "--cluster", type=Path, metavar="CLUSTER.yaml", help="with those that it describes itself, and its hosts"
    )
    parser.set_defaults(run=_devices)


def _devices(args: argparse.Namespace) -> int:
    cluster = None if args.cluster is None else load(ClusterSpec, args.cluster)
    known = SHIPPED_DEVICES if cluster is None else cluster.device_types
    console().print(devices_table(known))
    for line in source_lines(known):
        print(line)
    if cluster is not None and (hosts := hosts_table(cluster.node_types)) is not None:
        console().print(hosts)
        for line in host_source_lines(cluster.node_types):
            print(line)
    hosts_of = {} if cluster is None else {each.name: each.host for each in cluster.node_types if each.host is not None}
    answer(args, lambda: {"devices": list(known), "hosts": hosts_of})
    return 0
