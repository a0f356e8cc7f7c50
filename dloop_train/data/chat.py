"""Chat: the one place where messages become prompt ids, and ids the text that is shown, for all phases alike."""

from collections.abc import Iterable, Iterator

from dloop_train.config import TargetConfig


def prompt_ids(tokenizer, messages: list[dict[str, str]], target: TargetConfig) -> list[int]:
    """Ids of the rendered conversation, the assistant's header included, the target's thinking mode applied."""
    switches = {} if target.thinking is None else {"enable_thinking": target.thinking}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **switches)
    # The template already writes the special tokens; adding them again would double the BOS of Llama.
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def pieces(tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text that each token adds; nothing while a character is not whole yet. Special tokens are not shown."""
    shown, seen = "", []
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen, skip_special_tokens=True)
        if text.endswith("\ufffd"):
            yield ""
        else:
            yield text[len(shown) :]
            shown = text
