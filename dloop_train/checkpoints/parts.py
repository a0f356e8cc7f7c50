"""What the public layouts have in common: keys that stand at one of two levels, layer types."""

from dloop_train.config import check


def one_of(key: str, *places: dict):
    """The value of a key that stands at the top level or in a nested section; contradicting values are an error."""
    found = [place[key] for place in places if place.get(key) is not None]
    check(bool(found), f"config.json has no {key}, at the top level or nested")
    check(all(value == found[0] for value in found), f"config.json has {key} twice with different values: {found}")
    return found[0]


def all_full_attention(config: dict) -> None:
    kinds = set(config.get("layer_types") or ["full_attention"])
    check(kinds == {"full_attention"}, f"layer_types has {sorted(kinds)}; only full_attention layers are supported")


def qwen3_keys(shape) -> dict:
    """The config.json keys that all layouts with Qwen3 layers write, for drafters of full attention."""
    return {"model_type": "qwen3", "num_target_layers": shape.num_target_layers, "num_hidden_layers": shape.num_layers, "vocab_size": shape.vocab_size,
            "layer_types": ["full_attention"] * shape.num_layers, "sliding_window": None, "use_sliding_window": False,
            "max_window_layers": shape.num_layers, "tie_word_embeddings": False, **shape.sizes.public()}
