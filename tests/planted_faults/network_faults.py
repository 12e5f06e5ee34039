"""Faults of what is said about sockets that listen, and about who can reach them."""

from tests.planted_faults.fault import Fault

NETWORK_FAULTS = (
    Fault(
        name="a store on all interfaces counts as one on a single address",
        kind="wrong report",
        file="hetero/doctor/listening_checks.py",
        find="if address in ALL_INTERFACES:",
        replace='if address == "*":',
        hints=("tests/unit/doctor/test_listening_checks.py",),
    ),
    Fault(
        name="ranks of one host are said to listen for other hosts",
        kind="wrong report",
        file="hetero/doctor/listening_checks.py",
        find="        set_one_host_environment(environment)\n",
        replace="        pass\n",
        hints=("tests/unit/doctor/test_listening_checks.py",),
    ),
    Fault(
        name="addresses of the kernel's list are read in the wrong order",
        kind="order",
        file="hetero/doctor/host_facts.py",
        find='struct.pack(">I", word)',
        replace='struct.pack("<I", word)',
        hints=("tests/unit/doctor/test_host_facts.py",),
    ),
    Fault(
        name="an etcd that lets everybody in counts as one that asks for certificates",
        kind="wrong report",
        file="hetero/elastic/job_network.py",
        find="if _refusal(dataclasses.replace(member, certificate=None, key=None)) is None:",
        replace="if _refusal(dataclasses.replace(member, ca=None, certificate=None, key=None)) is None:",
        hints=("tests/elastic/test_job_network.py",),
    ),
    Fault(
        name="copies without TLS are taken for copies with it",
        kind="wrong report",
        file="hetero/elastic/job_network.py",
        find='return "ALERT" in (error.reason or "")',
        replace="return bool(error.reason)",
        hints=("tests/elastic/test_job_network.py",),
    ),
)
