"""Trains a uniform plan with megatron-core's own groups, schedule, gradient sync and optimizer, unmodified.

Only the model's description, the initial weights and the data are this project's. It is what a plan's execution
here is compared with: the same numbers, and not slower.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from hetero.plan.ir import Plan, Stage
from hetero.runtime.attention import ScaledDotProductAttention
from hetero.runtime.initial_weights import draw_weights
from hetero.runtime.layer_spec import Norm
from hetero.runtime.main_grad import let_transformer_engine_accumulate
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.named_parameters import canonical_parameters
from hetero.runtime.optimizer import AdamOptions
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import Parameter

_CPU = torch.device("cpu")


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """What the schedule and the optimizer need on a machine without CUDA, beside ``hetero.runtime.cpu_backend``.

    * ``torch.zeros`` and ``torch.tensor`` with ``device="cuda"``: pipeline_parallel/schedules.py:596,2138,
      optimizer/clip_grads.py:103,115, optimizer/optimizer.py:907
    * ``Tensor.cuda``: models/common/language_module/language_module.py:244, for tied embeddings
    * ``torch.cuda.synchronize``: pipeline_parallel/p2p_communication.py:398
    * ``torch.cuda.current_stream``: distributed/param_and_grad_buffer.py:632 of megatron-core 0.19
    * ``Tensor.type() == "torch.cuda.FloatTensor"``: optimizer/clip_grads.py:167
    """
    if torch.cuda.is_available():
        yield
        return
    type_ = torch.Tensor.type

    def type_on_cuda(self: torch.Tensor, *args: Any) -> Any:
        return type_(self, *args) if args else type_(self).replace("torch.", "torch.cuda.")

    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (torch, "zeros", _on_cpu(torch.zeros)),
            (torch, "tensor", _on_cpu(torch.tensor)),
            (torch.Tensor, "cuda", lambda self: self),
            (torch.Tensor, "type", type_on_cuda),
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "current_stream", lambda: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return build


@dataclass(frozen=True, kw_only=True)
class StockOptions:
    """Megatron-LM's flags of the same names.

    calculate_per_token_loss: every token of the global batch weighs the same, as it always does here.
    fused_adam: Adam in one kernel, which Apex and TransformerEngine bring on a GPU; torch's own stands for it.
    transformer_engine: its layers instead of the local ones.
    torch_attention: the core attention of our local layers instead of stock's, no flag of Megatron-LM.
    """

    calculate_per_token_loss: bool = True
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    fused_adam: bool = False
    transformer_engine: bool = False
    torch_attention: bool = False


class StockTrainer:
    """One rank of a uniform plan in fp32 or bf16 under stock megatron-core. To be used inside of :func:`stand_ins`.

    Attributes:
        module: the first of its model chunks, of which a rank has one per stage.
    """

    def __init__(self, plan: Plan, rank: int, *, adam: AdamOptions, seed: int, std: float, options: StockOptions):
        places = plan.placements(rank)
        replica = plan.replicas[places[0].replica]
        self._plan = plan
        self._stage = replica.stages[places[0].stage]
        self._num_microbatches = replica.num_microbatches(places[0].stage)
        pp = len(replica.device_groups)
        self._groups = _create_groups(tp=self._stage.tp, pp=pp, chunks=len(places), seed=seed)
        assert dist.get_process_group_ranks(self._groups.tp) == list(self._stage.ranks), "ranks as Megatron orders them"

        config = _transformer_config(plan, self._stage, pp=pp, chunks=len(places), options=options)
        self.parameters: dict[str, tuple[Parameter, torch.nn.Parameter]] = {}
        self._device = torch.device(torch.cuda.current_device())
        modules = []
        for chunk, place in enumerate(places):
            made = _model(plan, config, self._groups, options, chunk=chunk, chunks=len(places))
            if options.transformer_engine:
                # They need no apex for it.
                let_transformer_engine_accumulate(made)
            # Position embeddings are made on the CPU, whatever the others are.
            modules.append(made.to(self._device))
            drawn = canonical_parameters(modules[-1], model=plan.model, stage=replica.stages[place.stage])
            draw_weights(drawn, model=plan.model, tp=self._stage.tp, tp_rank=place.tp_rank, seed=seed, std=std)
            self.parameters |= drawn
        self.module = modules[0]
        wrapped = [Float16Module(config, module) for module in modules] if config.bf16 else modules
        self._chunks = [_data_parallel(config, module, self._groups, options) for module in wrapped]
        config.finalize_model_grads_func = finalize_model_grads
        if options.overlap_grad_reduce:
            config.no_sync_func = _per_chunk([chunk.no_sync for chunk in self._chunks])
            config.grad_sync_func = _per_chunk([chunk.start_grad_sync for chunk in self._chunks])
        self._forward_backward = self._schedule(config)
        if options.overlap_param_gather:
            config.param_sync_func = _per_chunk([chunk.start_param_sync for chunk in self._chunks])
        self._optimizer = _optimizer(self._chunks, self._groups, adam, options, bf16=config.bf16)
        mask = torch.ones(1, 1, plan.seq_length, plan.seq_length, dtype=torch.bool, device=self._device).triu(1)
        # TransformerEngine's attention is causal by itself.
        self._mask = None if options.transformer_engine or options.torch_attention else mask

    def step(self, microbatches: Sequence[Microbatch]) -> tuple[float, float]:
        """One step of Megatron-LM's ``train_step``: the mean token loss of the global batch, and the gradient norm."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        reports = self._forward_backward(
            forward_step_func=self._forward,
            data_iterator=_per_chunk([iter(microbatches) for _ in self._chunks]),
            model=_per_chunk(self._chunks),
            num_microbatches=self._num_microbatches,
            seq_length=self._plan.seq_length,
            micro_batch_size=self._stage.micro_batch_size,
            pg_collection=self._groups,
        )
        _, grad_norm, _ = self._optimizer.step()
        return self._mean_loss(reports), float(grad_norm)

    def _forward(
        self, batches: Iterator[Microbatch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(batches)
        output = model(batch.tokens_BS, batch.position_ids_BS, self._mask, labels=batch.labels_BS)

        def loss_function(losses_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            loss = (losses_BS * batch.loss_mask_BS).sum()
            num_tokens = batch.loss_mask_BS.sum()
            return loss, num_tokens.int(), torch.stack([loss.detach(), num_tokens])

        return output, loss_function

    def _mean_loss(self, reports: Sequence[torch.Tensor]) -> float:
        """Sum over the replicas, then from the last stage to the others. Stock prints it on the last rank only."""
        totals = torch.stack(list(reports)).sum(0) if reports else torch.zeros(2, device=self._device)
        dist.all_reduce(totals, group=self._groups.dp)
        dist.broadcast(totals, group=self._groups.pp, group_src=self._groups.pp.size() - 1)
        return (totals[0] / totals[1]).item()

    def _schedule(self, config: TransformerConfig) -> Callable[..., Any]:
        chosen: Callable[..., Any] = forward_backward_no_pipelining
        if self._groups.pp.size() > 1:
            interleaves = len(self._chunks) > 1
            chosen = functools.partial(
                forward_backward_pipelining_with_interleaving
                if interleaves
                else forward_backward_pipelining_without_interleaving,
                p2p_communicator=P2PCommunicator(self._groups.pp, config),
            )
        return chosen


class AttentionWithScores(DotProductAttention):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's own attention of local layers, which wants to be told that it is causal."""

    def forward(
        self, query_SBND: torch.Tensor, key_SBGD: torch.Tensor, value_SBGD: torch.Tensor, _: None, **options: object
    ) -> torch.Tensor:
        """Attention of every token to itself and those before it -> [S, B, N D]."""
        mask = _causal_mask(query_SBND.shape[0], query_SBND.device)
        context: torch.Tensor = super().forward(query_SBND, key_SBGD, value_SBGD, mask, **options)
        return context


@functools.lru_cache
def _causal_mask(seq_length: int, device: torch.device) -> torch.Tensor:
    """True where a token is not seen -> [1, 1, S, S]."""
    return torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool, device=device).triu(1)


def _per_chunk(values: list[Any]) -> Any:
    """As the schedules want it: a list where there are several model chunks."""
    return values if len(values) > 1 else values[0]


def _create_groups(*, tp: int, pp: int, chunks: int, seed: int) -> ProcessGroupCollection:
    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(
        tp, pp, virtual_pipeline_model_parallel_size=virtual, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


def _transformer_config(plan: Plan, stage: Stage, *, pp: int, chunks: int, options: StockOptions) -> TransformerConfig:
    model, dtype = plan.model, torch.bfloat16 if plan.precision == "bf16" else torch.float32
    # Kernels that exist on CUDA only, as Megatron-LM has them by default where they can be had.
    on_cuda = torch.cuda.is_available()
    fuses_activation = on_cuda and (model.linear_bias or model.is_gated)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.is_gated,
        activation_func=_activation(model, fused=fuses_activation),
        add_bias_linear=model.linear_bias,
        add_qkv_bias=model.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=stage.tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        # As Megatron-LM has it with interleaving, which needs it where two ranks are each other's both neighbours.
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        sequence_parallel=stage.splits_sequence,
        calculate_per_token_loss=options.calculate_per_token_loss,
        # A send of gloo reads the tensor that would be emptied under it.
        deallocate_pipeline_outputs=chunks == 1,
        # The head asks for apex's extension, whosever the layers are.
        gradient_accumulation_fusion=on_cuda and _has_fused_weight_gradient(),
        bias_activation_fusion=fuses_activation,
        bias_dropout_fusion=on_cuda,
        # An extension of apex that nobody builds any more.
        masked_softmax_fusion=False,
        persist_layer_norm=on_cuda and model.normalization == "LayerNorm",
        apply_rope_fusion=False,
    )


def _has_fused_weight_gradient() -> bool:
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def _activation(model: ModelSpec, *, fused: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """megatron-core's fused kernel computes the tanh form for ``F.gelu``."""
    if model.is_gated:
        return torch.nn.functional.silu
    return torch.nn.functional.gelu if fused else functools.partial(torch.nn.functional.gelu, approximate="tanh")


def _model(
    plan: Plan,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    options: StockOptions,
    *,
    chunk: int,
    chunks: int,
) -> GPTModel:
    model, scaling = plan.model, plan.model.rotary_scaling
    if options.transformer_engine:
        layer, norm = get_gpt_layer_with_transformer_engine_spec(), LayerNormImpl
    else:
        layer, norm = get_gpt_layer_local_spec(normalization=model.normalization), Norm
        # The local spec's norms refuse sequence parallelism; TransformerEngine's, which do not, mark their parameters.
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if options.torch_attention:
        layer.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
    module = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * (model.num_layers // (groups.pp.size() * chunks)), layer_norm=norm
        ),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=groups.pp.rank() == 0 and chunk == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1 and chunk == chunks - 1,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type=model.position_embedding,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        seq_len_interpolation_factor=scaling.factor if scaling is not None and scaling.kind == "linear" else None,
        rope_scaling=scaling is not None and scaling.kind == "llama3",
        rope_scaling_factor=scaling.factor if scaling is not None else 1.0,
        pg_collection=groups,
        vp_stage=chunk if chunks > 1 else None,
    )
    for name, parameter in module.named_parameters():
        if "layernorm" in name and not options.transformer_engine:
            parameter.sequence_parallel = config.sequence_parallel
    return module


def _data_parallel(
    config: TransformerConfig, module: GPTModel, groups: ProcessGroupCollection, options: StockOptions
) -> DistributedDataParallel:
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=options.overlap_grad_reduce,
            bucket_size=options.bucket_size,
            use_distributed_optimizer=options.use_distributed_optimizer,
            overlap_param_gather=options.overlap_param_gather,
        ),
        module,
        pg_collection=groups,
    )


def _optimizer(
    chunks: list[DistributedDataParallel],
    groups: ProcessGroupCollection,
    adam: AdamOptions,
    options: StockOptions,
    *,
    bf16: bool,
) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        lr=adam.lr,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.betas[0],
        adam_beta2=adam.betas[1],
        adam_eps=adam.eps,
        clip_grad=adam.clip_grad,
        use_distributed_optimizer=options.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(
        config,
        chunks,
        config_overrides=get_standard_config_overrides(config),
        use_gloo_process_groups=False,
        pg_collection=groups,
    )
    if options.fused_adam:
        for group in optimizer.param_groups:
            group["fused"] = True
    # The scheduler gives each parameter group its share of the weight decay; nothing else does.
    OptimizerParamScheduler(
        optimizer,
        init_lr=adam.lr,
        max_lr=adam.lr,
        min_lr=adam.lr,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=adam.weight_decay,
        end_wd=adam.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer
