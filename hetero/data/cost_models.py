"""Makes the cost model that a user's arguments ask for, from the shipped profiles and the user's own."""

from collections.abc import Iterable
from pathlib import Path

from hetero.cost.cost_model import CostModel
from hetero.cost.runtime_model import HETERO, RuntimeModel
from hetero.data import shipped_profiles
from hetero.plan.ir import Plan, Precision
from hetero.serialization import load
from hetero.spec.devices import DeviceCatalogue
from hetero.spec.model import ModelSpec
from hetero.spec.profile import Profile, ProfileStore
from hetero.spec.shipped_devices import SHIPPED_DEVICES


def model_costs(
    model: ModelSpec,
    *,
    seq_length: int,
    precision: Precision,
    profiles: Iterable[Path] = (),
    data_sheets: bool = False,
    runtime: RuntimeModel = HETERO,
    devices: DeviceCatalogue = SHIPPED_DEVICES,
) -> CostModel:
    """The cost model of ``model``.

    profiles: files of profiles beside the shipped ones.
    data_sheets: price devices without any profile by their data sheets, instead of refusing them.
    devices: the device types of the cluster or plan.

    Raises:
        ConfigError: a file is missing or malformed, or a profile is of a device type that is none of ``devices``.
    """
    own = [load(Profile, path) for path in profiles]
    return CostModel(
        model=model,
        seq_length=seq_length,
        precision=precision,
        profiles=ProfileStore((*own, *shipped_profiles()), device_types=devices),
        data_sheets=data_sheets,
        runtime=runtime,
    )


def plan_costs(
    plan: Plan, *, profiles: Iterable[Path] = (), data_sheets: bool = False, runtime: RuntimeModel = HETERO
) -> CostModel:
    """The cost model of the model, sequence length, precision, dropout and devices of ``plan``; otherwise as
    :func:`model_costs`."""
    return model_costs(
        plan.model,
        seq_length=plan.seq_length,
        precision=plan.precision,
        profiles=profiles,
        data_sheets=data_sheets,
        runtime=runtime.with_dropout_of(plan),
        devices=plan.device_types,
    )
