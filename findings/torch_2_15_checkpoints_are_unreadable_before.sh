#!/usr/bin/env bash
# A checkpoint that torch.distributed.checkpoint of torch 2.15 saved cannot be loaded by torch 2.14 or older.
#
# Expected: a new field of the metadata is left out, or ignored, by who does not know it: the tensors are stored as before,
#     and a run that goes back one release of torch goes on.
# Happens:  2.15 adds `strides` to TensorProperties and to the tuple that it is pickled as; __setstate__ of older versions
#     unpacks five values and fails on the sixth, before a tensor is read. The other way round it loads. megatron-core's
#     torch_dist format has the same file.
# Version:  torch 2.15.0 and 2.14.1, Python 3.12 (named by PYTHON312). Source: TensorProperties.__getstate__ and
#     __setstate__ in torch/distributed/checkpoint/metadata.py of both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'END'
import sys

import torch
import torch.distributed.checkpoint as dcp

step, folder = sys.argv[1:]
state = {"weight": torch.arange(4.0) if step == "save" else torch.zeros(4)}
version = torch.__version__.partition("+")[0]
if step == "save":
    dcp.save(state, checkpoint_id=folder)
else:
    try:
        dcp.load(state, checkpoint_id=folder)
        print(version, "loads", state["weight"].tolist())
    except dcp.api.CheckpointException as error:
        print(version, "fails:", "too many values to unpack (expected 5)" in str(error))
END
for version in 2.14.1 2.15.0; do
    "${PYTHON312:-python3.12}" -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q "torch==$version" numpy==2.4.6
    "$folder/$version/bin/python" -W ignore "$folder/try.py" save "$folder/of-$version" 2> /dev/null
done
for saved in 2.14.1 2.15.0; do
    for version in 2.14.1 2.15.0; do
        echo "saved by $saved:" "$("$folder/$version/bin/python" -W ignore "$folder/try.py" load "$folder/of-$saved" 2> /dev/null)"
    done
done | tee "$folder/seen"
# Seen:
diff "$folder/seen" - <<'END'
saved by 2.14.1: 2.14.1 loads [0.0, 1.0, 2.0, 3.0]
saved by 2.14.1: 2.15.0 loads [0.0, 1.0, 2.0, 3.0]
saved by 2.15.0: 2.14.1 fails: True
saved by 2.15.0: 2.15.0 loads [0.0, 1.0, 2.0, 3.0]
END
