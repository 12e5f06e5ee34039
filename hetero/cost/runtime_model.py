"""How a runtime executes a plan, as far as time and memory show it.

The same plan takes another time under another runtime. What differs is written down here, so that the model can be
held against measurements of somebody else's runtime (:mod:`hetero.cost.other_runtimes`) and still predict ours.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from hetero.plan.ir import Plan, Replica
from hetero.plan.lowering import step_rows
from hetero.schedule.actions import Schedule
from hetero.serialization import STRICT
from hetero.spec.devices import DeviceType
from hetero.spec.profile import LayerImplementation
from hetero.units import GIB, MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeModel:
    """Properties of a runtime.

    rows: the computes and transfers of a replica as this runtime orders them, one row per device group; it raises a
        PlanError for what the runtime cannot do.
    blocking_transfers: a transfer occupies the compute stream of sender and receiver, which wait for one another;
        otherwise transfers run beside the compute, and only the compute that needs one waits for it.
    batches_transfers: of transfers that block, all between two computes run at once (torch's ``batch_isend_irecv``);
        otherwise one after the other.
    partitions_transfers: between stages with as many tensor-parallel ranks, each of them sends its share of a boundary
        that they all hold, and the receivers gather it inside their node (arXiv 2104.04473, section 4.1).
    transfer_host_s: seconds around each transfer in which the host waits for the device, whose queue runs empty.
    overlaps_gradient_sync: a gradient is reduced as soon as the last backward has produced it.
    overlaps_param_gather: under a distributed optimizer, updated weights arrive beside the first forwards, each in time
        for its layer; otherwise all of them before the first forward.
    waits_for_all_before_update: all ranks agree on the gradient's norm before any of them updates a weight.
    bucket_numel: gradient elements that one collective reduces, about.
    copies_gradients_to_sync: a reduction works on a copy of the gradients.
    half_gradients: gradients of half-precision weights are held and summed in half precision; otherwise in fp32.
    implementation: of megatron-core's layers as this runtime puts them together; ``None`` if it runs the layers that
        were profiled, whatever they are: they save what those saved, and a head that stopped before the projection
        stops there.
    loss_copies: fp32 copies of the logits that the loss makes for a moment, beside the softmax that it keeps.
    holds_collective_tensors: what a tensor-parallel collective has worked on is free again only when the device has
        come to its end, and the host is a pass over the stage's layers ahead of the device. So does torch before 2.8.
    context_gib: what a process occupies on a device before it allocates a tensor: CUDA context, kernels, libraries;
        ``default_context_gib`` on devices that are not listed.
    loads_all_kernels_for_experts: a model with experts has CUDA load all kernels at the start
        (``CUDA_MODULE_LOADING=EAGER``), which the context does not contain.
    communicator_bytes: buffers of one communicator.
    allocator_slack: share of activations and temporaries that the caching allocator reserves beyond them.
    """

    name: str
    rows: Callable[[Replica], Schedule]
    blocking_transfers: bool
    batches_transfers: bool
    partitions_transfers: bool
    transfer_host_s: float
    overlaps_gradient_sync: bool
    overlaps_param_gather: bool
    waits_for_all_before_update: bool
    bucket_numel: int
    copies_gradients_to_sync: bool
    half_gradients: bool
    implementation: LayerImplementation | None
    loss_copies: int
    holds_collective_tensors: bool
    context_gib: tuple[tuple[str, float], ...]
    default_context_gib: float
    loads_all_kernels_for_experts: bool
    communicator_bytes: int
    allocator_slack: float

    def with_dropout(self, *, hidden: float, attention: float) -> "RuntimeModel":
        """The same with these shares of hidden states and of attention dropped; any of either counts as both.

        Profiled layers drop what they dropped.
        """
        if self.implementation is None:
            return self
        implementation = dataclasses.replace(self.implementation, dropout=max(hidden, attention) > 0)
        return dataclasses.replace(self, implementation=implementation)

    def with_dropout_of(self, plan: Plan) -> "RuntimeModel":
        """The same with what a launch of ``plan`` drops."""
        hidden, attention = plan.counted_dropouts
        return self.with_dropout(hidden=hidden, attention=attention)

    @property
    def runs_profiled_layers(self) -> bool:
        """The layers are those that were profiled, not megatron-core's."""
        return self.implementation is None

    @property
    def drops(self) -> bool:
        """Masks of dropout are kept."""
        return self.implementation is not None and self.implementation.dropout

    def context_bytes(self, device: DeviceType, *, has_experts: bool) -> int:
        """Bytes that a process occupies on ``device`` before it allocates a tensor."""
        context = int(dict(self.context_gib).get(device.name, self.default_context_gib) * GIB)
        if self.loads_all_kernels_for_experts and has_experts:
            context += all_kernels_bytes(device)
        return context

    def sync_buffer_bytes(self, gradients: int, element_bytes: int) -> int:
        """Bytes that summing ``gradients`` bytes of gradients takes beside them: one bucket, where it is a copy."""
        return min(gradients, self.bucket_numel * element_bytes) if self.copies_gradients_to_sync else 0


ALLOCATOR_SLACK = 0.03
"""Calibrated on Sailor's 15 runs on GH200, which DeepSpeed executed (docs/cost_model.md, "What was calibrated"). That
our own runtime has as much is assumed: a heuristic."""

CONTEXT_GIB = (("GH200", 3.9), ("RTX-2080Ti", 0.3), ("Titan-RTX", 0.3))
"""Calibrated on the same runs, and on Sailor's five on Titan RTX and RTX 2080 Ti; of a GH200 nvidia-smi counts more
than the process."""

DEFAULT_CONTEXT_GIB = 1.0
"""A heuristic for all other devices, about what a process of torch with CUDA and NCCL takes; not measured here."""

KERNELS_MIB: Mapping[int, int] = {7: 1310, 8: 1430, 9: 2180, 10: 2560}
"""MiB of all kernels that ``CUDA_MODULE_LOADING=EAGER`` loads at the start, by the major number of the capability.

Counted: sections of machine code and constants of the device code for 7.5, 8.0, 9.0 and 10.0 in the libraries of torch
2.11.0+cu130, which are those that libtorch_cuda.so links (for 9.0: torch's own 639, cuBLAS 424, cuSPARSELt 341, NCCL
193, cuSPARSE 105, NVSHMEM 101, others 16) and cuDNN's (357). Not measured on a device, without
TransformerEngine's."""


def all_kernels_bytes(device: DeviceType) -> int:
    """Bytes that all kernels of torch and its libraries take on ``device``; 0 where there is no CUDA."""
    if device.compute_capability is None:
        return 0
    major = device.compute_capability[0]
    return KERNELS_MIB.get(major, KERNELS_MIB[max(KERNELS_MIB)]) * MIB


COMMUNICATOR_BYTES = 64 * MIB
"""A heuristic: NCCL's buffers grow with its channels and peers (NCCL_BUFFSIZE, 4 MiB each); not measured here."""

BUCKET_NUMEL = 40_000_000
"""Megatron-LM's least bucket (``max(40000000, 1000000 * dp)``), whatever the number of ranks."""

HETERO_LAYERS = LayerImplementation(attention="flash", overlaps_collectives=True, gradient_sums="fused")
"""TransformerEngine's layers, or megatron-core's own with torch's scaled dot product attention and its products with an
fp32 sum (:mod:`hetero.runtime.main_grad`)."""

HETERO = RuntimeModel(
    name="megatron-hetero",
    rows=step_rows,
    blocking_transfers=False,
    batches_transfers=False,
    partitions_transfers=False,
    transfer_host_s=0.0,
    overlaps_gradient_sync=True,
    overlaps_param_gather=False,
    waits_for_all_before_update=True,
    bucket_numel=BUCKET_NUMEL,
    copies_gradients_to_sync=False,
    half_gradients=False,
    implementation=HETERO_LAYERS,
    loss_copies=0,
    holds_collective_tensors=False,
    context_gib=CONTEXT_GIB,
    default_context_gib=DEFAULT_CONTEXT_GIB,
    loads_all_kernels_for_experts=True,
    communicator_bytes=COMMUNICATOR_BYTES,
    allocator_slack=ALLOCATOR_SLACK,
)
"""Our own runtime: asynchronous transfers, gradients reduced beside the last backward, attention without scores: it is
TransformerEngine's or torch's (:mod:`hetero.runtime.attention`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedRuntime:
    """What the flags of a launch choose of :data:`HETERO`; data, which may be written and read elsewhere.

    bucket_numel, overlaps_gradient_sync, overlaps_param_gather: as of :class:`RuntimeModel`.
    fuses_attention: attention keeps no scores.
    fuses_gradient_sums: the products that make weight gradients add them to their sums.
    hidden_dropout, attention_dropout: shares that are dropped.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    bucket_numel: int = BUCKET_NUMEL
    overlaps_gradient_sync: bool = True
    overlaps_param_gather: bool = False
    fuses_attention: bool = True
    fuses_gradient_sums: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    def model(self) -> RuntimeModel:
        """The runtime as the cost model knows it."""
        implementation = HETERO_LAYERS
        if not self.fuses_attention:
            implementation = dataclasses.replace(implementation, attention="fused-softmax")
        if not self.fuses_gradient_sums:
            implementation = dataclasses.replace(implementation, gradient_sums="separate")
        runtime = dataclasses.replace(
            HETERO,
            bucket_numel=self.bucket_numel,
            overlaps_gradient_sync=self.overlaps_gradient_sync,
            overlaps_param_gather=self.overlaps_param_gather,
            implementation=implementation,
        )
        return runtime.with_dropout(hidden=self.hidden_dropout, attention=self.attention_dropout)
