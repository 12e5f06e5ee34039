#!/usr/bin/env bash
# Making any optimizer of torch imports torch's compiler and sympy, some 800 modules, whether anything is compiled or not.
#
# Expected: torch.optim.SGD([weight], lr=0.1) needs what `import torch` has loaded.
# Happens:  Optimizer.add_param_group is decorated with torch._disable_dynamo, whose first call imports torch._dynamo, and
#     with it sympy: about 0.4 s of a processor core in every process that trains, once.
# Version:  torch 2.13.0 (Python 3.11, named by PYTHON311). Source: torch/_compile.py, torch/optim/optimizer.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'END'
import sys

import torch

before = set(sys.modules)
torch.optim.SGD([torch.zeros(1)], lr=0.1)
new = set(sys.modules) - before
print(torch.__version__.partition("+")[0], "torch._dynamo" in before, "torch._dynamo" in new, "sympy" in new, len(new) > 500)
END
"${PYTHON311:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore "$folder/try.py" 2> /dev/null | tee "$folder/seen"
# Seen: the compiler was not there before, is there now, sympy too, and more than 500 modules are new.
diff "$folder/seen" - <<'END'
2.13.0 False True True True
END
