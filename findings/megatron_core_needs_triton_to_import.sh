#!/usr/bin/env bash
# megatron-core 0.18 and newer cannot be imported where torch has no Triton, even for a dense model.
#
# Expected: the layer specs of a GPT model import wherever the wheel's own requirements (torch, numpy, packaging) are
#     met, as with 0.17: builds of torch for processors do not bring Triton.
# Happens:  moe_layer imports moe/paged_stash.py, which imports triton without a guard; every GPT layer spec imports
#     moe_layer.
# Version:  megatron-core 0.17.1, 0.18.2, 0.19.2 (Python 3.12, named by PYTHON312), torch 2.15.0 with its triton removed.
#     Source: megatron/core/transformer/moe/paged_stash.py and ops/paged_stash.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON312:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6 packaging==26.3
"$folder/venv/bin/pip" uninstall -q -y triton
for version in 0.17.1 0.18.2 0.19.2; do
    "$folder/venv/bin/pip" install -q --no-deps "megatron-core==$version"
    said=$("$folder/venv/bin/python" -W ignore -c 'import megatron.core.models.gpt.gpt_layer_specs' 2>&1) && said='imports'
    echo "$version ${said##*$'\n'}"
done | tee "$folder/seen"
# Seen:
diff "$folder/seen" - <<'END'
0.17.1 imports
0.18.2 ModuleNotFoundError: No module named 'triton'
0.19.2 ModuleNotFoundError: No module named 'triton'
END
