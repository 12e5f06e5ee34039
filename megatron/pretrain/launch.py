"""Turns a process into a rank: reads torchrun's variables, joins the world, and agrees with all on the plan."""

import contextlib
import datetime
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hetero.cost.capacity import check_memory
from hetero.distributed.compiler_cache import use_own_compiler_cache
from hetero.distributed.environment import describe_cuda_environment, local_place
from hetero.distributed.failure_detector import FailureDetector, FailureDetectorOptions, is_lost_peer
from hetero.distributed.found_devices import check_devices, found_device, short_of_memory
from hetero.distributed.hardware_queues import check_hardware_queues
from hetero.distributed.rank_consensus import check_same_everywhere, on_all_ranks
from hetero.distributed.rendezvous_store import serve_store
from hetero.distributed.runtime_versions import check_kernels, check_versions, cudnn_warnings
from hetero.distributed.shared_devices import check_nccl_of_shared_devices, index_of_device, sharing_note
from hetero.distributed.shutdown import leave_world
from hetero.distributed.world import join_world
from hetero.doctor.installation import check_installation, untried_note
from hetero.elastic.records import ASSIGNMENT_VARIABLE, RankAssignment
from hetero.errors import ConfigError, MembershipError, PlanError, PlanMemoryError
from hetero.plan.batch_shares import check_batch_sizes
from hetero.plan.batch_sizes import BatchSizes
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.device_rules import fp8_obstacle
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.plan.validate import validate_launch
from hetero.runtime.mcore import forget_groups
from hetero.runtime.options import StageOptions
from hetero.serialization import load, to_json
from hetero.spec.cluster import ClusterSpec
from hetero.spec.devices import DeviceType
from hetero.spec.found_device import FoundDevice
from hetero.spec.model import ModelSpec
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.cli.parallel_config import ParallelConfig
from megatron.pretrain.error_file import error_file, write_error_file
from megatron.pretrain.planning import plan_on_rank_0

