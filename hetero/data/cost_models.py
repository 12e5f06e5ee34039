"""Makes the cost model that a user's arguments ask for, from the shipped profiles and the user's own."""

from collections.abc import Iterable
from pathlib import Path

from hetero.cost.cost_model import CostModel
from hetero.cost.runtime_model import HETERO, RuntimeModel
from hetero.data import shipped_profiles
from hetero.plan.ir import Plan, Precision
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from hetero.spec.profile import Profile, ProfileStore
from hetero.spec.shipped_devices import SHIPPED_DEVICES


def model_costs(
    model: ModelSpec,
    *,
    seq_length: int,
    precision: Precision,
    profiles: Iterable[Path | Profile] = (),
    data_sheets: bool = False,
    runtime: RuntimeModel = HETERO,
    where: ClusterSpec | Plan | None = None,
) -> CostModel:
    """The cost model of ``model``.

    profiles: profiles beside the shipped ones, or their files.
    data_sheets: price devices without any profile by their data sheets, instead of refusing them.
    where: the cluster, whose links carry the collectives of tensor parallelism, or the plan; device types that they
        describe may have profiles.

    Raises:
        ConfigError: a file is missing or malformed, or a profile is of a device type that is not known.
    """
    own = [each if isinstance(each, Profile) else load(Profile, each) for each in profiles]
    store = ProfileStore(
        (*own, *shipped_profiles()),
        device_types=where.device_types if where is not None else SHIPPED_DEVICES,
        all_reduce=where.all_reduce_of_devices if isinstance(where, ClusterSpec) else {},
    )
    return CostModel(
        model=model,
        seq_length=seq_length,
        precision=precision,
        profiles=store,
        data_sheets=data_sheets,
        runtime=runtime,
    )


def plan_costs(
    plan: Plan,
    cluster: ClusterSpec | None = None,
    *,
    profiles: Iterable[Path] = (),
    data_sheets: bool = False,
    runtime: RuntimeModel = HETERO,
) -> CostModel:
    """The cost model of the model, sequence length, precision, dropout and devices of ``plan``, on ``cluster`` if that
    is known; otherwise as :func:`model_costs`."""
    return model_costs(
        plan.model,
        seq_length=plan.seq_length,
        precision=plan.precision,
        profiles=profiles,
        data_sheets=data_sheets,
        runtime=runtime.with_dropout_of(plan),
        where=cluster if cluster is not None else plan,
    )
