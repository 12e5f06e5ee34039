#!/usr/bin/env bash
# A Llama-style model with 1.2 billion parameters, of nobody's sizes:
# CLUSTER=cluster.yaml DATA_PATH=... TOKENIZER=... bash scripts/pretrain_llama_1b.sh [FLAGS]
# What else it reads from the environment, DRY_RUN=1 and TINY=1 among it, scripts/pretraining.sh says.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

model=(
    --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632
    --num-attention-heads 16 --group-query-attention --num-query-groups 8
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000
    --position-embedding-type rope --normalization RMSNorm
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
training=(
    --global-batch-size 256 --train-iters 20000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10
)
hetero=(--use-distributed-optimizer --overlap-param-gather)
tiny=(--num-query-groups 2)

pretrain llama_1b "$@"
