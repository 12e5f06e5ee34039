"""``hetero doctor`` looks at this host, and under torchrun at all hosts: what is missing, what differs, what to do."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from hetero.commands.child import run_in_child
from hetero.commands.elastic import add_job_options
from hetero.commands.elastic_tls import etcd_address
from hetero.doctor.findings import Diagnosis
from hetero.doctor.options import add_options, words_of
from hetero.extras import require
from hetero.serialization import save

_OF_ETCD = ("etcd", "certificates", "etcd_ca", "etcd_cert", "etcd_key")
"""Flags of which each asks for a look at an elastic job; without ``--etcd`` at that of this machine."""


def add_doctor(commands: Any) -> None:
    """Add the parser of ``hetero doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="check this host, or all hosts: torchrun ... -m hetero doctor",
        description=(
            "Check this host: versions, devices, limits, networks, sockets, variables; each line says what to do. All "
            "hosts of a cluster, and the links between them: torchrun --nproc-per-node 8 ... -m hetero doctor. With "
            "--etcd or --certificates, also who can reach the etcd and the copies of an elastic job."
        ),
    )
    add_options(parser)
    add_job_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if all(getattr(args, name) is None for name in _OF_ETCD):
        return run_in_child("hetero.doctor", words_of(args), args)
    require("elastic", asked_by="hetero doctor --etcd")
    from hetero.elastic.job_network import check_job_network

    findings = check_job_network(etcd_address(args), args.job)
    with tempfile.TemporaryDirectory(prefix="hetero-doctor-") as folder:
        args.job_findings = Path(folder) / "findings.json"
        save(Diagnosis(hosts=(), findings=findings), args.job_findings)
        return run_in_child("hetero.doctor", words_of(args), args)
