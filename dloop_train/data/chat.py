"""Chat: the one place where messages become prompt ids, for generating, caching and evaluating alike."""

from dloop_train.config import TargetConfig


def prompt_ids(tokenizer, messages: list[dict[str, str]], target: TargetConfig) -> list[int]:
    """Ids of the rendered conversation, the assistant's header included, the target's thinking mode applied."""
    switches = {} if target.thinking is None else {"enable_thinking": target.thinking}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **switches)
    # The template already writes the special tokens; adding them again would double the BOS of Llama.
    return tokenizer(text, add_special_tokens=False)["input_ids"]
