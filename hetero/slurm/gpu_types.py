"""Says whether what a site calls a GPU type in Slurm can be a device of a cluster.

Sites choose these names (``Gres=gpu:TYPE:N``): ``a100``, ``3090``, ``tesla_v100s``, or what Slurm's ``AutoDetect=nvml``
writes, which is NVIDIA's name with underscores: ``nvidia_a100-sxm4-40gb``.
"""

import re
from collections.abc import Iterable

from hetero.spec.devices import DeviceType
from hetero.spec.shipped_devices import SHIPPED_DEVICES

_OF_NO_MODEL = ("nvidia", "tesla", "geforce", "quadro", "rtx", "gtx", "amd", "instinct", "gpu")

_PART_OF_A_DEVICE = re.compile(r"\d+g\.\d+gb")
"""Of multi-instance GPUs (MIG): ``a100_3g.20gb``."""

_MEMORY_GB = re.compile(r"(?<![a-z0-9])(\d+)gb?(?![a-z0-9])")


def may_be(gpu_type: str, device: DeviceType, *, known: Iterable[DeviceType] = SHIPPED_DEVICES) -> bool | None:
    """Whether a GPU of this type of Slurm's can be ``device``; ``None`` if its name does not tell.

    A heuristic: it compares the names of models, and memory where the name states it.

    Args:
        known: devices whose models a name is looked for.
    """
    text = gpu_type.lower()
    if not text or _PART_OF_A_DEVICE.search(text):
        return None
    catalogue = [device, *known]
    models = {_model(each.name) for each in catalogue if not each.is_host}
    named = [model for model in models if _names(text, model)]
    if not named:
        return None
    model = max(named, key=len)
    if device.is_host or _model(device.name) != model:
        return False
    sizes = {int(size) for size in _MEMORY_GB.findall(text)}
    of_size = [each for each in catalogue if _model(each.name) == model and each.memory_gib in sizes]
    return not of_size or device.memory_gib in sizes


def _words(text: str) -> list[str]:
    """The words of a name without those that say of no model: ``[3090]`` of ``geforce_rtx3090``."""
    prefixes = re.compile(f"^(?:{'|'.join(_OF_NO_MODEL)})+")
    return [rest for word in re.split(r"[^a-z0-9]+", text.lower()) if (rest := prefixes.sub("", word))]


def _model(name: str) -> str:
    return next(iter(_words(name)), name.lower())


def _names(text: str, model: str) -> bool:
    """Whether a word of ``text`` begins with the model: ``v100sxm2`` is a V100, no V100S, and ``l40`` no L4."""
    return any(re.match(rf"{re.escape(model)}(?!\d|xm)", word) for word in _words(text))
