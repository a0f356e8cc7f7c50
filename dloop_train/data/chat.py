"""Chat: converts messages to prompt ids, and tokens to displayed text, for all phases."""

from collections.abc import Iterable, Iterator

from dloop_train.config import TargetConfig


def prompt_ids(tokenizer, messages: list[dict[str, str]], target: TargetConfig) -> list[int]:
    """Ids of the rendered conversation, with the assistant's header and the target's thinking mode."""
    switches = {} if target.thinking is None else {"enable_thinking": target.thinking}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **switches)
    # The template already contains the special tokens. Adding them again would double the BOS of Llama.
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def pieces(tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text that each token adds, empty while a character is incomplete. Special tokens are not shown."""
    shown, seen = "", []
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen, skip_special_tokens=True)
        if text.endswith("\ufffd"):
            yield ""
        else:
            yield text[len(shown) :]
            shown = text
