"""Megatron-LM's flags that this program knows and refuses, each with what to do instead.

Ignoring one of them would train another model than the user asked for, on other data or for another time, or save or
load something else; what may be ignored is in :mod:`.without_effect`. A flag whose value asks for nothing, such as
``--mtp-num-layers 0``, is let pass as well. The names are those of Megatron-LM from
megatron-core 0.11 to 0.19, older ones only where scripts in the wild still use them.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from megatron.pretrain.cli.unsupported_elsewhere import FLAGSCALE, OTHER_WORK, TORCHRUN

_OF_PRETRAINING: tuple[tuple[str, str], ...] = (
    # Checkpoints, evaluation, length of the run.
    (
        "checkpoints have one format here, which any plan loads: leave it out and use --save, --save-interval, "
        "--hetero-keep-last, --async-save, --load, --ckpt-step or --finetune; tools/convert_checkpoint.py reads others",
        """
        --persistent-save-interval --save-retain-interval --save-wgrads-interval --save-dgrads-interval --no-save-optim
        --no-save-rng --load-main-params-from-ckpt --pretrained-checkpoint --no-initialization
        --exit-on-missing-checkpoint --use-checkpoint-args --use-mp-args-from-checkpoint-args
        --no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args
        --non-persistent-save-interval --non-persistent-ckpt-type --non-persistent-global-ckpt-dir
        --non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo --ckpt-convert-format --ckpt-convert-save
        --ckpt-convert-update-legacy-dist-opt-format --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
        --replication --replication-jump --replication-factor --save-activations-interval --save-params-interval
        --save-tokens-per-expert-interval
        """,
    ),
    (
        "learning rate and weight decay follow this command line, not the checkpoint: leave it out and give the flags "
        "that the run was saved with; a note names those that differ",
        "--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler",
    ),
    (
        "leave it out: a run goes on with all of its state; weights alone are loaded by --finetune",
        "--no-load-optim",
    ),
    (
        "leave it out: evaluation is --eval-interval and --eval-iters, on the validation share of the data",
        """
        --full-validation --multiple-validation-sets --skip-train --test-mode --validation-set-names
        """,
    ),
    (
        "leave it out: SIGTERM saves and leaves, as do SIGINT, SIGHUP, SIGUSR1 and SIGUSR2, and --exit-interval or "
        "--exit-duration-in-mins on their own",
        """
        --exit-signal --exit-signal-handler-for-dataloader --exit-signal-handler-for-training
        --phase-transition-iterations
        """,
    ),
    (
        "a global batch that the replicas cannot share is refused: leave it out, the message says which sizes they can",
        "--decrease-batch-size-if-needed",
    ),
    ("use --micro-batch-size and --global-batch-size", "--batch-size"),
    ("every step counts: leave it out", "--iterations-to-skip --train-sync-interval"),
    # Precision.
    (
        "leave it out: with --bf16 or --fp16, gradients are summed and weights updated in fp32, and the softmax of the "
        "loss is in fp32, always",
        """
        --fp32-residual-connection --disable-bf16-reduced-precision-matmul
        --ddp-param-name-patterns-for-fp32-local-accumulation
        """,
    ),
    (
        "leave it out: weights stay in bf16 under --fp8-format and --fp8-recipe, a plan (--hetero-plan) says which "
        "stages are in fp8, and there is no fp4",
        """
        --fp8-quantizer-factory --fp8-margin --no-fp8-wgrad --disable-fp8-wgrad --fp8-e4m3 --fp8-hybrid
        --first-last-layers-bf16 --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16 --fp4-format --fp4-recipe
        --fp4-param-gather --fp4-quantizer-factory --te-precision-config-file --reuse-grad-buf-for-mxfp8-param-ag
        --moe-router-padding-for-fp8 --moe-router-padding-for-quantization --kitchen-config-file --kitchen-recipe-number
        --use-kitchen-attention --kitchen-attention-backend --fp8-output-proj
        """,
    ),
    # Who holds which part of the model.
    (
        "write the layers of each stage into a plan and pass it with --hetero-plan",
        """
        --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --standalone-embedding-stage
        --pipeline-model-parallel-split-rank --encoder-tensor-model-parallel-size
        --encoder-pipeline-model-parallel-size
        """,
    ),
    (
        "interleaved stages take turns after as many microbatches as there are pipeline ranks: leave it out",
        "--microbatch-group-size-per-virtual-pipeline-stage",
    ),
    ("use --num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size"),
    ("use --tensor-model-parallel-size", "--model-parallel-size"),
    (
        "context parallelism is not there yet: leave it out and split the model with --tensor-model-parallel-size "
        "and --sequence-parallel",
        "--hierarchical-context-parallel-sizes --hybrid-context-parallel --max-seqlen-per-dp-cp-rank",
    ),
    (
        "expert parallelism is not there yet, every rank of a stage holds all its experts: leave it out",
        "--expert-tensor-parallel-size --expert-tensor-parallel-size-per-process-mesh --moe-extended-tp",
    ),
    (
        "leave it out: --use-distributed-optimizer shares fp32 state among all holders, and optimizer_share of the "
        "stages in a plan says who takes more",
        "--use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
    ),
    (
        "fully sharded data parallelism is not supported: leave it out and split the model with "
        "--tensor-model-parallel-size and --pipeline-model-parallel-size, or unevenly with --hetero-plan",
        """
        --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward --use-megatron-fsdp --data-parallel-sharding-strategy
        --outer-dp-sharding-strategy --fsdp-double-buffer --fsdp-manual-registration --create-all-gather-group
        --suggested-communication-unit-size --enable-full-sharding-in-hsdp --init-model-with-meta-device
        --megatron-fsdp-main-params-dtype --megatron-fsdp-main-grads-dtype --megatron-fsdp-grad-comm-dtype
        --fsdp-db-use-persist-buf-on-alloc-fail --megatron-fsdp-enable-fine-grained-param-gather
        --megatron-fsdp-max-pool-double-buffer --tensor-parallel-num-weight-shards
        --expert-tensor-parallel-num-weight-shards
        """,
    ),
    (
        "hosts hold whole blocks, in pinned memory: leave it out and save memory with --optimizer-cpu-offload, "
        "--cpu-offloading-num-layers or offload in a plan (--hetero-plan)",
        """
        --cpu-offloading-retain-pinned-cpu-buffers --no-pin-cpu-grads --no-pin-cpu-params
        --fine-grained-activation-offloading --offload-modules --min-offloaded-tensor-size --activation-offload-fraction
        --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks
        --fine-grained-offloading-max-inflight-offloads --moe-paged-stash --moe-paged-stash-buffer-size-factor-cpu
        --moe-paged-stash-buffer-size-factor-cuda --moe-paged-stash-page-size
        """,
    ),
    ("use --recompute-granularity selective", "--recompute-activations"),
    ("use --recompute-granularity full", "--checkpoint-activations"),
    (
        "leave it out: --recompute-granularity full recomputes every layer of a stage, or with --recompute-num-layers "
        "its first ones; a plan (--hetero-plan) says so for each stage",
        """
        --recompute-modules --checkpoint-num-layers --distribute-saved-activations --moe-layer-recompute
        --mlp-chunks-for-training
        """,
    ),
    # Communication.
    (
        "the schedule decides when stages exchange tensors: leave it out; how far a stage runs ahead is in_flight in a "
        "plan (--hetero-plan)",
        "--pipeline-model-parallel-comm-backend",
    ),
    (
        "process groups follow from the plan and their settings from NCCL's own environment variables: leave it out; "
        "--distributed-timeout-minutes sets how long a collective may take",
        "--use-tp-pp-dp-mapping --distributed-timeout-seconds-after-init --lazy-mpu-init --fake-process-group",
    ),
    ("start with torchrun, which gives each process its rank in the environment", "--local-rank --local_rank"),
    # Optimizer.
    (
        "the optimizer is AdamW: leave it out, or use --adam-beta1, --adam-beta2 and --adam-eps",
        """
        --sgd-momentum --lion-beta1 --lion-beta2 --muon-momentum --muon-no-split-qkv --muon-use-nesterov
        --muon-scale-mode --muon-fp32-matmul-prec --muon-coefficient-type --muon-num-ns-steps --muon-tp-mode
        --muon-extra-scale-factor --muon-scalar-optimizer --optimizer-cuda-graph --dump-param-to-param-group-map
        --muon-nesterov
        """,
    ),
    ("use --lr-warmup-iters or --lr-warmup-fraction", "--warmup"),
    (
        "weight decay spares biases and norms, and no learning rate depends on a layer's width: leave it out",
        """
        --apply-wd-to-qk-layernorm --no-weight-decay-cond-type --use-mup
        --mup-width-mult --mup-base-hidden-size --mup-embedding-mult --mup-output-mult --mup-base-head-dim
        --mup-attn-scale-power
        """,
    ),
    (
        "of the checks of losses, gradients and weights there is one, --check-for-nan-in-loss-and-grad: leave it out",
        """
        --check-for-spiky-loss --check-for-large-grads
        --result-rejected-tracker-filename --check-weight-hash-across-dp-replicas-interval --rerun-mode
        --error-injection-rate --error-injection-type
        """,
    ),
    # Data and tokenizer.
    (
        "use --tokenizer-type HuggingFaceTokenizer and --tokenizer-model with the model's tokenizer.json",
        """
        --vocab-extra-ids --tokenizer-sentencepiece-legacy --tokenizer-metadata --tokenizer-special-tokens
        --tokenizer-hf-no-use-fast --disable-tokenizer-sentencepiece-ignore-extra-whitespaces
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        """,
    ),
    ("documents are packed without padding, and every token counts: leave it out", "--null-tokenizer-pad-id"),
    ("use --vocab-size, which --make-vocab-size-divisible-by rounds up", "--padded-vocab-size"),
    (
        "documents are packed and attend to one another: leave it out",
        "--reset-attention-mask --reset-position-ids --dataloader-inter-document-masking",
    ),
    ("write the prefixes after --data-path or --train-data-path", "--data-args-path --per-split-data-args-path"),
    ("use --seq-length", "--encoder-seq-length --decoder-seq-length"),
    (
        "samples come in one fixed order from indexed files, whatever the plan: leave it out",
        """
        --data-impl --object-storage-cache-path --s3-cache-path --mid-level-dataset-surplus
        --allow-ambiguous-pad-tokens --sample-rate
        """,
    ),
    (
        "this program pretrains on fixed token files: leave it out",
        """
        --sft --sft-tokenizer-prompt-format --finetune-hf-dataset --finetune-data-split --fim-data --fim-rate
        --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix --fim-prefix-token --fim-middle-token
        --fim-suffix-token --fim-pad-token --fim-eod-token
        """,
    ),
    # The model.
    (
        "YaRN is not there yet: leave it out and stretch --position-embedding-type rope for long sequences with "
        "--use-rope-scaling, as Llama 3.1 does, or --rotary-seq-len-interpolation-factor",
        """
        --yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow
        --yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int
        """,
    ),
    (
        "leave it out: TransformerEngine takes a FlashAttention that is installed and fits the device. To rule out "
        "versions, do not install them, or set NVTE_FLASH_ATTN_V2, NVTE_FLASH_ATTN_V3 or NVTE_FLASH_ATTN_V4 to 0 for "
        "all ranks, which TransformerEngine 2.20 reads",
        "--flash-attention-version",
    ),
    ("use --num-layers", "--encoder-num-layers --decoder-num-layers"),
    (
        "the activation is GeLU in its tanh form, SwiGLU with --swiglu, or ReLU with --hetero-relu: leave it out",
        """
        --openai-gelu --squared-relu --quick-geglu --use-te-activation-func --activation-func-clamp-value
        --glu-linear-offset --use-fused-weighted-squared-relu
        """,
    ),
    (
        "the two halves of a gated MLP are one matrix after the other: leave it out",
        "--moe-mlp-glu-interleave-size --moe-shared-expert-glu-interleave-size",
    ),
    (
        "use --position-embedding-type learned_absolute or rope",
        "--relative-attention-num-buckets --relative-attention-max-distance --mrope-section --no-rope-freq",
    ),
    (
        "leave it out: what stretches rotary embeddings for long sequences is --rotary-base, --use-rope-scaling or "
        "--rotary-seq-len-interpolation-factor",
        "--rotary-interleaved --rotary-scaling-factor --rope-type --mscale --mscale-all-dim --enable-gpt-oss",
    ),
    (
        "multi-latent attention is not supported: use --group-query-attention to shrink keys and values",
        """
        --multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
        --cache-mla-latents --mla-down-proj-fusion
        """,
    ),
    (
        "multi-token prediction is not supported, the model predicts the next token: leave it out",
        """
        --mtp-num-layers --mtp-loss-scaling-factor --mtp-standalone --mtp-use-repeated-layer
        --mtp-hybrid-override-pattern --mtp-detach-heads
        """,
    ),
    (
        "attention is causal softmax attention over the whole sequence: leave it out",
        """
        --window-size --window-attn-skip-freq --softmax-type --attention-output-gate --qk-l2-norm --qk-clip
        --qk-clip-alpha --qk-clip-threshold --log-max-attention-logit --experimental-attention-variant
        --linear-attention-freq --linear-conv-kernel-dim --linear-key-head-dim --linear-value-head-dim
        --linear-num-key-heads --linear-num-value-heads --dsa-indexer-n-heads --dsa-indexer-head-dim --dsa-indexer-topk
        --dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss --dsa-indexer-topk-freq --dsa-indexer-skip-topk-offset
        --dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32 --dsa-indexer-rope-interleaved --dsa-kernel-backend
        --disable-dsa-indexer-rotate-activation --no-dsa-indexer-rotate-activation --disable-dsa-indexer-scoring-relu
        --no-dsa-indexer-scoring-relu
        """,
    ),
    (
        "all layers of a model are alike, attention then MLP: leave it out",
        """
        --hybrid-layer-pattern --hybrid-override-pattern --hybrid-attention-ratio --hybrid-mlp-ratio --is-hybrid-model
        --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads --disable-mamba-mem-eff-path
        --mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype --moe-layer-freq
        --mamba-training-ssm-states-dtype
        """,
    ),
    (
        "these flags describe layers that differ in shape, which is not supported; if it is the GPUs that differ, "
        "pass a plan with --hetero-plan",
        "--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json",
    ),
    (
        "experts are routed by softmax over the top k and none drops a token; there are no shared experts: leave it "
        "out, or use --moe-router-load-balancing-type and --moe-aux-loss-coeff",
        """
        --moe-shared-expert-intermediate-size --moe-shared-expert-gate --moe-shared-expert-overlap
        --moe-router-num-groups --moe-router-group-topk --moe-router-pre-softmax --moe-router-topk-scaling-factor
        --moe-router-score-function --moe-router-dtype --moe-router-enable-expert-bias --moe-router-bias-update-rate
        --moe-router-force-load-balancing --moe-router-force-biased --moe-enable-routing-replay --moe-z-loss-coeff
        --moe-input-jitter-eps --moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-token-drop-policy
        --moe-apply-probs-on-input --moe-latent-size --moe-use-upcycling --moe-upcycling-granularity
        --export-moe-apply-probs-on-input --moe-expert-rank-capacity-factor --moe-router-quantile-balancing-ema
        """,
    ),
    (
        "routing of tokens is not traced: leave it out; --profile writes traces of steps",
        """
        --moe-routing-trace-path --moe-routing-trace-max-training-iters --moe-routing-trace-dump-weights
        --moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states
        """,
    ),
    (
        "norms stand before attention and MLP, with a scale around one: leave it out",
        "--apply-residual-connection-post-layernorm",
    ),
    (
        "weights are drawn from one normal distribution per parameter name: leave it out, or use --init-method-std",
        """
        --init-method-xavier-uniform --embedding-init-method-std --data-parallel-random-init --inference-rng-tracker
        """,
    ),
    # Kernels and code paths.
    ("leave it out: models are always megatron-core's", "--use-legacy-models"),
    (
        "leave it out: runs repeat each other bit for bit where the kernels that --transformer-impl chooses do",
        "--deterministic-mode --batch-invariant-mode --onnx-safe",
    ),
    (
        "there is one way to build a model, from the flags of the group 'model' in --help: leave it out",
        "--spec --enable-experimental --config-logger-dir",
    ),
    # Watching the run.
    (
        "restarting after a failure is not there yet: leave it out and start the job again",
        """
        --inprocess-restart --inprocess-max-iterations --inprocess-monitor-thread-interval
        --inprocess-monitor-process-interval --inprocess-progress-watchdog-interval --inprocess-heartbeat-interval
        --inprocess-soft-timeout --inprocess-hard-timeout --inprocess-heartbeat-timeout --inprocess-barrier-timeout
        --inprocess-completion-timeout --inprocess-last-call-wait --inprocess-termination-grace-time
        --inprocess-granularity --inprocess-active-world-size --inprocess-empty-cuda-cache --enable-ft-package
        --calc-ft-timeouts --ft-num-warmup-iters --adlr-autoresume --adlr-autoresume-interval
        """,
    ),
    ("every weight is trained: leave it out", "--freeze-all-layers"),
    (
        "no faults are injected into a run: leave it out",
        """
        --fault-injector-ranks --fault-injector-num-ranks --fault-injector-fault-types
        --fault-injector-fault-probabilities --fault-injector-fault-delay --fault-injector-delay-start-iteration
        --fault-injector-mtti-seconds --fault-injector-offset-seconds --fault-injector-seed
        """,
    ),
)

_GROUPS = (*_OF_PRETRAINING, *OTHER_WORK, *TORCHRUN, *FLAGSCALE)

UNSUPPORTED_FLAGS: Mapping[str, str] = MappingProxyType(
    {flag: advice for advice, flags in _GROUPS for flag in flags.split()}
)
"""Each refused flag with what to do instead."""

_VALUES_THAT_ASK_FOR_NOTHING = """
    --activation-offload-fraction=1 --adlr-autoresume-interval=1000 --data-impl=infer --data-impl=mmap
    --delta-offload-bytes-across-pp-ranks=0 --dsa-indexer-skip-topk-offset=0 --dsa-indexer-topk-freq=1
    --dsa-kernel-backend=none --encoder-pipeline-model-parallel-size=0 --encoder-tensor-model-parallel-size=0
    --error-injection-rate=0 --exp-avg-dtype=fp32 --exp-avg-sq-dtype=fp32 --expert-tensor-parallel-size=1 --fim-rate=0
    --fp8-margin=0 --glu-linear-offset=0 --hybrid-attention-ratio=0 --hybrid-mlp-ratio=0
    --inference-batch-times-seqlen-threshold=-1 --inference-max-requests=8 --inference-max-seq-length=2560
    --main-grads-dtype=fp32 --main-params-dtype=fp32 --mamba-head-dim=64 --mamba-num-groups=8 --mamba-state-dim=128
    --mask-prob=0.15 --mid-level-dataset-surplus=0.005 --mlp-chunks-for-training=1 --model-parallel-size=1
    --moe-expert-capacity-factor=-1 --moe-input-jitter-eps=0 --moe-layer-freq=1
    --moe-paged-stash-buffer-size-factor-cpu=0 --moe-paged-stash-buffer-size-factor-cuda=1.1
    --moe-paged-stash-page-size=64 --moe-router-bias-update-rate=0.001 --moe-router-group-topk=1
    --moe-router-num-groups=1 --moe-router-quantile-balancing-ema=0 --moe-router-score-function=softmax
    --moe-router-topk-scaling-factor=1 --moe-token-drop-policy=probs --moe-z-loss-coeff=0 --mscale-all-dim=0 --mscale=1
    --mtp-loss-scaling-factor=0.1 --mtp-num-layers=0 --null-tokenizer-pad-id=-1 --relative-attention-max-distance=128
    --relative-attention-num-buckets=32 --rerun-mode=disabled --rerun-mode=validate_results --retriever-seq-length=256
    --rope-type=rope --rotary-scaling-factor=1 --sample-rate=1 --sgd-momentum=0.9 --short-seq-prob=0.1
    --softmax-type=vanilla --train-sync-interval=0 --virtual-pipeline-model-parallel-size=1 --vocab-extra-ids=0
"""
"""Megatron-LM's defaults of refused flags, and values that switch them off there."""

ASKS_FOR_NOTHING = "with this value it asks for nothing"
"""Why a refused flag with such a value is let pass."""

_ASKING_FOR_NOTHING = frozenset(
    (name, value) for name, _, value in (word.partition("=") for word in _VALUES_THAT_ASK_FOR_NOTHING.split())
)


def asks_for_nothing(name: str, values: Sequence[object]) -> bool:
    """Whether a refused flag has a value with which Megatron-LM does what it does without the flag."""
    return len(values) == 1 and any(
        flag == name and (str(values[0]) == value or _number(values[0]) == _number(value) is not None)
        for flag, value in _ASKING_FOR_NOTHING
    )


def values_that_ask_for_nothing(name: str) -> list[str]:
    """Return the values of a refused flag that are let pass."""
    return sorted(value for flag, value in _ASKING_FOR_NOTHING if flag == name)


def _number(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None
