#!/usr/bin/env bash
# A graph of torch.compile for any number of rows is not used for a view that begins at another place in memory.
#
# Expected: mark_unbacked(rows, 0) before each call promises that nothing depends on the number of rows, so one graph serves
#     all slices of a tensor, such as the tokens of one expert after another.
# Happens:  if the first slice begins 2 or more elements into its memory, the graph is guarded by "2 <= storage_offset()",
#     and a slice that begins at 0 or 1 is compiled again. If the first slice begins at 0, one graph serves all. detach()
#     changes nothing, a copy of each slice does. The compiler's reason names 0/1 specialization, and its advice is
#     mark_unbacked, which takes a dimension and knows no offset.
# Version:  torch 2.13.0 (Python 3.11, named by PYTHON311). Source: torch/_dynamo/variables/builder.py,
#     torch/fx/experimental/symbolic_shapes.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'END'
import torch
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounter


def count_graphs(starts, prepare):
    torch._dynamo.reset()
    counter = CompileCounter()
    double = torch.compile(lambda rows: rows * 2, backend=counter)
    for start in starts:
        rows = prepare(torch.ones(16)[start : start + 3])
        mark_unbacked(rows, 0)
        double(rows)
    return counter.frame_count


print(torch.__version__.partition("+")[0])
for starts in ((5, 0, 1, 7), (0, 5, 1, 7)):
    for prepare in (lambda rows: rows, torch.Tensor.detach, torch.Tensor.clone):
        print(*starts, getattr(prepare, "__name__", "").replace("<lambda>", "slice"), count_graphs(starts, prepare))
END
"${PYTHON311:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore "$folder/try.py" 2> /dev/null | tee "$folder/seen"
# Seen:
diff "$folder/seen" - <<'END'
2.13.0
5 0 1 7 slice 2
5 0 1 7 detach 2
5 0 1 7 clone 1
0 5 1 7 slice 1
0 5 1 7 detach 1
0 5 1 7 clone 1
END
