"""Plan: samples, learning rate and N of each step, and their division over ranks."""

from dataclasses import dataclass, field

from dloop_train.config import TrainConfig
from dloop_train.data.batches import micro_batches, plan_epoch, share_out
from dloop_train.training.schedule import learning_rate


@dataclass(frozen=True)
class Plan:
    """All steps of a training, as a function of the data and the settings.

    The samples of a step do not depend on the number of ranks.
    """

    lengths: tuple[int, ...]
    settings: TrainConfig
    orders: dict[int, list[list[int]]] = field(default_factory=dict, compare=False, repr=False)
    """Cache of the orders of the latest epochs."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.lengths) // self.settings.batch_size)

    @property
    def base_steps(self) -> int:
        """Number of steps of the base recipe, which come first."""
        return round(self.settings.base_epochs * self.steps_per_epoch)

    @property
    def steps(self) -> int:
        return self.base_steps + (self.settings.steps or max(1, round(self.settings.epochs * self.steps_per_epoch)))

    def depth_exposure(self, step: int) -> int:
        """N of a step."""
        return 0 if step < self.base_steps else self.settings.depth_exposure

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step. The base and the loop-aware recipe have separate warm-ups and decays."""
        if step < self.base_steps:
            return learning_rate(step, self.base_steps, self.settings.base_lr, self.settings.warmup)
        return learning_rate(
            step - self.base_steps, self.steps - self.base_steps, self.settings.lr, self.settings.warmup
        )

    def progress(self, step: int) -> float:
        """Completed share of the training, in [0, 1], for schedules in a family's loss.

        It is 1 from the end of the base steps on, or without base steps at the end of all steps.
        """
        return min(step / (self.base_steps or self.steps), 1.0)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def samples(self, step: int) -> list[int]:
        """Indices of a step's samples; the last step of an epoch may have fewer."""
        epoch = self.epoch(step)
        order = self.orders.get(epoch)  # keeps two epochs, since the loading thread may be one ahead
        if order is None:
            order = plan_epoch(self.lengths, self.settings.batch_size, self.settings.seed, epoch)
            self.orders.pop(epoch - 2, None)
            self.orders[epoch] = order
        return order[step % self.steps_per_epoch]

    def micro_batches(self, ranks: int) -> int:
        """Number of micro-batches that each rank runs in a step."""
        total = -(-self.settings.batch_size // self.settings.micro_batch_size)
        return -(-total // ranks)

    def shares(self, step: int, ranks: int) -> list[list[list[int]]]:
        """The micro-batches of a step for each rank, as lists of sample indices. Missing ones are empty lists."""
        micros = micro_batches(self.samples(step), self.settings.micro_batch_size)
        return share_out(micros, self.lengths, ranks, self.micro_batches(ranks))

    @property
    def shortest(self) -> int:
        """Index of the shortest sample. It is run, with masked origins, in place of an empty micro-batch."""
        return min(range(len(self.lengths)), key=self.lengths.__getitem__)
