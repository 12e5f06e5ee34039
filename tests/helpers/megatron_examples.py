"""The flags of three of Megatron-LM's own examples, and what makes the models small enough for a CPU.

From https://github.com/NVIDIA/Megatron-LM: examples/gpt3/train_gpt3_175b_distributed.sh and
examples/llama/train_llama3_8b_h100_fp8.sh at commit 157006d6, examples/mixtral/train_mixtral_8x7b_distributed.sh at
commit 9b8acfd0. Of what they choose by a variable, mock data and Weights & Biases are taken; paths are ours.
"""

from collections.abc import Mapping

GPT3_175B = """
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
--fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path DATA --vocab-file VOCAB --merge-file MERGES
--split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save CHECKPOINTS --load CHECKPOINTS
--eval-iters 10 --tensorboard-dir LOGS
"""

LLAMA3_8B_FP8 = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
--disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
--lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
--bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
--empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer
--vocab-size 128256 --data-cache-path CACHE --tiktoken-pattern v2 --split '99,1,0'
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
--eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
--ckpt-format torch_dist --distributed-timeout-minutes 60 --save CHECKPOINTS --load CHECKPOINTS --tensorboard-dir LOGS
"""

MIXTRAL_8X7B = """
--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --tokenizer-type Llama2Tokenizer
--tokenizer-model TOKENIZER --data-path DATA --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4
--train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1
--lr-warmup-iters 500 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
--expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000
--eval-interval 1000 --eval-iters 10 --save CHECKPOINTS --load CHECKPOINTS --tensorboard-dir LOGS --no-load-optim
--no-load-rng --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B
"""


def with_values(words: list[str], changes: Mapping[str, str | None]) -> list[str]:
    """``words`` with other values of some flags, or without them where the value is ``None``; all must be there."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flags[word] = []
        else:
            flags[next(reversed(flags))].append(word)
    assert set(changes) <= set(flags), set(changes) - set(flags)
    flags |= {name: value.split() for name, value in changes.items() if value is not None}
    kept = {name: values for name, values in flags.items() if name not in changes or changes[name] is not None}
    return [word for name, values in kept.items() for word in (name, *values)]
