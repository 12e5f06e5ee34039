"""Refused flags of other work than pretraining a GPT model, and of other programs, each with what to do instead.

Command lines that are moved to this program bring them along: Megatron-LM's parser has the flags of all its programs,
torchrun's stand in front of the program, and FlagScale adds its own.
"""

OTHER_WORK: tuple[tuple[str, str], ...] = (
    (
        "only decoder-only GPT models are trained here: leave it out",
        """
        --bert-no-binary-head --bert-load --output-bert-embeddings --bert-embedder-type --mask-prob --short-seq-prob
        --ict-head-size --ict-load --biencoder-projection-dim --biencoder-shared-query-context-model
        --titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path --retriever-seq-length
        --retriever-report-topk-accuracies --retriever-score-scaling --block-data-path --embedding-path
        --indexer-batch-size --indexer-log-interval --retro-project-dir --retro-add-retriever
        --retro-cyclic-train-iters --retro-encoder-layers --retro-encoder-hidden-dropout
        --retro-encoder-attention-dropout --retro-num-neighbors --retro-num-retrieved-chunks --retro-attention-gate
        --retro-no-verify-neighbor-count --num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction
        --data-per-class-fraction --no-data-sharding --head-lr-mult --vision-pretraining --vision-pretraining-type
        --vision-backbone-type --swin-backbone-type --mask-type --mask-factor --iter-per-epoch --dino-local-img-size
        --dino-local-crops-number --dino-head-hidden-size --dino-bottleneck-size --dino-freeze-last-layer
        --dino-norm-last-layer --dino-warmup-teacher-temp --dino-teacher-temp --dino-warmup-teacher-temp-epochs
        """,
    ),
    (
        "there is no inference here: leave it out",
        """
        --inference-batch-times-seqlen-threshold --inference-max-requests --inference-max-seq-length
        --inference-max-batch-size --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb
        --inference-dynamic-batching-buffer-guaranteed-fraction --inference-dynamic-batching-buffer-overflow-factor
        --inference-dynamic-batching-paused-buffer-size-gb --inference-dynamic-batching-mamba-memory-ratio
        --inference-dynamic-batching-block-size --inference-dynamic-batching-max-requests
        --inference-dynamic-batching-max-requests-override --inference-dynamic-batching-max-tokens
        --inference-dynamic-batching-max-tokens-override --inference-dynamic-batching-num-cuda-graphs
        --inference-dynamic-batching-track-paused-request-events
        --inference-dynamic-batching-track-generated-token-events --inference-dynamic-batching-unified-memory-level
        --inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching
        --inference-dynamic-batching-prefix-caching-eviction-policy
        --inference-dynamic-batching-prefix-caching-coordinator-policy
        --inference-dynamic-batching-prefix-caching-routing-alpha --inference-dynamic-batching-prefix-caching-mamba-gb
        --inference-dynamic-batching-cuda-graph-max-tokens --inference-dynamic-batching-cuda-graph-mixed-prefill-count
        --inference-logging-step-interval --inference-wandb-logging-step-interval --inference-text-gen-server-logging
        --no-inference-text-gen-server-logging --inference-wandb-logging --no-inference-wandb-logging
        --inference-coordinator-port --inference-use-synchronous-zmq-collectives
        --no-inference-use-synchronous-zmq-collectives --inference-fuse-tp-communication
        --inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend
        --inference-moe-disable-fused-quant-kernels --use-legacy-static-engine --flash-decode --max-tokens-to-oom
        --decode-only-cuda-graphs --enable-chunked-prefill --disable-chunked-prefill --mlp-chunks-for-prefill
        --nccl-all-reduce-for-prefill --num-speculative-tokens --moe-pad-experts-for-cuda-graph-inference
        --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens --inference-cuda-graph-scope
        --inference-disable-ep-consensus --no-inference-disable-ep-consensus
        --inference-dynamic-batching-async-sched-mode --inference-dynamic-batching-cuda-graph-sizing-distribution
        --inference-dynamic-batching-logprobs-mode --inference-dynamic-batching-sampling-backend
        --inference-moe-token-dispatcher-type --inference-shards --use-same-sampling-seed-across-dp-ranks
        """,
    ),
    (
        "there is no reinforcement learning here: leave it out",
        """
        --perform-rl-step --rl-prompts-per-eval --rl-num-parallel-generations --rl-num-parallel-generation-batches
        --rl-generation-batch-size --rl-default-temperature --rl-default-top-p --rl-default-top-k
        --rl-offload-optimizer-during-inference --rl-kv-cache-management-mode --rl-persist-cuda-graphs
        --no-rl-persist-cuda-graphs --rl-partial-rollouts --no-rl-partial-rollouts --rl-inference-logprobs-is-correction
        --no-rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef --rl-use-sequence-packing
        --no-rl-use-sequence-packing --rl-sequence-packing-max-sequences-per-bin --rl-sequence-packing-bin-size
        --rl-sequence-packing-algo --rl-training-cuda-graphs --no-rl-training-cuda-graphs --rl-reset-cuda-graphs
        --no-rl-reset-cuda-graphs --rl-inference-tensor-model-parallel-size --rl-inference-pipeline-model-parallel-size
        --rl-inference-expert-model-parallel-size --rl-inference-expert-tensor-model-parallel-size
        --rl-inference-model-unified-memory-level --rl-offload-inference-model-weights-when-idle
        --no-rl-offload-inference-model-weights-when-idle --rl-offload-kv-cache-during-training
        --no-rl-offload-kv-cache-during-training --rl-remove-kv-cache-during-training
        --no-rl-remove-kv-cache-during-training --rl-calculate-intra-group-similarity
        --no-rl-calculate-intra-group-similarity --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap
        --rl-parallel-generation-tasks --rl-skip-bos-token --no-rl-skip-bos-token --rl-inference-parsers --refit-method
        --grpo-prompts-per-step --grpo-group-size --grpo-iterations --grpo-clamp-eps-lower --grpo-clamp-eps-upper
        --grpo-kl-beta --grpo-entropy-term-weight --grpo-filter-groups-with-same-reward --grpo-default-temperature
        --grpo-default-top-p --langrl-env-config --langrl-external-server --no-langrl-external-server
        --langrl-inference-server-type --langrl-inference-server-conversation-template --rl-consumption-granularity
        --rl-submission-granularity --rl-generation-lag --rl-profile --rl-profile-dir
        """,
    ),
    (
        "quantization, distillation and export belong to other tools: leave it out",
        """
        --export-model-type --export-legacy-megatron --export-te-mcore-model --export-force-local-attention
        --export-kv-cache-quant --export-real-quant-cfg --export-quant-cfg --export-kd-teacher-load
        --export-kd-teacher-model-config --export-kd-teacher-ckpt-format --export-kd-cfg --export-qk-l2-norm
        --export-offline-model --modelopt-enabled --logits-load-decode-threads --logits-load-dir
        --logits-load-ignore-errors --logits-load-kd-loss-alpha --logits-load-msc-prefetch-depth
        --logits-load-prefetch-factor --logits-save-dir --logits-save-dtype --logits-save-top-k --logits-save-top-p
        --logits-save-top-p-min-k
        """,
    ),
)
"""Advice, and Megatron-LM's flags of other models, inference, reinforcement learning, distillation and export."""

