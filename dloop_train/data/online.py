"""Online features: the target computes features of texts, in a training step or for the feature store."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from dloop_train.data.batches import TextBatch, collate
from dloop_train.data.responses import Response, Rows
from dloop_train.data.store import drafters_row, stored
from dloop_train.targets.target import Target
from dloop_train.types import FeatureSpec, Sample


def text_of(response: Response, max_length: int) -> Sample:
    """A sample without features, cut to `max_length` tokens."""
    tokens = torch.tensor((response.prompt_ids + response.response_ids)[:max_length])
    loss_mask = torch.arange(len(tokens)) >= len(response.prompt_ids)  # the answer and its end token
    return Sample(response.id, tokens, loss_mask, torch.empty(len(tokens), 0), torch.empty(len(tokens), 0))


def read_samples(
    target: Target, texts: Sequence[Sample], feature_spec: FeatureSpec, *, dtype: torch.dtype, batch_tokens: int
) -> Iterator[Sample]:
    """Texts with features in the store's layout, on the target's device. Shorter texts come first."""
    for batch in batches(texts, batch_tokens):
        yield from read_batch(target, batch, feature_spec, dtype)


def batches(texts: Sequence[Sample], batch_tokens: int) -> list[list[Sample]]:
    """Batches of texts of similar length, each with at most `batch_tokens` tokens after padding, or a single text."""
    grouped: list[list[Sample]] = [[]]
    for text in sorted(texts, key=lambda text: (len(text.tokens), text.id)):
        if grouped[-1] and len(text.tokens) * (len(grouped[-1]) + 1) > batch_tokens:
            grouped.append([])
        grouped[-1].append(text)
    return [batch for batch in grouped if batch]


def read_batch(target: Target, texts: Sequence[Sample], feature_spec: FeatureSpec, dtype: torch.dtype) -> list[Sample]:
    """One forward pass of the target.

    Padding is on the right, after all tokens that are attended to, so the default positions are correct.
    """
    tokens = torch.nn.utils.rnn.pad_sequence([text.tokens for text in texts], batch_first=True).to(target.device)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text.tokens) for text in texts], batch_first=True).to(
        target.device
    )
    output = target.read(tokens, mask=mask, feature_spec=stored(feature_spec))
    samples = []
    for number, text in enumerate(texts):
        rows = slice(0, len(text.tokens))
        features = (
            output.last_hidden.new_empty(len(text.tokens), 0)
            if output.features is None
            else output.features[number, rows]
        )
        samples.append(
            replace(text, features=features.to(dtype), last_hidden=output.last_hidden[number, rows].to(dtype))
        )
    return samples


@dataclass(frozen=True)
class Unread(TextBatch):
    """A batch whose features the target has not computed yet."""

    texts: tuple[Sample, ...] = ()


class OnlineSource:
    """A source that reads only responses; the target computes the features of each batch in its training step.

    Features are rounded to `dtype`, as in the feature store.
    """

    def __init__(
        self,
        responses: Rows[Response],
        target: Target,
        feature_spec: FeatureSpec,
        *,
        dtype: torch.dtype,
        max_length: int,
        batch_tokens: int,
    ):
        self.responses, self.target, self.feature_spec = responses, target, feature_spec
        self.dtype, self.max_length, self.batch_tokens = dtype, max_length, batch_tokens
        self.lengths = tuple(responses.lengths.clip(max=max_length).tolist())

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, indices: Sequence[int]) -> Unread:
        texts = tuple(text_of(self.responses[index], self.max_length) for index in indices)
        batch = collate(texts)
        return Unread(**{field.name: getattr(batch, field.name) for field in fields(TextBatch)}, texts=texts)

    def ready(self, batch: Unread, device: torch.device, dtype: torch.dtype) -> TextBatch:
        found = {
            sample.id: sample
            for sample in read_samples(
                self.target, batch.texts, self.feature_spec, dtype=self.dtype, batch_tokens=self.batch_tokens
            )
        }
        samples = [
            replace(found[text.id], features=drafters_row(found[text.id], self.feature_spec)) for text in batch.texts
        ]
        return collate(samples).to(device, dtype)
