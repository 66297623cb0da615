"""The tokenizer: byte-level BPE, 2048 tokens, every digit a token of its own.

    python training/tokenizer.py

reads the corpus and writes `tokenizer.json` and `tokenizer_config.json` into the model's folder.
"""

from __future__ import annotations

from pathlib import Path

from corpus import read_corpus
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
MAX_LENGTH = 2048
MODEL_FOLDER = Path(__file__).resolve().parent.parent / "src/routebook/models/tiny"

# A word with the space before it; one digit; a run of punctuation; line breaks; other white space.
PIECES = r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"

# The model is no chat model: a conversation is the text of its messages, one a line.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def train(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer. Id 0 is the end-of-text token; no byte is out of vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    texts = [d.text for d in read_corpus() if d.split == "train"]
    tokenizer = train(texts)
    wrapped(tokenizer).save_pretrained(str(MODEL_FOLDER))
    characters = sum(map(len, texts))
    tokens = sum(len(e.ids) for e in tokenizer.encode_batch(texts))
    print(f"{tokenizer.get_vocab_size()} tokens, {characters / tokens:.2f} characters a token")


if __name__ == "__main__":
    main()
