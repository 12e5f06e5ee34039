#!/usr/bin/env bash
# From nothing but Python and a shell to a model trained under an uneven plan, and the proof that it is right.
#
#   bash scripts/quickstart.sh [TRAIN_STEPS [RACE_STEPS]]
#   VENV=/opt/venv bash scripts/quickstart.sh       in this environment, which has '[train]'; default: make .venv
#
# Four CPU processes share a small Llama-style model unequally: two replicas of different depth, unequal layers,
# tensor parallelism and microbatches. The text is the source of the installed Python standard library. Then they
# behave like an A100, two V100 and an RTX 3090, under the plan that was made for those and under the best uniform one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
steps="${1:-100}"
race_steps="${2:-6}"
if [ -z "${VENV:-}" ]; then
    VENV="$repository/.venv"
    prepare_environment .venv '[train]' 3 3.11 3.12 3.13
fi
python="$VENV/bin/python"

run=runs/quickstart
mkdir -p "$run"
export OMP_NUM_THREADS=1

echo "== the corpus: the Python standard library's own sources"
stdlib="$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
# Not its tests, and not what else happens to be installed beside it.
sources=("$stdlib"/*.py)
for folder in "$stdlib"/*/; do
    case "$(basename "$folder")" in
        test | site-packages | dist-packages | __pycache__) ;;
        *) [ -n "$(find "$folder" -name '*.py' -print -quit)" ] && sources+=("$folder") ;;
    esac
done
"$python" tools/preprocess_data.py --input "${sources[@]}" --pattern '*.py' --skip-bad --overwrite \
    --tokenizer-type ByteLevelTokenizer --append-eod --workers 2 --output-prefix "$run/stdlib"

flags=(
    --hetero-plan scripts/presets/plans/quickstart.json
    --num-layers 8 --hidden-size 128 --ffn-hidden-size 320
    --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 128 --max-position-embeddings 128 --make-vocab-size-divisible-by 4
    --data-path "$run/stdlib_text_document" --tokenizer-type ByteLevelTokenizer
    --global-batch-size 8 --train-iters "$steps" --num-workers 0
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters "$((steps / 10))"
    --log-interval "$((steps < 10 ? 1 : steps / 10))" --seed 7
)
launch=("$python" -m torch.distributed.run --rdzv-backend hetero-static --rdzv-endpoint localhost:0 --nproc-per-node 4)

echo "== training $steps steps on four processes under scripts/presets/plans/quickstart.json"
"${launch[@]}" pretrain_gpt.py "${flags[@]}"

echo "== the first steps again, under the plan and in one process, in fp32 and in fp64"
"${launch[@]}" tools/verify_plan.py --verify-steps 3 --verify-precision fp32 fp64 "${flags[@]}"

echo "== a mixed cluster that is not here: the best plan for it, and the best uniform one"
cluster=scripts/presets/clusters/quickstart.yaml
"$python" -m hetero plan --cluster "$cluster" --model scripts/presets/models/gpt-200m.yaml --global-batch-size 32 \
    --attention-dropout 0 --hidden-dropout 0 --out "$run/plan.json" --uniform-out "$run/uniform.json"

echo "== both plans run at that cluster's pace, on this machine and on the same text"
"${launch[@]}" tools/race_plans.py --plans "$run/plan.json" "$run/uniform.json" --report "$run/race.html" \
    --hetero-emulate "$cluster" \
    --num-layers 12 --hidden-size 1024 --num-attention-heads 16 --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257 \
    --data-path "$run/stdlib_text_document" --tokenizer-type ByteLevelTokenizer \
    --global-batch-size 32 --train-iters "$race_steps" --num-workers 0 --lr 3e-3 --seed 7

echo "== done. $repository/$run/race.html shows the race. The plan, as a table and a picture:"
printf '%q ' "$python" -m hetero show "$repository/$run/plan.json"
echo
