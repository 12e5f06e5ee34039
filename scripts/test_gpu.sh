#!/usr/bin/env bash
# The tests that need a GPU, on a machine that has one and a torch for it; prints a report to paste into an issue.
#
#   bash scripts/test_gpu.sh                     with the python3 that is found, which has torch
#   PYTHON=/opt/venv/bin/python bash scripts/test_gpu.sh
#   bash scripts/test_gpu.sh --fast              without the comparison with stock megatron-core and measured steps
#   bash scripts/test_gpu.sh --no-engine         without building TransformerEngine
#
# Makes .venv-gpu beside this repository's files, which sees the packages of that Python, and installs there what is
# missing: never torch itself. Everything is kept in runs/gpu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
base="${PYTHON:-python3}" fast='' engine=yes
while [ $# -gt 0 ]; do
    case "$1" in
        --fast) fast=yes ;;
        --no-engine) engine='' ;;
        *) echo "usage: bash scripts/test_gpu.sh [--fast] [--no-engine]" >&2; exit 2 ;;
    esac
    shift
done

read -r torch cuda capability < <("$base" - <<'PYTHON'
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"scripts: {sys.executable} is Python {sys.version.split()[0]}; this project needs 3.11, 3.12 or 3.13: "
             "name another Python that has torch by PYTHON=")
try:
    import torch
except ImportError as error:
    sys.exit(f"scripts: {sys.executable} has no torch ({error}); docs/install.md says which wheel a GPU needs")
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
    sys.exit(f"scripts: torch {torch.__version__} is too old, this project needs 2.10 or newer; docs/install.md says "
             "which wheel a GPU needs")
if torch.version.cuda is None or not torch.cuda.is_available():
    sys.exit(f"scripts: torch {torch.__version__} sees no GPU; docs/install.md says which wheel a GPU needs")
print(torch.__version__, torch.version.cuda.split(".")[0], "%d%d" % torch.cuda.get_device_capability())
PYTHON
) || exit 2
[ -n "${capability:-}" ] || exit 2
echo "== torch $torch, CUDA $cuda, a device of compute capability $capability"

python="$PWD/.venv-gpu/bin/python" out=runs/gpu
mkdir -p "$out"
[ -x "$python" ] || "$base" -m venv .venv-gpu
# What that Python has, this one sees, behind its own packages; also where that one is a virtual environment itself.
# Its torch may lie elsewhere than its other packages, such as in the user's home.
"$base" -c 'import pathlib, sysconfig, torch
print(*dict.fromkeys((sysconfig.get_path("purelib"), str(pathlib.Path(torch.__file__).parents[1]))), sep="\n")' \
    > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
pip=("$python" -m pip install --quiet --disable-pip-version-check)

echo "== installing megatron-core, this project and what its tests need into .venv-gpu"
# torch stays as it is, and what it has brought: packages of CUDA and triton.
{ grep -v '^torch==' constraints.txt; echo "torch==$torch"; } > "$out/constraints.txt"
"${pip[@]}" --constraint "$out/constraints.txt" --editable '.[test]'
# Ranks can share a device from NCCL 2.30 on. torch finds its own one first, unless another is there before it.
"${pip[@]}" --no-deps "nvidia-nccl-cu$cuda>=2.30" || echo "scripts: no newer NCCL: tests of several ranks are skipped"
nccl="$(find .venv-gpu -path '*nccl/lib/libnccl.so.2' -print -quit)"
[ -z "$nccl" ] || export LD_PRELOAD="$PWD/$nccl"

if [ -n "$engine" ] && [ "$capability" -ge 80 ] && ! "$python" -c 'import transformer_engine' 2>/dev/null; then
    if command -v "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" >/dev/null || command -v nvcc >/dev/null; then
        echo "== building TransformerEngine, which takes a while (--no-engine leaves it out)"
        "${pip[@]}" ninja pybind11 setuptools wheel
        site="$("$base" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])')"
        CUDNN_PATH="${CUDNN_PATH:-$site/nvidia/cudnn}" MAX_JOBS="${MAX_JOBS:-4}" \
        CPLUS_INCLUDE_PATH="$site/nvidia/cudnn/include:$site/nvidia/nccl/include:${CPLUS_INCLUDE_PATH:-}" \
            "${pip[@]}" --no-build-isolation "transformer_engine[pytorch,core_cu$cuda]>=2.9" \
            > "$out/transformer_engine.log" 2>&1 ||
            echo "scripts: TransformerEngine could not be built, see $out/transformer_engine.log: its tests are skipped"
    else
        echo "scripts: no nvcc, so no TransformerEngine: its tests are skipped"
    fi
fi

export OMP_NUM_THREADS=1
"$python" -m hetero doctor || true
"$python" -m hetero doctor --json > "$out/doctor.json" || true

echo "== tests"
"$python" -m pytest tests/gpu -m gpu --all --junitxml "$out/junit.xml" || true

more=()
if [ -z "$fast" ]; then
    echo "== beside stock megatron-core, and beside the cost model"
    precision=bf16
    [ "$capability" -ge 80 ] || precision=fp32
    "$python" -m tests.bench.bench_uniform --device cuda --precision "$precision" --layers 12 --hidden 1024 --seq 1024 \
        --microbatches 8 --steps 3 --turns 8 --plans '1 rank' dp2 pp2 tp2 > "$out/bench.txt" || true
    more=(--bench "$out/bench.txt" --measure cuda)
fi
failed=0
"$python" -m tests.gpu.report --doctor "$out/doctor.json" --junit "$out/junit.xml" "${more[@]}" > "$out/report.md" || failed=1
echo "== paste this into an issue (it is in $out/report.md)"
cat "$out/report.md"
exit "$failed"
