"""Says where a plan comes from: the command that made it, the cluster it is for, and what was predicted for it there.

Nothing that trains reads it. ``hetero launch`` takes the cluster from it and ``hetero show`` tells it; whoever edits a
plan by hand takes it out, as the prediction is of the plan as it was made.
"""

import shlex
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from hetero.printable import printable
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT
from hetero.spec.cluster import ClusterSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPrediction:
    """What a step of a plan was predicted to take.

    step_s: seconds of a step.
    step_low_s, step_high_s: nine of ten such steps take from the one to the other.
    bubble_share: of the devices' time in a step, the part in which they compute nothing.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    step_s: float
    step_low_s: float
    step_high_s: float
    bubble_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanProvenance:
    """Where a plan comes from.

    command: the line that made it, as it was typed.
    cluster: the one that the plan was made for, with the figures that it had then.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    command: AnyText
    cluster: ClusterSpec
    prediction: PlanPrediction

    @property
    def shown_command(self) -> str:
        """The line that made it, for people who may paste it: each word is quoted, whatever a stranger's plan says.

        A shell starts the first word with the others, and nothing else.
        """
        try:
            words = shlex.split(self.command)
        except ValueError:  # a quote without its end
            words = self.command.split()
        return printable(shlex.join(words))
