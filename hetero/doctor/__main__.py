"""Looks at this host, or under torchrun at all hosts of the launch; ``hetero doctor`` calls it.

A process of its own: it imports torch where there is one, which ``hetero`` itself never does, and works without it.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from hetero.console import console
from hetero.distributed.environment import set_cuda_environment
from hetero.doctor.checklist import print_diagnosis
from hetero.doctor.facts import HostFacts
from hetero.doctor.findings import Diagnosis, joined
from hetero.doctor.host_checks import check_host
from hetero.doctor.host_facts import host_facts
from hetero.doctor.installed_torch import torch_facts_or_error
from hetero.doctor.options import add_options
from hetero.errors import ConfigError, HeteroError
from hetero.plan.ir import Plan
from hetero.serialization import load
from hetero.standard_output import add_output_options, answer, directed_output, tell_error


def main(argv: Sequence[str]) -> int:
    """Exit code 0; 1 if a problem was found, 2 after a mistake of the user's, which stderr tells."""
    parser = argparse.ArgumentParser(prog="python -m hetero.doctor", description=__doc__)
    add_options(parser)
    add_output_options(parser)
    args = parser.parse_args(argv)
    given = dict(os.environ)
    # Before torch is imported by anyone.
    set_cuda_environment(os.environ, shares_devices=args.share_devices)
    # Waiting for a collective of NCCL raises then; its watchdog would end the process that is to tell what is wrong.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    try:
        with directed_output(parser, args):
            return _diagnosed(args, given)
    except HeteroError as error:
        tell_error(error)
        return 2


def _diagnosed(args: argparse.Namespace, given: Mapping[str, str]) -> int:
    is_launched = given.get("WORLD_SIZE", "1") != "1"
    if args.share_devices and not is_launched:
        raise ConfigError("--share-devices has no effect in one process: launch hetero doctor with torchrun")
    if args.job_findings is not None and is_launched:
        raise ConfigError("--etcd has no effect under torchrun: look at the job with hetero doctor in one process")
    plan = _plan(args, is_launched=is_launched)
    torch, torch_error = torch_facts_or_error()
    facts = host_facts(given, torch, torch_error=torch_error)
    parts = []
    for part in _diagnoses(facts, plan, args, is_launched=is_launched):
        parts.append(part)
        _print(part)
    # Of a launch, rank 0 speaks for all.
    if parts:
        answer(args, lambda: joined(parts))
    return int(any(part.severity == "problem" for part in parts))


def _diagnoses(
    facts: HostFacts, plan: Plan | None, args: argparse.Namespace, *, is_launched: bool
) -> Iterator[Diagnosis]:
    """Of this host, or on rank 0 of a launch those of all hosts; without torch a rank can speak for its host alone."""
    if not is_launched or facts.torch is None:
        of_job = () if args.job_findings is None else load(Diagnosis, args.job_findings).findings
        yield Diagnosis(hosts=(facts,), findings=(*check_host(facts), *of_job))
        return
    from hetero.doctor.launch import look_together

    yield from look_together(facts, plan=plan, link_seconds=args.link_seconds, shares_devices=args.share_devices)


def _plan(args: argparse.Namespace, *, is_launched: bool) -> Plan | None:
    if args.plan is None:
        return None
    if not is_launched:
        raise ConfigError("--plan has no effect in one process: launch hetero doctor on the plan's ranks with torchrun")
    return load(Plan, args.plan)


def _print(diagnosis: Diagnosis) -> None:
    print_diagnosis(diagnosis, console())
    # If ranks stand still from here on, this has been told.
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
