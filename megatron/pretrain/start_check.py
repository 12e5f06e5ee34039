"""Ends a program before torch is imported if what is installed cannot train."""

import os
import sys

from hetero.distributed.environment import is_on_one_host
from hetero.doctor.installation import check_installation
from hetero.errors import ConfigError
from hetero.extras import exit_without
from megatron.pretrain.error_file import exit_code


def exit_if_unusable(program: str) -> None:
    """End the process with exit code 2 and one line on stderr if ``program`` cannot work here.

    Ranks of several hosts, whose installations may differ, meet first: there the launch asks the same.
    """
    exit_without("train", program=program)
    if not is_on_one_host(os.environ):
        return
    try:
        check_installation(os.environ)
    except ConfigError as error:
        sys.exit(exit_code(error, os.environ))
