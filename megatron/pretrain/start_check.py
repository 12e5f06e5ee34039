"""Ends a program before torch is imported if what is installed cannot train, and warns of old copies."""

import os
import sys

from hetero.distributed.environment import is_on_one_host
from hetero.doctor.installation import check_installation, old_copies_note
from hetero.errors import ConfigError
from hetero.extras import exit_without
from megatron.pretrain.error_file import exit_code


def exit_if_unusable(program: str) -> None:
    """End the process with exit code 2 and one line on stderr if ``program`` cannot work here.

    Ranks of several hosts, whose installations may differ, meet first: there the launch asks the same. Rank 0 warns of
    old copies on its host.
    """
    exit_without("train", program=program)
    if os.environ.get("RANK", "0") == "0" and (note := old_copies_note(os.environ)):
        sys.stderr.write(f"hetero: warning: {note}\n")
    if not is_on_one_host(os.environ):
        return
    try:
        check_installation()
    except ConfigError as error:
        sys.exit(exit_code(error, os.environ))
