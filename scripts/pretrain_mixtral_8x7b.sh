#!/usr/bin/env bash
# Mixtral 8x7B: CLUSTER=cluster.yaml DATA_PATH=... TOKENIZER=... bash scripts/pretrain_mixtral_8x7b.sh [FLAGS]
# What else it reads from the environment, DRY_RUN=1 and TINY=1 among it, scripts/pretraining.sh says.
#
# Sizes and the weight of the loss that spreads tokens over the experts: config.json of huggingface.co/mistralai/
# Mixtral-8x7B-v0.1; Jiang et al., "Mixtral of Experts", arXiv 2401.04088, table 1. How it was trained is not published:
# length, batch, learning rate and schedule are a choice, and so is the loss's type: seq_aux_loss depends on no plan.
#
# There is no expert parallelism: every rank of a stage holds its share of all eight experts, by tensor parallelism, and the
# plan divides layers. --expert-model-parallel-size other than 1 is refused.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.02
    --seq-length 4096 --max-position-embeddings 32768 --vocab-size 32000
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
training=(
    --global-batch-size 1024 --train-iters 500000
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --log-interval 10
)
hetero=(--use-distributed-optimizer --overlap-param-gather)
tiny=(--num-query-groups 2)

pretrain mixtral_8x7b "$@"
