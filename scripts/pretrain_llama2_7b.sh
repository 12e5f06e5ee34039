#!/usr/bin/env bash
# Llama 2 7B: CLUSTER=cluster.yaml DATA_PATH=... TOKENIZER=... bash scripts/pretrain_llama2_7b.sh [FLAGS]
# What else it reads from the environment, DRY_RUN=1 and TINY=1 among it, scripts/pretraining.sh says.
#
# Sizes: config.json of huggingface.co/meta-llama/Llama-2-7b-hf. Training: Touvron et al., "Llama 2", arXiv 2307.09288, table
# 1 (batch of 4M tokens: 1024 samples of 4096; learning rate 3e-4; 2T tokens) and section 2.2 (AdamW, 2000 steps of warm-up, a
# cosine down to a tenth).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000
    --position-embedding-type rope --rotary-base 10000 --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
training=(
    --global-batch-size 1024 --train-iters 476837
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --weight-decay 0.1 --clip-grad 1.0 --log-interval 10
)
hetero=(--use-distributed-optimizer --overlap-param-gather)
tiny=()

pretrain llama2_7b "$@"
