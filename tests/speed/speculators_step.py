"""The training step of the speculators package (0.9.0), if installed, for comparison on equal data.

Models and losses are the package's own; sizes, texts and features are ours. Differences from our step at S = 1:

- It packs the sequences into one row with a document mask.
- Weights stay in fp32 and compute in bf16 under autocast.
- Block drafters are compared with the target's argmax or distribution, for which the target's logits of all slots are
  computed. Ours have cross-entropy with the text's tokens.
- EAGLE-3 drafts from every position, not from sampled origins.
- Anchors are drawn again in every step.
- DFlash's alignment is fill-in unless it samples from the anchor.
"""

import contextlib
import importlib.util
import logging

import torch
from torch import Tensor

FAMILIES = ("dflash", "eagle3")
INSTALL = (
    "pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 openai 'loguru<=0.7.3' "
    "pydantic-settings python-dotenv"
)


def why_not(family: str) -> str | None:
    """The reason why the package cannot be compared for a family; None if it can."""
    if family not in FAMILIES:
        return f"the package is compared for {', '.join(FAMILIES)}"
    return f"not installed ({INSTALL})" if importlib.util.find_spec("speculators") is None else None


class SpeculatorsStep:
    """A model of the package, its optimiser, and the batch as its trainer would pack it."""

    def __init__(self, bench):
        logging.getLogger("speculators").setLevel(logging.ERROR)
        self.bench, self.device = bench, bench.batch.tokens.device
        self.model = (eagle3 if bench.family == "eagle3" else dflash)(bench).to(self.device)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(self.trained, lr=1e-5)
        self.inputs = packed(bench, shifted=bench.family == "eagle3")
        self.call = call_arguments(bench)

    def loss(self) -> Tensor:
        low = self.bench.wanted.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16) if low else contextlib.nullcontext():
            return self.model(**self.inputs, **self.call)[1]

    def update(self) -> None:
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def held(self) -> int:
        state = [tensor for states in self.optimiser.state.values() for tensor in states.values()]
        tensors = [*self.model.parameters(), *state, *self.inputs.values()]
        return sum(
            {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values()
        )

    @property
    def origins(self) -> int:
        """Number of blocks or positions that it drafts from."""
        return int(self.inputs["loss_mask"].sum()) if self.bench.family == "eagle3" else self.call["max_anchors"]


def layer_config(bench, kind: str):
    """The drafter's layer as a transformers config."""
    from transformers import AutoConfig

    sizes = bench.drafter.shape.layers[0]
    config = AutoConfig.for_model(
        kind,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=sizes.rms_norm_eps,
        rope_theta=sizes.rope.theta,
        vocab_size=bench.spec.vocab_size,
        num_hidden_layers=len(bench.drafter.layers),
        max_position_embeddings=8192,
        pad_token_id=None,
    )
    config._attn_implementation = "simple_flex_attention" if bench.batch.tokens.device.type == "cuda" else "eager"
    return config


def dflash(bench):
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    shape = bench.drafter.shape
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer_config(bench, "qwen3"),
        draft_vocab_size=shape.vocab_size,
        block_size=shape.width,
        mask_token_id=shape.mask_token_id,
        aux_hidden_state_layer_ids=list(shape.taps),
        sample_from_anchor=shape.alignment == "shifted",
    )
    return with_head(DFlashDraftModel(config), bench)


def eagle3(bench):
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    shape = bench.drafter.shape
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(bench, "llama"),
        draft_vocab_size=shape.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(shape.taps),
    )
    model = with_head(Eagle3DraftModel(config), bench)
    model.lm_head.weight.requires_grad_(bench.drafter.lm_head is not None)
    return model


def with_head(model, bench):
    """Copy the target's embedding and head into a model; the package initialises them with NaN."""
    head, rows = bench.drafter.head, model.draft_vocab_size
    with torch.no_grad():
        model.embed_tokens.weight.copy_(head.embed_weight)
        model.verifier_lm_head.weight.copy_(head.lm_head_weight[:rows])
        model.lm_head.weight.copy_(head.lm_head_weight[:rows])
    return model.train()


def packed(bench, *, shifted: bool) -> dict[str, Tensor]:
    """All sequences in one row.

    `shifted`, for chains, pairs a feature with the next token as the package's shift_batch does.
    """
    batch, cut = bench.batch, slice(1, None) if shifted else slice(None)
    count, length = batch.tokens[:, cut].shape
    device = batch.tokens.device
    return {
        "hidden_states": batch.features[:, :length].flatten(0, 1)[None],
        "verifier_last_hidden_states": batch.last_hidden[:, cut].flatten(0, 1)[None],
        "input_ids": batch.tokens[:, cut].flatten()[None],
        "loss_mask": batch.loss_mask[:, cut].flatten()[None],
        "document_ids": torch.arange(count, device=device).repeat_interleave(length)[None],
        "position_ids": torch.arange(length, device=device).repeat(count)[None],
    }


def call_arguments(bench) -> dict:
    from speculators.losses import resolve_loss_config

    implementation = "fused" if bench.batch.tokens.device.type == "cuda" else "eager"
    if bench.family == "eagle3":
        return {
            "loss_config": resolve_loss_config("kl_div", implementation),
            "ttt_steps": bench.drafter.k,
            "ttt_step_loss_decay": bench.drafter.decay,
        }
    return {
        "loss_config": resolve_loss_config("ce", implementation),
        "gamma": bench.drafter.gamma,
        "max_anchors": bench.batch.tokens.shape[0] * bench.wanted.origins,
    }
