"""A tokenizer of bytes, one of letters, and one of numbers."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import BatchEncoding, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if terse %}!{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}"
)

# A conversation begins with its earlier prompt and answer, as in most models' templates.
GROWING = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if terse %}!{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(template=None, merges=()):
    """One token per byte, so that characters beyond ASCII are cut anywhere, and ``merges``; </s> stops."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = ["</s>", *alphabet, *map("".join, merges)]
    vocab = {letter: number for number, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


class NumberTokenizer:  # enough of a tokenizer for pages and the demo: a prompt of four ids in, numbers out
    eos_token_id, chat_template = None, "four ids of each message"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def __call__(self, text, return_tensors=None):
        if isinstance(text, list):
            return BatchEncoding({"input_ids": [self(one)["input_ids"] for one in text]})
        ids = [len(text) % self.vocab_size, 5, 6, 7]
        if return_tensors == "pt":
            row = torch.tensor([ids])
            return BatchEncoding({"input_ids": row, "attention_mask": torch.ones_like(row)})
        return BatchEncoding({"input_ids": ids})

    def apply_chat_template(self, messages, **options):
        assert options["return_dict"]
        ids = [token for message in messages for token in self(message["content"])["input_ids"]]
        if options.get("return_tensors") == "pt":
            row = torch.tensor([ids])
            return {"input_ids": row, "attention_mask": torch.ones_like(row)}
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def decode(self, ids, **options):
        return " ".join(str(int(token)) for token in ids)


def letters():
    """A tokenizer whose token i is one letter, and the letters."""
    names = {chr(97 + i if i < 26 else 0x100 + i): i for i in range(96)} | {"<unk>": 96}
    tokenizer = Tokenizer(models.WordLevel(names, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"unk_token": "<unk>", "pad_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special), list(names)
