#!/usr/bin/env bash
# transformers 5 forgets a changed eos_token where a folder still has the special_tokens_map.json of version 4.
#
# Expected: save_pretrained into the folder that a tokenizer was loaded from, then from_pretrained, gives the tokenizer
#     that was saved, as with transformers 4.
# Happens:  version 5 writes eos_token into tokenizer_config.json alone, leaves special_tokens_map.json as it is, and on
#     loading lets that older file overrule the newer one. What ends generation, and a document in Megatron-LM, is the
#     token from before the change.
# Version:  transformers 5.23.0; 4.57.1 for comparison. Source: PreTrainedTokenizerBase._from_pretrained of 5.23.0,
#     "Legacy: read special_tokens_map.json and merge into init_kwargs", and its save_pretrained.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'END'
import sys
from pathlib import Path

import tokenizers
import transformers

step, folder = sys.argv[1], Path(sys.argv[2])
if step == "make":
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<eos>": 1, "<turn>": 2, "a": 3}, "<unk>"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="<eos>")
    made.save_pretrained(folder)
else:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<turn>"
    tokenizer.save_pretrained(folder)
    print(transformers.__version__, transformers.AutoTokenizer.from_pretrained(folder).eos_token)
END
for version in 4.57.1 5.23.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q "transformers==$version"
done
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
for version in 4.57.1 5.23.0; do
    "$folder/4.57.1/bin/python" "$folder/try.py" make "$folder/model-$version" 2>/dev/null
    "$folder/$version/bin/python" "$folder/try.py" change "$folder/model-$version" 2>/dev/null
done | tee "$folder/seen"
# Seen:
#   4.57.1 <turn>
#   5.23.0 <eos>
diff "$folder/seen" <(printf '4.57.1 <turn>\n5.23.0 <eos>\n')
