#!/usr/bin/env bash
# megatron-core 0.18 and newer accept rampup_batch_size and train with the whole batch from the first step.
#
# Expected: a ramp-up of the batch that is given is carried out, as with 0.17, or refused.
# Happens:  init_num_microbatches_calculator builds the calculator of a constant batch and logs a deprecation; the class of
#     the ramp-up is gone, and Megatron-LM of the same wheel goes on to accept --rampup-batch-size. What is there instead
#     is step_batch_size_schedule.
# Version:  megatron-core 0.17.1, 0.18.2, 0.19.2 (Python 3.12, named by PYTHON312), torch 2.15.0. Source:
#     megatron/core/num_microbatches_calculator.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'END'
import importlib.metadata

from megatron.core import num_microbatches_calculator as calculator

# From 4 samples by 4 more to 12, over 16 samples.
calculator.init_num_microbatches_calculator(0, [4, 4, 16], 12, 1, 1)
sizes = []
for consumed in (0, 8, 16, 24):
    calculator.update_num_microbatches(consumed, consistency_check=False)
    sizes.append(calculator.get_current_global_batch_size())
print(importlib.metadata.version("megatron-core"), *sizes)
END
"${PYTHON312:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6 packaging==26.3
for version in 0.17.1 0.18.2 0.19.2; do
    "$folder/venv/bin/pip" install -q --no-deps "megatron-core==$version"
    "$folder/venv/bin/python" -W ignore "$folder/try.py" 2> /dev/null | tail -n 1
done | tee "$folder/seen"
# Seen:
diff "$folder/seen" - <<'END'
0.17.1 4 8 12 12
0.18.2 12 12 12 12
0.19.2 12 12 12 12
END
