"""A byte-level tokenizer with a chat template, for targets with random weights."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer(stop_id: int) -> PreTrainedTokenizerFast:
    """Ids 0..2 are <|pad|>, <|start|>, <|end|>; 3 is the mask; 4.. are the 256 bytes."""
    specials = ["<|pad|>", "<|start|>", "<|end|>", "<|mask|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(specials + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=specials[0],
        eos_token=specials[stop_id],
        additional_special_tokens=[specials[1], specials[3]],
    )
    fast.chat_template = TEMPLATE
    return fast
