"""Runs what may import torch, which ``hetero`` itself never does, as a process of its own."""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from hetero.standard_output import documents_descriptor, output_words


def run_in_child(
    module: str, words: Sequence[str], args: argparse.Namespace, *, python_flags: Sequence[str] = ()
) -> int:
    """Run a module with ``words`` and the command line's ``--json`` and ``--quiet``; returns its exit code."""
    command = [sys.executable, *python_flags, "-m", module, *words, *output_words(args)]
    return subprocess.run(command, check=False, stdout=documents_descriptor()).returncode
