#!/usr/bin/env python3
"""Pretrain a GPT on devices that need not be alike.

    torchrun --nproc-per-node 8 pretrain_gpt.py --hetero-plan plan.json --num-layers 24 ...

The flags are Megatron-LM's, plus ``--hetero-*``; ``--help`` lists them. Without a plan, Megatron's degrees of
parallelism give the uniform one.
"""

import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from hetero.distributed.environment import set_cuda_environment
from megatron.pretrain.start_check import exit_if_unusable

# Before torch is imported by anyone.
exit_if_unusable("pretrain_gpt.py")
set_cuda_environment(os.environ)

from hetero.distributed.process_exit import bounded_exit
from hetero.distributed.process_output import ignore_output_errors
from hetero.errors import HeteroError
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.error_file import error_file, exit_code, write_error_file
from megatron.pretrain.given_files import file_problems, sees_what_all_see


def load_kernels_at_start(argv: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Have CUDA load all kernels when it starts, in a training that may have experts, unless the user has chosen.

    Those get other numbers of tokens all the time, by which cuBLAS chooses kernels: no warm-up has them all. For other
    models it has (:mod:`hetero.runtime.warm_up`), and what is never called need not take memory.
    """
    if any(word.partition("=")[0] in ("--num-experts", "--yaml-cfg") for word in argv):
        environment.setdefault("CUDA_MODULE_LOADING", "EAGER")


def main(argv: list[str]) -> int:
    """Exit code 0, 2 for wrong input or a loss that is no number, 3 if a rank or its data was lost, or memory.

    Where an agent of elastic training asks for it, this writes down what there is to plan, and trains nothing.
    """
    # Before anyone asks CUDA for anything.
    load_kernels_at_start(argv, os.environ)
    try:
        # What is wrong with the command line, and with files that it names, is told before torch is imported.
        config = parse_args(argv, file_problems=file_problems if sees_what_all_see(os.environ) else lambda flags: ())
    except HeteroError as error:
        return exit_code(error, os.environ)
    set_cuda_environment(os.environ, shares_devices=config.parallel.shares_devices)
    from hetero.runtime import cpu_backend  # noqa: PLC0415

    # Before megatron.core is imported by anyone.
    cpu_backend.install()
    from hetero.elastic.records import DESCRIBE_VARIABLE  # noqa: PLC0415
    from hetero.runtime.layer_choice import check_attention_variables  # noqa: PLC0415
    from megatron.pretrain.elastic import describe  # noqa: PLC0415
    from megatron.pretrain.launch import launch_from  # noqa: PLC0415
    from megatron.pretrain.training import pretrain  # noqa: PLC0415

    try:
        check_attention_variables(config.stage, os.environ)
        if (path := os.environ.get(DESCRIBE_VARIABLE)) is not None:
            describe(config, Path(path))
            return 0
        pretrain(config, launch_from(os.environ))
    except HeteroError as error:
        return exit_code(error, os.environ)
    except Exception as error:
        write_error_file(error, error_file(os.environ))
        raise
    return 0


if __name__ == "__main__":
    # A run of weeks does not end because the disk of its log is full.
    ignore_output_errors()
    with bounded_exit():
        sys.exit(main(sys.argv[1:]))
