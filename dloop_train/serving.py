"""Serving: load an exported drafter with its target, and stream tokens through the gated loop."""

from collections.abc import Iterator
from pathlib import Path

from dloop_train.checkpoints.files import SECTION, layout_of, load_drafter, read_config, read_shape
from dloop_train.config import TargetConfig, build, check, option
from dloop_train.data.chat import pieces, prompt_ids
from dloop_train.decoding.gates import DLoop, Gate, Never
from dloop_train.decoding.loop import Emission, decode
from dloop_train.decoding.rules import Rejection
from dloop_train.drafters.base import Drafter, DrafterConfig
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import as_dtype, load_target
from dloop_train.targets.target import Target


class LoopedModel:
    """A target with a loop-aware drafter. Its output is exactly the target's, greedy or sampled at a temperature."""

    def __init__(self, target: Target, drafter: Drafter, gate: Gate, config: TargetConfig):
        self.target, self.drafter, self.gate, self.config = target, drafter, gate, config

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation as ids, the assistant's header included."""
        return prompt_ids(self.target.tokenizer, messages, self.config)

    def emissions(
        self, ids: list[int], *, max_new_tokens: int = 512, temperature: float = 0.0, seed: int = 0, plain: bool = False
    ) -> Iterator[Emission]:
        """Yield the rounds that continue `ids` as they are decoded.

        `plain` decodes without the drafter. Above temperature 0 another seed gives another text.
        """
        drafter, gate = (None, Never()) if plain else (self.drafter, self.gate)
        return decode(
            self.target,
            drafter,
            gate,
            ids,
            max_new_tokens=max_new_tokens,
            rule=Rejection(temperature=temperature, seed=seed),
        )

    def tokens(
        self, ids: list[int], *, max_new_tokens: int = 512, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        """Yield the token ids that continue `ids`, after the verification of each round."""
        for emission in self.emissions(ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed):
            yield from emission.tokens

    def generate(
        self, prompt: str | list[dict[str, str]], *, max_new_tokens: int = 512, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[str]:
        """Stream the answer to a user's text, or to a list of messages."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        tokens = self.tokens(
            self.prompt_ids(messages), max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        )
        yield from (text for text in pieces(self.target.tokenizer, tokens) if text)


def load(
    folder: str | Path,
    target: str | TargetConfig,
    *,
    device: str | None = None,
    dtype: str | None = None,
    threshold: float | None = None,
) -> LoopedModel:
    """An exported drafter and its target (a name of conf/target/, or a TargetConfig), ready to stream.

    The gate's threshold is the export's unless one is given. Raises ValueError if there is neither.
    """
    folder = Path(folder)
    config = build(option("target", target), TargetConfig, "target") if isinstance(target, str) else target
    model = load_target(config, dtype=dtype, device=device)
    section = read_config(folder).get(SECTION)
    check(
        threshold is not None or (section or {}).get("threshold") is not None,
        f"{folder}/config.json names no threshold in a dloop section: it is not loop-aware. "
        "Pass threshold= to loop it anyway",
    )
    section = section or {}
    drafter = (
        load_drafter(
            folder,
            settings_for(folder, section),
            TargetHead.of(model),
            dtype=as_dtype(dtype or config.dtype),
            target=model.spec,
        )
        .to(model.device)
        .eval()
    )
    gate = DLoop(
        threshold=section["threshold"] if threshold is None else threshold,
        max_stages=section.get("max_stages", 16),
        temperature=section.get("temperature", 1.0),
    )
    return LoopedModel(model, drafter, gate, config)


def settings_for(folder: Path, section: dict) -> DrafterConfig:
    """The settings of a checkpoint: the YAML of its family, with the values of the checkpoint and of its `section`."""
    family = layout_of(read_config(folder), folder).FAMILY
    values, shape = option("drafter", family), read_shape(folder)
    if shape.alignment:
        values |= {"alignment": shape.alignment, "state": shape.state, "slot": shape.slot}
    return build(values, DrafterConfig, "drafter").as_exported(section)
