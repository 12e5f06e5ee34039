"""Megatron-LM's flags that have no effect here and are accepted, each with the reason.

A flag stands here if leaving it out trains the same model on the same samples for as long, but for rounding: it asks
for what is always so, or it tunes or watches a mechanism that is another one here. The log lists those that were given.
What would train another model, or save, load or end otherwise, is refused (:mod:`.unsupported`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron.pretrain.cli import derived
from megatron.pretrain.cli.fields import Condition


@dataclass(frozen=True, kw_only=True, slots=True)
class WithoutEffect:
    """Describes a flag that is accepted and changes nothing.

    most_values: how many it takes: 0 for a switch, infinite for a list.
    needs: what makes it have no effect, where that is not always so.
    """

    reason: str
    most_values: float
    needs: Condition | None = None


_IS_ROPE = Condition(derived.is_rope, "--position-embedding-type rope")

_GROUPS: tuple[tuple[str, str], ...] = (
    # What is always so.
    ("models are always megatron-core's", "--use-mcore-models"),
    (
        "with --bf16 or --fp16, gradients are summed and weights updated in fp32, always",
        "--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation",
    ),
    (
        "attention adds up its softmax in fp32 and the loss is computed in fp32, always",
        "--attention-softmax-in-fp32 --apply-query-key-layer-scaling --fp16-lm-cross-entropy",
    ),
    ("the loss is a mean over the tokens that count, always", "--calculate-per-token-loss"),
    ("documents are packed and attention is causal, which needs no mask", "--no-create-attention-mask-in-dataloader"),
    ("SIGTERM saves and leaves, always", "--exit-signal-handler"),
    (
        "learning rate and weight decay follow the command line, also where the checkpoint had others",
        "--override-opt_param-scheduler --override-opt-param-scheduler",
    ),
    (
        "the scale of a norm is kept as it is and not as its distance from one: gradients, updates and what is "
        "computed are the same but for rounding",
        "--apply-layernorm-1p",
    ),
    ("initial weights depend on --seed and their names alone", "--use-cpu-initialization"),
    # Memory and speed of mechanisms that are others here.
    (
        "garbage collection and allocator are left to Python and torch",
        """
        --manual-gc --manual-gc-interval=N --no-manual-gc-eval --disable-manual-gc-eval --empty-unused-memory-level=N
        """,
    ),
    (
        "hosts update by torch's fused AdamW, and copies to and from them overlap with computes, always",
        "--use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d",
    ),
    ("paths are those of mounted file systems; a URL is refused", "--enable-msc --disable-msc"),
    (
        "token files are read range by range and the index is built by one process",
        """
        --no-mmap-bin-files --mmap-warmup --num-dataset-builder-threads=N --per-dataset-sequences-path=PATH
        --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap
        """,
    ),
    (
        "weights stay in bf16 under --fp8-format and are cast where they multiply",
        "--fp8-param-gather --keep-fp8-transpose-cache --fp8-interval=N",
    ),
    (
        "the schedule decides when stages exchange tensors",
        """
        --overlap-p2p-communication --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush
        --use-ring-exchange-p2p --no-scatter-gather-tensors-in-pipeline --defer-embedding-wgrad-compute
        --wgrad-deferral-limit=N
        """,
    ),
    (
        "a bucket is reduced as soon as its last gradient is there; --ddp-bucket-size sets the size",
        """
        --ddp-num-buckets=N --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective --no-align-grad-reduce
        --disable-align-grad-reduce --delay-grad-reduce --no-delay-grad-reduce --no-gradient-reduce-div-fusion
        --no-contiguous-buffers-in-local-ddp --DDP-impl=NAME
        """,
    ),
    (
        "--use-distributed-optimizer shares fp32 state among all holders and gathers weights where they are needed",
        """
        --num-distributed-optimizer-instances=N --overlap-param-gather-with-optimizer-step --no-align-param-gather
        --no-use-layer-wise-param-layout
        """,
    ),
    (
        "tensor-parallel communication does not overlap with matrix products",
        """
        --tp-comm-overlap --tp-comm-overlap-cfg=PATH --tp-comm-overlap-rs-dgrad --tp-comm-bootstrap-backend=NAME
        --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad
        --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs
        --no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs --disable-tp-comm-split-rs
        --no-async-tensor-model-parallel-allreduce --symmetric-ar-type=NAME
        """,
    ),
    (
        "process groups follow from the plan and their settings from NCCL's own environment variables",
        """
        --use-nccl-ub --disable-symmetric-registration --use-sharp --sharp-enabled-group=NAME
        --nccl-communicator-config-path=PATH --high-priority-stream-groups=NAME... --disable-gloo-process-groups
        --flight-recorder-dump-path=PATH --flight-recorder-trace-buffer-size=N --no-flight-recorder-dump-on-timeout
        --disable-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
        --no-flight-recorder-include-only-active --disable-flight-recorder-include-only-active
        --no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-extra-dump-on-exec
        """,
    ),
    (
        "every rank of a stage holds all its experts, and tokens stay where they are",
        """
        --moe-token-dispatcher-type=NAME --moe-enable-deepep --moe-flex-dispatcher-backend=NAME --moe-deepep-num-sms=N
        --moe-hybridep-num-sms=N --overlap-moe-expert-parallel-comm --delay-wgrad-compute
        --ep-overlap-early-attn-memory-release --moe-flex-dispatcher-num-sms=N --moe-hybridep-num-sms-preprocessing=N
        --moe-hybridep-num-blocks-permute=N --moe-hybridep-num-blocks-unpermute=N --moe-permute-fusion-into-hybridep
        --moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-static-shape --moe-ncclep-zero-copy
        --high-priority-a2a-comm-stream --overlap-dispatch-backward-with-experts-wgrad
        """,
    ),
    ("--context-parallel-size is 1, the only value supported", "--cp-comm-type=NAME..."),
    (
        "--transformer-impl chooses the layers, and they choose the kernels that the device can run",
        """
        --use-flash-attn --persist-layer-norm --fused-residual-rmsnorm --moe-grouped-gemm --moe-use-legacy-grouped-gemm
        --moe-permute-fusion --moe-router-fusion --disable-jit-fuser --no-clone-scatter-output-in-embedding
        --disable-clone-scatter-output-in-embedding --moe-single-grouped-weight --moe-single-grouped-bias
        --use-transformer-engine-op-fuser --use-grouped-gemm-for-dense-mlp --use-grouped-gemm-for-shared-expert
        """,
    ),
    (
        "kernels are launched one by one, without CUDA graphs",
        """
        --enable-cuda-graph --external-cuda-graph --cuda-graph-impl=NAME --cuda-graph-scope=NAME...
        --cuda-graph-warmup-steps=N --te-rng-tracker --cuda-graph-modules=NAME...
        """,
    ),
    (
        "an evaluation computes in the microbatches of the plan, on which its loss does not depend",
        "--eval-micro-batch-size=N",
    ),
    # Checkpoints.
    (
        "a checkpoint has the checksum of every part, and no part is loaded before it is verified, always",
        "--verify-integrity",
    ),
    (
        "checkpoints have one format, which any plan loads; tools/convert_checkpoint.py reads others",
        """
        --ckpt-format=NAME --auto-detect-ckpt-format --use-dist-ckpt --dist-ckpt-format=NAME --dist-ckpt-workers=N
        --dist-ckpt-strictness=NAME --dist-ckpt-save-pre-mcore-014 --dist-ckpt-optim-fully-reshardable
        --distrib-optim-fully-reshardable-mem-efficient --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save
        --ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo=NAME
        --ckpt-fully-parallel-save-process-group=NAME --ckpt-fully-parallel-load-process-group=NAME
        --ckpt-assume-constant-structure --async-strategy=NAME --async-ckpt-cpu-priority=N --async-ckpt-io-priority=N
        --use-persistent-ckpt-worker --async-ckpt-use-cpu-shm --disable-ckpt-load-validate-sharding-integrity
        --no-ckpt-load-validate-sharding-integrity --disable-stream-ckpt-dequant --no-stream-ckpt-dequant
        """,
    ),
    (
        "dropout's generators go on where the checkpoint was saved under the same plan, and start again under another",
        "--no-load-rng",
    ),
    # Tokenizers that are not there.
    (
        "no tokenizer here reads it",
        """
        --tiktoken-pattern=NAME --tiktoken-num-special-tokens=N --tiktoken-special-tokens=TOKEN... --legacy-tokenizer
        --tokenizer-hf-use-fast --trust-remote-code
        """,
    ),
    ("pretraining formats no conversations", "--chat-template=TEXT"),
    (
        "data is tokenized by tools/preprocess_data.py, which takes it",
        "--tokenizer-hf-include-special-tokens --tokenizer-hf-no-include-special-tokens",
    ),
    # Watching the run.
    (
        "--log-throughput and --log-memory-interval are what adds to the log lines",
        """
        --log-params-norm --log-num-zeros-in-grad --log-progress --log-energy --log-device-memory-used --logging-level=N
        --moe-per-layer-logging
        """,
    ),
    (
        "where the seconds of a step go is measured by --hetero-stage-times-interval",
        "--timing-log-level=N --timing-log-option=NAME --no-barrier-with-level-1-timing",
    ),
    ("TensorBoard and its likes get the learning rate, always", "--log-learning-rate-to-tensorboard"),
    (
        "figures go to TensorBoard, Weights & Biases and Prometheus alone",
        """
        --enable-one-logger --no-one-logger --one-logger-project=NAME --one-logger-run-name=NAME --one-logger-async
        --app-tag-run-name=NAME --app-tag-run-version=NAME
        """,
    ),
    (
        "--profile writes traces of steps, nothing else",
        """
        --pytorch-profiler-collect-chakra --record-memory-history --memory-snapshot-path=PATH
        --run-workload-inspector-server --record-shapes
        """,
    ),
    (
        "slow stages are named by --hetero-stage-times-interval",
        """
        --log-straggler --disable-straggler-on-startup --straggler-ctrlr-port=N --straggler-minmax-count=N
        --gpu-sniff-test-interval=N
        """,
    ),
)
"""Reasons, and the flags of each: with "=" one that takes a value, with "..." behind it one that takes several."""


def without_effect(groups: Iterable[tuple[str, str]]) -> dict[str, WithoutEffect]:
    """Describe the flags of ``groups``: reasons, and the words of the flags of each as above."""
    flags = {}
    for reason, words in groups:
        for word in words.split():
            name, equals, value = word.partition("=")
            most = float("inf") if value.endswith("...") else 1 if equals else 0
            flags[name] = WithoutEffect(reason=reason, most_values=most)
    return flags


WITHOUT_EFFECT: Mapping[str, WithoutEffect] = MappingProxyType(
    without_effect(_GROUPS)
    | {
        "--no-position-embedding": WithoutEffect(
            reason="with --position-embedding-type rope there is no learned vector per position",
            most_values=0,
            needs=_IS_ROPE,
        )
    }
)
"""Flags that are accepted and have no effect."""
