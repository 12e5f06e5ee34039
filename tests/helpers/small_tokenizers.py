"""Trains tokenizers of each kind on one sentence."""

import json
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers


def write_tokenizer(folder: Path, *special: str) -> Path:
    """A small byte-pair tokenizer with these special tokens, as ``folder/tokenizer.json``."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["to be or not to be, that is the question"] * 4, trainer)
    model.enable_truncation(3)
    model.enable_padding(length=8)
    model.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_word_level(folder: Path, *, special: Sequence[str], words: Sequence[str], begin: str = "") -> Path:
    """A tokenizer of whole words with ids from 0 on, special tokens first, as ``folder/tokenizer.json``.

    begin: the special token that its post-processor puts in front of each text.
    """
    vocabulary = {token: i for i, token in enumerate([*special, *words])}
    model = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(list(special))
    if begin:
        model.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
        )
    model.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_gpt2(folder: Path) -> None:
    """The same tokenizer as ``folder/tokenizer.json`` and as GPT-2's ``vocab.json`` and ``merges.txt``."""
    model = json.loads(write_tokenizer(folder, "<|endoftext|>").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]))


def write_sentencepiece(folder: Path, *, bos_id: int = 1, eos_id: int = 2) -> Path:
    """A small SentencePiece model, as ``folder/tokenizer.model``; -1 leaves a token out."""
    file = folder / "tokenizer.model"
    with file.open("wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["to be or not to be, that is the question"] * 4),
            model_writer=out,
            vocab_size=30,
            hard_vocab_limit=False,
            minloglevel=2,
            bos_id=bos_id,
            eos_id=eos_id,
        )
    return file
