#!/usr/bin/env bash
# A 1.2-billion-parameter Llama-style model on one host, under a plan or uniformly.
#
#   DATA=data/corpus_text_document TOKENIZER=tokenizer.json bash scripts/pretrain_llama_1b.sh --hetero-plan plan.json
#   DATA=... TOKENIZER=... bash scripts/pretrain_llama_1b.sh --micro-batch-size 2 --tensor-model-parallel-size 2
#
# Further arguments go to pretrain_gpt.py: --bf16 where all GPUs have it, --fp16 where some do not.
# GPUS: processes on this host (default: all its GPUs). CHECKPOINTS: a folder to save into and to go on from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/numa.sh
: "${DATA:?set DATA to the prefix of a .bin and .idx file, see tools/preprocess_data.py}"
: "${TOKENIZER:?set TOKENIZER to the tokenizer.json that made the data}"
GPUS="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"

model=(
    --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632
    --num-attention-heads 16 --group-query-attention --num-query-groups 8
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 2048 --max-position-embeddings 2048
)
training=(
    --global-batch-size 256 --train-iters 20000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10
)
memory=(--use-distributed-optimizer --overlap-param-gather)
checkpoints=()
if [ -n "${CHECKPOINTS:-}" ]; then
    checkpoints=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --hetero-keep-last 3 --async-save)
fi
data=(--data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")

# Variables of CUDA and torch get their defaults in pretrain_gpt.py (docs/install.md); those that are set stay.
exec torchrun --standalone --nproc-per-node "$GPUS" $(numa_binding) pretrain_gpt.py \
    "${model[@]}" "${training[@]}" "${memory[@]}" "${checkpoints[@]}" "${data[@]}" "$@"
