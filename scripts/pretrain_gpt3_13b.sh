#!/usr/bin/env bash
# GPT-3 13B: CLUSTER=cluster.yaml DATA_PATH=... TOKENIZER=... bash scripts/pretrain_gpt3_13b.sh [FLAGS]
# What else it reads from the environment, DRY_RUN=1 and TINY=1 among it, scripts/pretraining.sh says.
#
# Brown et al., "Language Models are Few-Shot Learners", arXiv 2005.14165: table 2.1 has layers, heads of 128, learning rate
# and batch (2M tokens: 1024 samples of 2048), appendix B the optimizer and its schedule (300B tokens, a cosine over 260B
# down to a tenth, 375M of warm-up). That table's width of 5140 is no multiple of its 40 heads of 128, which make 5120. Every
# other layer of theirs has sparse attention, all layers here are dense. The vocabulary is GPT-2's. Dropout is not stated.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

model=(
    --num-layers 40 --hidden-size 5120 --ffn-hidden-size 20480 --num-attention-heads 40
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257
    --position-embedding-type learned_absolute --normalization LayerNorm --norm-epsilon 1e-5
    --attention-dropout 0 --hidden-dropout 0
)
training=(
    --global-batch-size 1024 --train-iters 143051
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 123978 --lr-warmup-iters 179
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 --log-interval 10
)
hetero=(--use-distributed-optimizer --overlap-param-gather)
tiny=(--ffn-hidden-size 256)

pretrain gpt3_13b "$@"
