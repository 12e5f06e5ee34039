#!/usr/bin/env bash
# What only a GPU shows: trainings, tests and step times, in stages; prints a report to paste into an issue.
#
#   bash scripts/test_gpu.sh                       installs what is missing from PyPI, and runs all stages
#   bash scripts/test_gpu.sh --pack FOLDER         fills FOLDER with wheels, for a GPU machine without a network
#   bash scripts/test_gpu.sh --offline FOLDER      installs the wheels in FOLDER, without a network, and runs
#   bash scripts/test_gpu.sh --list                prints the stages and their time limits
#   bash scripts/test_gpu.sh --stages experts bench-local --minutes 9
#
#   --no-engine          do not build TransformerEngine
#   --for-python 3.12    with --pack: version of the GPU machine's Python (default: that of PYTHON)
#   --for-cuda 13        with --pack: major version of CUDA that its torch was built with (default: 13)
#   PYTHON=FILE          the Python that has torch (default: python3)
#   VENV=FOLDER          environment to make or to use again (default: .venv-gpu)
#   DEVICE=cpu           rehearse without a GPU
#   other options        python -m tests.gpu_stages --help
#
# The environment sees the packages of that Python, and gets what is missing: never torch itself. Results are in runs/gpu,
# each as soon as its stage has ended.
set -euo pipefail
typed_in="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { echo "scripts: $*" >&2; exit 2; }
# path_of FILE : FILE as it was meant in the folder where the command was typed.
path_of() { if [ "${1:0:1}" = / ] || [ "$typed_in" = "$PWD" ]; then echo "$1"; else echo "$typed_in/$1"; fi; }