TORCHRUN: tuple[tuple[str, str], ...] = (
    (
        "it is a flag of torchrun and stands before the program: torchrun FLAGS-OF-TORCHRUN pretrain_gpt.py FLAGS; "
        "'hetero launch PLAN.json' writes that line for each host",
        """
        --nnodes --nproc-per-node --nproc_per_node --node-rank --node_rank --master-addr --master_addr --master-port
        --master_port --standalone --rdzv-backend --rdzv_backend --rdzv-endpoint --rdzv_endpoint --rdzv-id --rdzv_id
        --rdzv-conf --rdzv_conf --local-addr --local_addr --max-restarts --max_restarts --monitor-interval
        --monitor_interval --start-method --start_method --role --module --no-python --no_python --run-path --run_path
        --log-dir --log_dir --redirects --tee --local-ranks-filter --local_ranks_filter --logs-specs --logs_specs
        --event-log-handler --event_log_handler --duplicate-stdout-filters --duplicate_stdout_filters
        --duplicate-stderr-filters --duplicate_stderr_filters --numa-binding --numa_binding --signals-to-handle
        --signals_to_handle --shutdown-timeout --shutdown_timeout --virtual-local-rank --virtual_local_rank
        --log-line-prefix-template --log_line_prefix_template --print-completion --print_completion
        """,
    ),
)
"""Advice, and the flags of torchrun."""

FLAGSCALE: tuple[tuple[str, str], ...] = (
    (
        "write it into a plan (docs/plan_format.md) and pass that with --hetero-plan: the five numbers of a mesh are "
        "tp, cp, ep, dp and pp, so it stands for pp stages with that tp on tp x dp ranks each; cp and ep are 1 here",
        "--hetero-process-meshes",
    ),
    (
        "write it into a plan (docs/plan_format.md) and pass that with --hetero-plan: each number is end_layer less "
        "first_layer of a stage, in the order of the pipeline",
        "--hetero-pipeline-layer-split",
    ),
    (
        "write it into a plan (docs/plan_format.md) and pass that with --hetero-plan: each stage has its device, and "
        "--hetero-cluster says which node has which",
        "--hetero-device-types --hetero-current-device-type",
    ),
    (
        "leave it out and write what differs between GPUs into a plan (docs/plan_format.md), which --hetero-plan "
        "reads; 'hetero plan' computes one for a cluster",
        "--enable-hetero",
    ),
    (
        "write it into a plan (docs/plan_format.md) and pass that with --hetero-plan: each stage has its recompute",
        """
        --recompute-granularity-per-stage-micro-batch --recompute-method-per-stage-micro-batch
        --recompute-num-layers-per-stage-micro-batch
        """,
    ),
    (
        "leave it out where GPUs reach each other; where they do not, --distributed-backend gloo communicates through "
        "the hosts",
        "--hetero-use-cpu-communication",
    ),
)
"""Advice, and the flags of FlagScale's uneven parallelism: the arguments that its scripts add to Megatron-LM's."""
