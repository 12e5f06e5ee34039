# Sourced by scripts/pretrain_*.sh: plans for a cluster what their flags train, and takes the plan to its hosts.
#
#   pretrain NAME "$@"      with the arrays model, training and hetero, and tiny, the sizes of TINY=1 that differ by model
#
# What the scripts read from the environment:
#
#   CLUSTER       the cluster file (docs/cluster.md); `hetero discover` writes one
#   PLAN          a plan file for that cluster, in place of planning
#   DATA_PATH     prefix of a .bin and .idx file, as tools/preprocess_data.py writes them; or a blend, as in Megatron-LM
#   TOKENIZER     the tokenizer that made the data; of the type TOKENIZER_TYPE (default: HuggingFaceTokenizer)
#   CHECKPOINT    a folder to save into and to go on from; without it nothing is saved
#   PRECISION     bf16 (default), fp16, for clusters with GPUs older than Ampere, or fp32
#   PLANNER       more flags of planning: --hetero-profile P.json, --hetero-data-sheets, --hetero-plan-time-limit S
#   HOSTS         hosts for `hetero launch`, such as "a100=gpu-0,gpu-1 v100=old-7"; in an allocation of Slurm its nodes
#   LAUNCH        what `hetero launch` does: --run (default), or --sbatch job.sbatch and the like (docs/launch.md)
#   RUN           folder for the plan and the logs (default: runs/NAME)
#   PYTHON        default: the repository's .venv, else python3
#   DRY_RUN=1     prints plan, prediction and launch line, and starts nothing; data and tokenizer may be missing
#   TINY=1        a small model of the same architecture, four steps, on two processes of this machine, without a GPU
#
# Further arguments go to pretrain_gpt.py.

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# needed VARIABLE WHAT : ends the script with one message where a variable is not set.
needed() {
    [ -n "${!1:-}" ] || fail "set $1 to $2"
}

# An optional switch of the environment.
is_on() {
    case "${!1:-0}" in
        1) return 0 ;;
        0) return 1 ;;
        *) fail "$1=${!1} is neither 0 nor 1" ;;
    esac
}

# stdlib_corpus PREFIX SOURCE... : real text for tests, Python sources token by token as bytes.
stdlib_corpus() {
    local prefix="$1"
    shift
    "$python" "$repository/tools/preprocess_data.py" --input "$@" --pattern '*.py' --skip-bad --overwrite \
        --tokenizer-type ByteLevelTokenizer --append-eod --workers 2 --output-prefix "$prefix"
}

# The small model, its cluster and its text; what the user has set stays.
make_tiny() {
    PRECISION="${PRECISION:-fp32}"
    CLUSTER="${CLUSTER:-$repository/scripts/presets/two_cores.yaml}"
    PLANNER="${PLANNER:---hetero-data-sheets --hetero-plan-time-limit 2}"
    if [ -z "${DATA_PATH:-}" ]; then
        DATA_PATH="$RUN/json_text_document"
        [ -e "$DATA_PATH.idx" ] || stdlib_corpus "$RUN/json" \
            "$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/json"
        TOKENIZER_TYPE=ByteLevelTokenizer
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    small=(
        --num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --kv-channels 16
        --seq-length 64 --max-position-embeddings 64 --vocab-size 257 --make-vocab-size-divisible-by 4
        --global-batch-size 8 --train-iters 4 --lr-warmup-iters 1 --lr-decay-iters 4 --num-workers 0 --log-interval 1
        "${tiny[@]}"
    )
}

pretrain() {
    local name="$1" how small=() precision=() data=() checkpoints=() flags=() more=()
    shift
    RUN="${RUN:-runs/$name}"
    if is_on TINY && [ -z "${PYTHON:-}" ]; then
        prepare_environment '[train]'
    elif [ -n "${PYTHON:-}" ]; then
        python="$PYTHON"
    elif [ ! -x "$python" ]; then
        python=python3
    fi
    mkdir -p "$RUN"
    if is_on TINY; then
        make_tiny
    fi

    needed CLUSTER "a cluster file: 'hetero discover' writes one, docs/cluster.md explains it"
    [ -f "$CLUSTER" ] || fail "CLUSTER=$CLUSTER: no such file"
    case "${PRECISION:=bf16}" in
        bf16 | fp16) precision=("--$PRECISION") ;;
        fp32) ;;
        *) fail "PRECISION=$PRECISION is none of bf16, fp16 and fp32" ;;
    esac
    if [ -n "${DATA_PATH:-}" ] || ! is_on DRY_RUN; then
        needed DATA_PATH "the prefix of a .bin and .idx file: tools/preprocess_data.py makes them of text"
        data=(--data-path $DATA_PATH --tokenizer-type "${TOKENIZER_TYPE:=HuggingFaceTokenizer}")
        if [ "$TOKENIZER_TYPE" != ByteLevelTokenizer ]; then
            needed TOKENIZER "the tokenizer that made the data, such as a tokenizer.json or a model's folder"
            data+=(--tokenizer-model "$TOKENIZER")
        fi
    fi
    if [ -n "${CHECKPOINT:-}" ]; then
        checkpoints=(--save "$CHECKPOINT" --load "$CHECKPOINT" --save-interval 500 --hetero-keep-last 3 --async-save)
    fi
    flags=("${model[@]}" "${training[@]}" "${precision[@]}" "${hetero[@]}" "${small[@]}" "${data[@]}" "${checkpoints[@]}" "$@")

    if [ -n "${PLAN:-}" ]; then
        [ -f "$PLAN" ] || fail "PLAN=$PLAN: no such file; without PLAN one is made for CLUSTER"
        "$python" -m hetero show "$PLAN"
    else
        PLAN="$RUN/plan.json"
        # A plan does not depend on the text, whose vocabulary --vocab-size states.
        [ "${#data[@]}" -gt 0 ] || more=(--mock-data --tokenizer-type NullTokenizer)
        "$python" "$repository/tools/plan_flags.py" --hetero-cluster "$CLUSTER" --hetero-plan-out "$PLAN" \
            ${PLANNER:-} "${flags[@]}" "${more[@]}"
    fi

    how="${LAUNCH:---run}"
    is_on DRY_RUN && how=--print
    exec "$python" -m hetero launch "$PLAN" --cluster "$CLUSTER" --program "$repository/pretrain_gpt.py" \
        ${HOSTS:+--hosts $HOSTS} $how -- "${flags[@]}"
}
