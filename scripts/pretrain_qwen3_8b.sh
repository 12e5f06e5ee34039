#!/usr/bin/env bash
# Qwen3 8B: CLUSTER=cluster.yaml DATA_PATH=... TOKENIZER=... bash scripts/pretrain_qwen3_8b.sh [FLAGS]
# What else it reads from the environment, DRY_RUN=1 and TINY=1 among it, scripts/pretraining.sh says.
#
# Sizes: config.json of huggingface.co/Qwen/Qwen3-8B-Base; Yang et al., "Qwen3 Technical Report", arXiv 2505.09388, table 1.
# Section 3.2 there has the length of the first two stages of pretraining, 4096 tokens. Batch, learning rate and schedule are
# not published: those here are a choice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

model=(
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288
    --num-attention-heads 32 --kv-channels 128 --group-query-attention --num-query-groups 8 --qk-layernorm
    --seq-length 4096 --max-position-embeddings 32768 --vocab-size 151936
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
training=(
    --global-batch-size 1024 --train-iters 500000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --log-interval 10
)
hetero=(--use-distributed-optimizer --overlap-param-gather)
tiny=(--num-query-groups 2)

pretrain qwen3_8b "$@"
