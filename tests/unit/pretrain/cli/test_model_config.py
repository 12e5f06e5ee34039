"""The model that the flags describe, with its vocabulary."""

import pytest

from hetero.errors import ConfigError
from megatron.pretrain.cli.model_config import model_spec
from tests.helpers.flags import MOE, SCALED, parse


class TestModelSpec:
    def test_takes_the_tokenizers_vocabulary_and_pads_it(self) -> None:
        config = parse("--tokenizer-type ByteLevelTokenizer", without="--vocab-size").model
        spec = model_spec(config, tokenizer_vocab_size=257)
        assert (spec.vocab_size, spec.padded_vocab_size) == (257, 384)

    def test_takes_a_larger_vocabulary_from_the_flag(self) -> None:
        spec = model_spec(parse("--vocab-size 300").model, tokenizer_vocab_size=257)
        assert (spec.vocab_size, spec.padded_vocab_size) == (300, 384)

    def test_refuses_a_vocabulary_below_the_tokenizers(self) -> None:
        with pytest.raises(ConfigError, match="--vocab-size 100 is below the 257 tokens of the tokenizer"):
            model_spec(parse().model, tokenizer_vocab_size=257)

    @pytest.mark.parametrize(
        "flags",
        [
            "",
            "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
            "--position-embedding-type rope --rotary-base 500000 --group-query-attention --num-query-groups 2",
            f"{MOE} --moe-ffn-hidden-size 16",
            f"{SCALED} --rotary-base 500000.5 --disable-bias-linear --add-qkv-bias --hetero-add-proj-bias",
        ],
    )
    def test_has_every_other_number_of_the_model(self, flags: str) -> None:
        config = parse(flags).model
        spec = model_spec(config, tokenizer_vocab_size=100)
        shared = set(config.__slots__) - {"make_vocab_size_divisible_by"}
        assert shared | {"padded_vocab_size"} == set(spec.__slots__)
        assert {name: getattr(spec, name) for name in shared} == {name: getattr(config, name) for name in shared}
