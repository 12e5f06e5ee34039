#!/usr/bin/env bash
# GPT-2 345M: CLUSTER=cluster.yaml DATA_PATH=... TOKENIZER=... bash scripts/pretrain_gpt2_345m.sh [FLAGS]
# What else it reads from the environment, DRY_RUN=1 and TINY=1 among it, scripts/pretraining.sh says.
#
# Sizes, vocabulary and dropout: config.json of huggingface.co/openai-community/gpt2-medium; Radford et al., "Language Models
# are Unsupervised Multitask Learners" (2019), table 2, where batch size (512) and context (1024) are as well. The paper
# states no learning rate: the one here, its schedule and the number of steps are a choice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

model=(
    --num-layers 24 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024 --vocab-size 50257
    --position-embedding-type learned_absolute --normalization LayerNorm --norm-epsilon 1e-5
    --attention-dropout 0.1 --hidden-dropout 0.1
)
training=(
    --global-batch-size 512 --train-iters 300000
    --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.01 --clip-grad 1.0 --init-method-std 0.02 --log-interval 100
)
hetero=(--use-distributed-optimizer --overlap-param-gather)
tiny=(--ffn-hidden-size 256)

pretrain gpt2_345m "$@"