base="${PYTHON:-python3}" device="${DEVICE:-cuda}" venv=.venv-gpu
[ -z "${VENV:-}" ] || venv="$(path_of "$VENV")"
[[ "$base" != */* ]] || base="$(path_of "$base")"
offline='' pack='' for_python='' for_cuda=13 engine=yes list='' stages=()
while [ $# -gt 0 ]; do
    case "$1" in
        --offline) offline="$(path_of "${2:?--offline needs a folder of wheels}")"; shift ;;
        --pack) pack="$(path_of "${2:?--pack needs a folder}")"; shift ;;
        --for-python) for_python="${2:?--for-python needs a version such as 3.12}"; shift ;;
        --for-cuda) for_cuda="${2:?--for-cuda needs a major version such as 13}"; shift ;;
        --out) stages+=("$1" "$(path_of "${2:?--out needs a folder}")"); shift ;;
        --no-engine) engine='' ;;
        --list) list=yes; stages+=("$1") ;;
        --help | -h) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/test_gpu.sh; exit ;;
        *) stages+=("$1") ;;
    esac
    shift
done

# pack_wheels FOLDER : the packages of the extra test-gpu as constraints.txt pins them, without torch and what it brings.
pack_wheels() {
    local folder="$1" platforms=() glibc doubles
    : "${for_python:=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}"
    [[ "$for_python" =~ ^3\.1[123]$ ]] || fail "--for-python $for_python: this project needs 3.11, 3.12 or 3.13"
    [[ "$for_cuda" =~ ^[0-9]+$ ]] || fail "--for-cuda $for_cuda: only the major version, such as 13"
    mkdir -p "$folder" && [ -w "$folder" ] || fail "--pack $folder: nothing can be written there"
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    for glibc in 2_5 2_12 2_17 2_24 2_26 2_27 2_28; do platforms+=(--platform "manylinux_${glibc}_$(uname -m)"); done
    platforms+=(--platform "manylinux2014_$(uname -m)" --platform any)
    "$base" -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip uv
    # A marker that is never true leaves torch out, with all that torch alone asks for.
    echo 'torch; python_version < "3"' > "$work/without_torch.txt"
    "$work/venv/bin/uv" pip compile --quiet --no-header --no-annotate --constraint constraints.txt \
        --override "$work/without_torch.txt" --extra test-gpu --python-version "$for_python" \
        --python-platform "$(uname -m)-manylinux_2_28" --output-file "$work/packages.txt" setup.py
    download() {
        "$work/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
            --implementation cp --python-version "$for_python" "${platforms[@]}" --dest "$folder" "$@"
    }
    download --requirement "$work/packages.txt"
    # Ranks can share a device from NCCL 2.30 on; older versions of torch bring an older one.
    download "nvidia-nccl-cu$for_cuda>=2.30"
    doubles="$(find "$folder" -name '*.whl' -printf '%f\n' | cut -d - -f 1 | sort | uniq -d | paste -sd ' ')"
    [ -z "$doubles" ] || fail "$folder has several wheels of $doubles, and --offline installs all: pack into an empty folder"
    echo "== $(find "$folder" -name '*.whl' | wc -l) wheels for Python $for_python, $(du -sh "$folder" | cut -f1), in $folder"
}

# build_engine CUDA : TransformerEngine, whose extension for torch is compiled. Without it its stages are not run.
build_engine() {
    local site
    ! "$python" -c 'import transformer_engine' 2> /dev/null || return 0
    if ! command -v "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" > /dev/null && ! command -v nvcc > /dev/null; then
        echo "scripts: no nvcc, so no TransformerEngine: its stages are not run"
        return
    fi
    echo "== building TransformerEngine, which takes a while (--no-engine leaves it out)"
    "${install[@]}" ninja pybind11 setuptools wheel
    site="$("$base" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])')"
    CUDNN_PATH="${CUDNN_PATH:-$site/nvidia/cudnn}" MAX_JOBS="${MAX_JOBS:-4}" \
    CPLUS_INCLUDE_PATH="$site/nvidia/cudnn/include:$site/nvidia/nccl/include:${CPLUS_INCLUDE_PATH:-}" \
        "${install[@]}" --no-build-isolation "transformer_engine[pytorch,core_cu$1]>=2.9" \
        > "$venv/transformer_engine.log" 2>&1 ||
        echo "scripts: TransformerEngine could not be built, see $venv/transformer_engine.log: its stages are not run"
}

if [ -n "$pack" ]; then
    # Not "pack_wheels || fail": bash would then go on after an error inside.
    trap 'echo "scripts: $pack is not complete, for the reason above; it needs a network, and goes on where it ended" >&2' ERR
    set -E
    pack_wheels "$pack"
    exit
fi
if [ -n "$list" ]; then
    exec "$base" -m tests.gpu_stages --device "$device" "${stages[@]}"
fi
[ -z "$offline" ] || [ -d "$offline" ] || fail "--offline $offline: there is no such folder; --pack makes one"

"$base" - "$device" "$offline" <<'PYTHON' || exit 2
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
device, offline = sys.argv[1:]
if device == "cpu":
    sys.exit()
# Without a network the installation takes seconds, and is worth trying on a machine that is alike but for its GPU.
if torch.version.cuda is None or not (offline or torch.cuda.is_available()):
    sys.exit(f"scripts: torch {torch.__version__} sees no GPU; docs/install.md says which wheel a GPU needs, and "
             "DEVICE=cpu rehearses without one")
PYTHON

# A wrong name of a stage is refused before anything is made.
"$base" -m tests.gpu_stages --list "${stages[@]}" > /dev/null || exit 2

# The environment sees what that Python has, after its own packages; also where that one is a virtual environment itself.
# Its torch may lie elsewhere than its other packages, such as in the user's home.
if "$base" -c 'import pip' 2> /dev/null; then
    [ -x "$venv/bin/python" ] || "$base" -m venv --without-pip "$venv"
    pip=("$base" -m pip --python "$venv/bin/python")
else
    [ -x "$venv/bin/python" ] || "$base" -m venv "$venv"
    pip=("$venv/bin/python" -m pip)
fi
python="$(cd "$venv/bin" && pwd)/python"
for made in "$base" "$python"; do "$made" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; done | uniq | wc -l |
    grep -qx 1 || fail "$venv was made with another version of Python than $base: remove it, or name another one by VENV="
# Two runs at a time would install into it, each while the other imports from it.
exec 9> "$venv/lock"
! command -v flock > /dev/null || flock --nonblock 9 ||
    fail "another run uses $venv: wait until it has ended, or name another environment by VENV="
install=("${pip[@]}" --quiet --disable-pip-version-check install)
"$base" -c 'import pathlib, sysconfig, torch
print(*dict.fromkeys((sysconfig.get_path("purelib"), str(pathlib.Path(torch.__file__).parents[1]))), sep="\n")' \
    > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
torch="$("$python" -c 'import torch; print(torch.__version__)')"

if [ -n "$offline" ]; then
    echo "== torch $torch; installing the wheels in $offline into $venv"
    mapfile -d '' wheels < <(find "$offline" -maxdepth 1 -name '*.whl' -print0)
    # Only what is imported is compiled, when it is.
    [ ${#wheels[@]} -eq 0 ] || "${install[@]}" --no-index --no-deps --no-compile "${wheels[@]}" ||
        fail "pip refuses wheels in $offline, see above: fill an empty folder by --pack FOLDER --for-python" \
            "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    "$python" -c 'import setuptools' 2> /dev/null ||
        fail "$offline has no wheel of setuptools (${#wheels[@]} wheels in all), which installs this project: --pack fills it"
    PYTHONWARNINGS=ignore "${install[@]}" --no-index --no-deps --no-build-isolation --editable .
else
    echo "== torch $torch; installing megatron-core, this project and what its tests need into $venv"
    # torch stays as it is, and what it has brought: packages of CUDA and triton.
    { grep -v '^torch==' constraints.txt; echo "torch==$torch"; } > "$venv/constraints.txt"
    "${install[@]}" --constraint "$venv/constraints.txt" --editable '.[test-gpu]'
fi
"$python" -W ignore -m tests.gpu_stages.missing_packages ||
    fail "$venv lacks these packages: ${offline:+add their wheels to $offline, or }make $venv again"

name=cpu half=bf16
if [ "$device" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=''
else
    IFS=$'\t' read -r cuda capability name < <("$python" -W ignore - <<'PYTHON'
import sys
import torch
try:
    torch.zeros(1, device="cuda")
except (RuntimeError, AssertionError) as error:
    sys.exit(f"scripts: everything is installed, and the first call of CUDA fails ({str(error).splitlines()[0]}); run "
             "this where there is a GPU, or with DEVICE=cpu to rehearse")
print(torch.version.cuda.split(".")[0], "%d%d" % torch.cuda.get_device_capability(), torch.cuda.get_device_name(), sep="\t")
PYTHON
    ) || exit 2
    echo "== $name, compute capability $capability, CUDA $cuda"
    [ "$capability" -ge 80 ] || half=fp16
    # Ranks can share a device from NCCL 2.30 on. torch finds its own one first, unless another is loaded before it.
    [ -n "$offline" ] || "${install[@]}" --no-deps "nvidia-nccl-cu$cuda>=2.30" ||
        echo "scripts: no newer NCCL: tests of several ranks are skipped"
    nccl="$(find "$venv" ${offline:+"$offline"} -name libnccl.so.2 -print -quit)"
    if [ -n "$nccl" ]; then
        nccl="$(realpath "$nccl")"
        # The loader splits its list at spaces and colons, and has no way to quote them.
        [[ "$nccl" != *[\ :]* ]] || { link="$(mktemp -d)"; ln -s "$nccl" "$link"; nccl="$link/libnccl.so.2"; }
        export LD_PRELOAD="$nccl${LD_PRELOAD:+:$LD_PRELOAD}"
    fi
    [ -n "$offline" ] || [ -z "$engine" ] || [ "$capability" -lt 80 ] || build_engine "$cuda"
fi

# In place of this shell, so that a signal ends the stages.
exec "$python" -m tests.gpu_stages --device "$device" --device-name "$name" --half "$half" "${stages[@]}"
