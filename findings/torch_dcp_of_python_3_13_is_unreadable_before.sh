#!/usr/bin/env bash
# A checkpoint that torch.distributed.checkpoint saved on Python 3.13 cannot be loaded on Python 3.11 or 3.12.
#
# Expected: the same torch on another Python loads it: the tensors are plain bytes, and paths are no part of the state.
# Happens:  the pickled .metadata holds the folder as a pathlib.Path (StorageMeta.checkpoint_id), and Python 3.13 alone
#     names that class pathlib._local.PosixPath. An older Python has no such module and fails before it reads a tensor.
#     The other way round it loads. megatron-core's torch_dist format has the same file.
# Version:  torch 2.13.0; Python 3.12 and 3.13 (PYTHON312 and PYTHON313 name them). Source: StorageMeta in
#     torch/distributed/checkpoint/metadata.py, FileSystemWriter.storage_meta in filesystem.py; Lib/pathlib/_local.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'END'
import sys

import torch
import torch.distributed.checkpoint as dcp

step, folder = sys.argv[1:]
state = {"weight": torch.arange(4.0) if step == "save" else torch.zeros(4)}
version = f"{sys.version_info[0]}.{sys.version_info[1]}"
if step == "save":
    dcp.save(state, checkpoint_id=folder)
else:
    try:
        dcp.load(state, checkpoint_id=folder)
        print(version, "loads", state["weight"].tolist())
    except dcp.api.CheckpointException as error:
        print(version, "fails:", "No module named 'pathlib._local'" in str(error))
END
"${PYTHON312:-python3.12}" -m venv "$folder/3.12"
"${PYTHON313:-python3.13}" -m venv "$folder/3.13"
for version in 3.12 3.13; do
    "$folder/$version/bin/pip" install -q torch==2.13.0 numpy==2.4.6
    "$folder/$version/bin/python" -W ignore "$folder/try.py" save "$folder/of-$version" 2> /dev/null
done
for saved in 3.12 3.13; do
    for version in 3.12 3.13; do
        echo "saved on $saved:" "$("$folder/$version/bin/python" -W ignore "$folder/try.py" load "$folder/of-$saved" 2> /dev/null)"
    done
done | tee "$folder/seen"
# Seen:
diff "$folder/seen" - <<'END'
saved on 3.12: 3.12 loads [0.0, 1.0, 2.0, 3.0]
saved on 3.12: 3.13 loads [0.0, 1.0, 2.0, 3.0]
saved on 3.13: 3.12 fails: True
saved on 3.13: 3.13 loads [0.0, 1.0, 2.0, 3.0]
END
