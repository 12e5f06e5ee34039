#!/usr/bin/env bash
# Llama 3 70B: CLUSTER=cluster.yaml DATA_PATH=... TOKENIZER=... bash scripts/pretrain_llama3_70b.sh [FLAGS]
# What else it reads from the environment, DRY_RUN=1 and TINY=1 among it, scripts/pretraining.sh says.
#
# Sizes: config.json of huggingface.co/meta-llama/Meta-Llama-3-70B; Grattafiori et al., "The Llama 3 Herd of Models", arXiv
# 2407.21783, table 3, which has the learning rate as well. Batch (4M tokens: 512 samples of 8192), schedule and number of
# steps are stated there for the 405B model alone: those here are a choice, 15T tokens in all as in that paper.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

model=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
training=(
    --global-batch-size 512 --train-iters 3576279
    --lr 1.5e-4 --min-lr 1.5e-6 --lr-decay-style cosine --lr-warmup-iters 8000
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --log-interval 10
)
hetero=(--use-distributed-optimizer --overlap-param-gather)
tiny=(--num-query-groups 2)

pretrain llama3_70b "$@"
