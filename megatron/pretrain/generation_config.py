"""Says how text is generated from the model of a run: which tokens begin and end it, by the run's tokenizer."""

from typing import Any

from hetero.spec.hugging_face.generation import GenerationConfig
from megatron.pretrain.tokenizer import NullTokenizer, SentencePieceTokenizer, Tokenizer


def generation_config_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokens that training with ``tokenizer`` taught: its end of document ends a text.

    Nothing for a NullTokenizer, unless its end of document is given: its last id ends mock data, and data that was
    tokenized elsewhere may end in another.
    """
    if isinstance(tokenizer, NullTokenizer) and tokenizer.given_eod is None:
        return {}
    config: dict[str, Any] = {"eos_token_id": tokenizer.eod}
    if isinstance(tokenizer, SentencePieceTokenizer):
        named = {"bos_token_id": tokenizer.model.bos_id(), "pad_token_id": tokenizer.model.pad_id()}
        config |= {key: value for key, value in named.items() if value >= 0}
    return config


def generation_config_of_run(tokenizer: Tokenizer, loaded: GenerationConfig) -> dict[str, Any]:
    """Return what the checkpoints of a run say: what it started from says, and how its own documents end.

    Args:
        loaded: of the checkpoint that the run started from; empty if there is none. If its ends of a text include the
            end of document of training, all of them stay: a chat model has several.
    """
    own = generation_config_of(tokenizer)
    ends = loaded.get("eos_token_id")
    if own and own["eos_token_id"] in (ends if isinstance(ends, list) else [ends]):
        del own["eos_token_id"]
    return {**loaded, **own}
