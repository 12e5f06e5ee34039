"""Command line options that name the device of a stage."""

import argparse
from dataclasses import dataclass
from typing import Literal

Device = Literal["cuda", "cpu"]
HalfPrecision = Literal["bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Device that the stages run on.

    name: as CUDA calls it; "cpu" for a rehearsal.
    half: the half precision that trainings use.
    """

    device: Device = "cuda"
    name: str = "cpu"
    half: HalfPrecision = "bf16"

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options that :func:`add_target_options` declares."""
        return ("--device", self.device, "--device-name", self.name, "--half", self.half)


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a target."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses (default: cuda)")
    parser.add_argument("--device-name", default="cpu", metavar="NAME", help="as CUDA calls it (default: cpu)")
    parser.add_argument("--half", choices=("bf16", "fp16"), default="bf16", help="half precision (default: bf16)")


def target_of(arguments: argparse.Namespace) -> Target:
    """Return the target that the options name."""
    return Target(device=arguments.device, name=arguments.device_name, half=arguments.half)