_CONNECT_S = 3.0
"""For one try to reach a store whose port is open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """Says where the ranks meet. ``in_rank_0``: rank 0 hosts the store, and not the launcher, as torchrun does."""

    host: str
    port: int
    in_rank_0: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Holds what the launcher says of this process. ``store`` is ``None`` if it is the only one.

    cuda_environment: for the log, what CUDA, torch and NCCL are told.
    local_world_size: ranks of this host.
    elastic: what the agent of this rank has told it, ``None`` where none has started it.
    error_file: where the launcher looks for the reason when this process has failed, ``None`` where it does not.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int = 1
    store: StoreAddress | None = None
    cuda_environment: str = ""
    elastic: RankAssignment | None = None
    error_file: Path | None = None


def launch_from(environment: Mapping[str, str]) -> Launch:
    """Read torchrun's variables; without them this is the only process.

    Raises:
        ConfigError: some are set and others not, or one is no number; or the file of an elastic agent cannot be read.
    """
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = [name for name in numbers if name in environment]
    if not given:
        return Launch(rank=0, world_size=1, local_rank=0, cuda_environment=describe_cuda_environment(environment))
    is_alone = environment.get("WORLD_SIZE") == "1"
    wanted = numbers if is_alone else (*numbers, "MASTER_PORT", "MASTER_ADDR")
    if missing := [name for name in wanted if name not in environment]:
        raise ConfigError(f"environment: {', '.join(given)} set but not {', '.join(missing)}; launch with torchrun")
    if wrong := [name for name in wanted if name != "MASTER_ADDR" and not environment[name].isdecimal()]:
        values = ", ".join(f"{name} {environment[name]!r}" for name in wrong)
        raise ConfigError(f"environment: {values}: must be whole numbers; launch with torchrun")
    rank, world_size, local_rank = (int(environment[name]) for name in numbers)
    if not 0 <= rank < world_size:
        raise ConfigError(f"environment: RANK {rank} of WORLD_SIZE {world_size}; ranks count from 0")
    if not is_alone and not 0 < int(environment["MASTER_PORT"]) < 2**16:
        raise ConfigError(f"environment: MASTER_PORT {environment['MASTER_PORT']} is no port, which are 1 to 65535")
    store = None
    if not is_alone:
        store = StoreAddress(
            host=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            in_rank_0=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_place(environment)[1],
        store=store,
        cuda_environment=describe_cuda_environment(environment),
        elastic=_assignment(environment, world_size=world_size),
        error_file=error_file(environment),
    )


def _assignment(environment: Mapping[str, str], *, world_size: int) -> RankAssignment | None:
    """What an elastic agent has written for its ranks.

    Raises:
        ConfigError: the file cannot be read, or is of a launch of another size.
    """
    path = environment.get(ASSIGNMENT_VARIABLE)
    if path is None:
        return None
    assignment = load(RankAssignment, Path(path))
    planned = assignment.epoch.plan.world_size
    if planned != world_size:
        raise ConfigError(
            f"{path}: its plan is for {planned} ranks, WORLD_SIZE is {world_size}; unset {ASSIGNMENT_VARIABLE}, which "
            "only an agent ('hetero elastic agent') sets"
        )
    return assignment


@contextlib.contextmanager
def joined(launch: Launch, config: ParallelConfig) -> Iterator[tuple[torch.device, FailureDetector]]:
    """Join the world of this launch, and watch its ranks from the first word with another until it has been left.

    Yields this rank's device and the failure detector.

    Raises:
        ConfigError: a rank has no device for the backend that was asked for, a torch without kernels for it, versions
            that are known to break, or the ranks run different versions of the same software; on every rank.
        MembershipError: the store cannot be reached, or a rank did not arrive or was lost.
    """
    timeout = datetime.timedelta(minutes=config.timeout_minutes)
    store = _store(launch, timeout)
    with FailureDetector(
        store,
        rank=launch.rank,
        world_size=launch.world_size,
        options=FailureDetectorOptions(
            lost_after_s=config.heartbeat_timeout_s, arrive_within_s=timeout.total_seconds()
        ),
        hosts_store=launch.store is not None and launch.store.in_rank_0 and launch.rank == 0,
        before_end=lambda error: write_error_file(error, launch.error_file),
    ) as detector:
        detector.wait_for_all()
        # Objects and CPU tensors travel over gloo, GPU tensors over NCCL, which a host without GPUs cannot even set up.
        has_nccl = config.backend == "nccl" and torch.cuda.device_count() > 0
        join_world(
            "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            store=dist.PrefixStore("world", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
        failed = True
        try:
            on_all_ranks(check_installation)
            device = on_all_ranks(lambda: _device(config, launch.local_rank))
            if device.type == "cuda":
                torch.cuda.set_device(device)
                if launch.rank == 0:
                    print(f"environment: {launch.cuda_environment}", flush=True)
                    if note := sharing_note(launch.local_world_size, torch.cuda.device_count()):
                        print(f"devices: {note}", flush=True)
            by_rank = check_versions(device)
            if launch.rank == 0 and (note := untried_note(by_rank, on_gpu=device.type == "cuda")):
                print(note, flush=True)
            if launch.rank == 0:
                for note in cudnn_warnings(by_rank):
                    sys.stderr.write(f"hetero: warning: {note}\n")
            on_all_ranks(lambda: check_kernels(device))
            on_all_ranks(lambda: use_own_compiler_cache(os.environ) if device.type == "cuda" else None)
            yield device, detector
            failed = False
        except BaseException as error:
            # Before the others hear of it, whose errors are consequences.
            if isinstance(error, Exception) and not is_lost_peer(error):
                write_error_file(error, launch.error_file)
            # The store may be what was lost. What happened here is worth more than that nobody hears of it.
            with contextlib.suppress(dist.DistError):
                detector.tell(error)
            raise
        finally:
            # Both hold groups: gloo's threads abort a process that ends with one of them alive.
            detector.transport_error = str
            forget_groups()
            leave_world(failed=failed)


def _store(launch: Launch, timeout: datetime.timedelta) -> dist.Store:
    """Connect to the rendezvous store, or open it. It waits for no rank: the failure detector knows who is missing.

    Raises:
        ConfigError: rank 0 cannot open its port.
        MembershipError: nobody answers at its address.
    """
    address = launch.store
    if address is None:
        return dist.HashStore()
    where = f"MASTER_ADDR {address.host} MASTER_PORT {address.port}"
    if address.in_rank_0 and launch.rank == 0:
        has_other_hosts = launch.local_world_size < launch.world_size
        try:
            served = serve_store(address.host, address.port, has_other_hosts=has_other_hosts, timeout=timeout)
        except (OSError, dist.DistError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{where}: rank 0 cannot open the rendezvous store there: {reason}") from error
        if served.note:
            sys.stderr.write(f"hetero: warning: {served.note}\n")
        served.close_when_all_connected()
        return served.store
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return _connected(address, timeout)
        except (OSError, dist.DistError, RuntimeError) as error:
            if time.monotonic() > deadline:
                reason, host = str(error).splitlines()[0], "rank 0" if address.in_rank_0 else "the launcher"
                raise MembershipError(
                    f"{where}: no rendezvous store answers there within {timeout.total_seconds():g} s: {reason}; is "
                    f"{host} running, and the address right?"
                ) from error
            time.sleep(0.2)


def _connected(address: StoreAddress, timeout: datetime.timedelta) -> dist.Store:
    """Connect to the store, once somebody listens: before, torch waits up to three times as long as it is told to."""
    socket.create_connection((address.host, address.port), timeout=_CONNECT_S).close()
    within = datetime.timedelta(seconds=_CONNECT_S)
    store = dist.TCPStore(address.host, address.port, is_master=False, timeout=within, wait_for_workers=False)
    store.set_timeout(timeout)
    return store


def _device(config: ParallelConfig, local_rank: int) -> torch.device:
    if config.backend == "gloo":
        if torch.cuda.is_available():
            raise ConfigError(
                "--distributed-backend gloo trains on the CPU, but this host shows CUDA devices to megatron-core; "
                "hide them with CUDA_VISIBLE_DEVICES='' or use nccl"
            )
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    index = index_of_device(local_rank, num_devices, shares_devices=config.shares_devices)
    if index is None:
        shares = ", add --hetero-share-devices to try something out" if num_devices > 0 else ""
        raise ConfigError(
            f"--distributed-backend nccl: this host has {num_devices} CUDA devices and more processes; start one "
            f"process per device{shares}, or use --distributed-backend gloo for the CPU"
        )
    if config.shares_devices:
        check_nccl_of_shared_devices(flag="--hetero-share-devices", cuda=torch.version.cuda)
    return torch.device("cuda", index)


def agree_on_plan(config: PretrainConfig, model: ModelSpec, device: torch.device, *, given: Plan | None = None) -> Plan:
    """Get the plan of this launch, the same on every rank: the file's, the planner's, or the uniform one of the flags.

    Collective over the world.

    Args:
        given: the plan, whatever the flags say of it; it was made for the nodes that are there.

    Raises:
        ConfigError: a rank cannot read it, it breaks a rule, or ranks have different flags or files.
        PlanError: a rank sits on another device than its stage is planned for.
    """
    check_same_everywhere("flags", repr(config), fix="launch every rank with the same command line")
    found = [found_device(device)] * dist.get_world_size()
    dist.all_gather_object(found, found[dist.get_rank()])
    cluster = on_all_ranks(lambda: _described_cluster(config)) if given is None else None
    devices = _devices(config, cluster, found)
    planned = given
    if planned is None and (planner := config.parallel.planner) is not None:
        planned = plan_on_rank_0(config, planner, model)
    plan = on_all_ranks(lambda: _checked(planned or _local_plan(config, model, devices), config, model, cluster))
    check_same_everywhere("plan", to_json(plan), fix="give every host the same --hetero-plan file")
    if config.emulation is not None:
        return plan
    on_all_ranks(lambda: check_devices(plan, found))
    if device.type == "cuda":
        on_all_ranks(lambda: check_hardware_queues(plan, os.environ))
    if cluster is not None:
        _check_memory(plan, cluster, config.parallel.hetero_cluster)
    _warn_of_little_memory(found, devices, cluster)
    return plan


def _described_cluster(config: PretrainConfig) -> ClusterSpec | None:
    """The cluster file of this launch, emulated or not.

    Raises:
        ConfigError: it is malformed, or an emulated one has another number of devices than there are ranks.
    """
    if (emulation := config.emulation) is not None:
        cluster = load(ClusterSpec, emulation.cluster)
        if cluster.num_devices != dist.get_world_size():
            raise ConfigError(
                f"--hetero-emulate {emulation.cluster}: it describes {cluster.num_devices} devices, the launch has "
                f"{dist.get_world_size()} ranks; start one process per device"
            )
        return cluster
    path = config.parallel.hetero_cluster
    return load(ClusterSpec, path) if path is not None else None


def _devices(config: PretrainConfig, cluster: ClusterSpec | None, found: Sequence[FoundDevice]) -> list[DeviceType]:
    """List the device types by rank, those of the described cluster where it is emulated."""
    if config.emulation is not None and cluster is not None:
        names = [cluster.node_type_of_rank(rank).device for rank in range(cluster.num_devices)]
        return [cluster.device_types.of(name) for name in names]
    known = cluster.device_types if cluster is not None else SHIPPED_DEVICES
    return [each.type_among(known) for each in found]


def _check_memory(plan: Plan, cluster: ClusterSpec, path: Path | None) -> None:
    """Raise unless the described devices have the memory for ``plan``; collective over the world.

    Emulated devices say themselves when and where they run out of it.

    Raises:
        PlanMemoryError: they have not; on every rank.
    """

    def said() -> str:
        try:
            check_memory(plan, cluster)
        except PlanMemoryError as error:
            return f"{error}; or leave --hetero-cluster out if the devices have more than {path} says"
        return ""

    if error := on_all_ranks(said):
        raise PlanMemoryError(error)


def _warn_of_little_memory(
    found: Sequence[FoundDevice], devices: Sequence[DeviceType], cluster: ClusterSpec | None
) -> None:
    """Say on rank 0 which devices have less memory than the cluster file or their data sheets say."""
    if dist.get_rank() != 0:
        return
    has_all = cluster is not None and cluster.num_devices == len(found)
    planned = [cluster.device_of_rank(rank) for rank in range(len(found))] if has_all and cluster else devices
    for line in short_of_memory(found, [device.memory_gib for device in planned]):
        sys.stderr.write(f"hetero: warning: {line}\n")


def _local_plan(config: PretrainConfig, model: ModelSpec, devices: Sequence[DeviceType]) -> Plan:
    if config.parallel.hetero_plan is not None:
        return load(Plan, config.parallel.hetero_plan)
    return _plan_of_flags(config, model, devices)


def _checked(plan: Plan, config: PretrainConfig, model: ModelSpec, cluster: ClusterSpec | None) -> Plan:
    parallel = config.parallel
    validate_launch(
        plan,
        world_size=dist.get_world_size(),
        model=model,
        seq_length=config.data.seq_length,
        global_batch_size=parallel.global_batch_size,
    )
    if (varying := parallel.varying_batch) is not None:
        sizes = BatchSizes(plan.global_batch_size, varying).smaller
        check_batch_sizes(plan, sizes, flag=f"{varying.flag} {varying}")
    if (size := config.run.eval_global_batch_size) is not None:
        check_batch_sizes(plan, [size], flag=f"--eval-global-batch-size {size}")
    if parallel.hetero_cluster is not None and cluster is not None:
        check_plan_on_cluster(plan, cluster)
    if parallel.precision is not None and plan.precision != parallel.precision:
        raise PlanError(
            f"plan: precision is {plan.precision}, but --{parallel.precision} is given; leave that out or make a plan "
            f"for {parallel.precision}"
        )
    _check_dropout(plan, config.stage)
    if not plan.distributed_optimizer:
        _check_no_flag_asks_for_a_distributed_optimizer(parallel)
    return plan


def _check_dropout(plan: Plan, options: StageOptions) -> None:
    """Refuse a plan that was made for another dropout than the flags give, which keeps more or less.

    Raises:
        PlanError: it was.
    """
    for name in ("hidden_dropout", "attention_dropout"):
        planned, given = getattr(plan, name), getattr(options, name)
        if planned is not None and planned != given:
            raise PlanError(
                f"plan: {name} is {planned:g}, but --{name.replace('_', '-')} is {given:g}; make them equal, or take "
                f"{name} out of the plan if its devices have memory to spare"
            )


def _check_no_flag_asks_for_a_distributed_optimizer(parallel: ParallelConfig) -> None:
    """Refuse flags that would share an optimizer of which the plan keeps a whole copy on every rank.

    Raises:
        PlanError: there is one.
    """
    for flag, given in (
        ("--use-distributed-optimizer", parallel.use_distributed_optimizer),
        ("--overlap-param-gather", parallel.overlap_param_gather),
    ):
        if given:
            raise PlanError(
                f"plan: distributed_optimizer is false, but {flag} is given; leave that out or make a plan with "
                "distributed_optimizer true"
            )


def _check_fp8_of_flags(config: PretrainConfig, model: ModelSpec, device: DeviceType) -> None:
    """Refuse fp8 that the devices or the model cannot have, with the flags that are refused without it as well.

    Raises:
        ConfigError: they cannot.
    """
    parallel, fp8_format = config.parallel, config.stage.fp8_format
    if fp8_format is None:
        return
    assert parallel.micro_batch_size is not None, "required without a plan"
    tp = parallel.tensor_model_parallel_size
    obstacle = fp8_obstacle(
        model,
        device,
        precision=parallel.precision or "fp32",
        tp=tp,
        num_tokens=parallel.micro_batch_size * config.data.seq_length // (tp if parallel.sequence_parallel else 1),
    )
    if obstacle is not None:
        raise ConfigError(
            f"--fp8-format {fp8_format}: {obstacle}; change that, or leave it out together with --fp8-recipe, "
            "--fp8-amax-history-len and --fp8-amax-compute-algo"
        )


def _plan_of_flags(config: PretrainConfig, model: ModelSpec, devices: Sequence[DeviceType]) -> Plan:
    parallel = config.parallel
    assert parallel.micro_batch_size is not None, "required without a plan"
    kind = devices[0]
    if len(names := sorted({device.name for device in devices})) > 1:
        raise PlanError(
            f"uniform plan: the ranks sit on {', '.join(names)}; unlike devices need a plan, give --hetero-plan"
        )
    _check_fp8_of_flags(config, model, kind)
    return uniform_plan(
        UniformLayout(
            model=model,
            world_size=len(devices),
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            micro_batch_size=parallel.micro_batch_size,
            global_batch_size=parallel.global_batch_size,
            seq_length=config.data.seq_length,
            device=kind.name,
            devices=() if kind.name in SHIPPED_DEVICES else (kind,),
            sequence_parallel=parallel.sequence_parallel,
            stages_per_rank=parallel.stages_per_rank,
            schedule=parallel.schedule,
            precision=parallel.precision or "fp32",
            distributed_optimizer=parallel.use_distributed_optimizer,
            optimizer_offload_fraction=parallel.optimizer_cpu_offload * parallel.optimizer_offload_fraction,
            activation_offload_num_layers=parallel.cpu_offloading_num_layers,
            hidden_dropout=config.stage.hidden_dropout,
            attention_dropout=config.stage.attention_dropout,
            recompute=parallel.recompute,
            recompute_num_layers=parallel.recompute_num_layers,
            fp8=config.stage.fp8_format is not None,
        )
    )
