"""The training loop of target and drafters: resumable, and repeatable for a number of steps."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from cluster.engine.device import computes
from cluster.errors import ConfigError
from cluster.train.dataset import Tokens, WindowOrder
from cluster.train.optimizer import Optimizers, Rates
from cluster.train.processes import of_first_process, process_count, rank, sum_gradients

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")
Batch_co = TypeVar("Batch_co", covariant=True)


class Order(Protocol[Batch_co]):
    """What is read when, fixed by a seed, so that a resumed run needs only how much it has read."""

    def read(self, first: int, count: int) -> Batch_co:
        """Rows `first` to `first + count` of the endless order."""
        ...


# Maps windows, int64[rows, length + 1], to the mean loss in nats per token.
Objective = Callable[[torch.Tensor], torch.Tensor]
# Called from time to time with the number of finished steps.
Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Phase:
    """After the part `start` of the budget, micro-batches are `rows` windows of `length` tokens."""

    start: float
    length: int
    rows: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Either a number of steps (repeatable) or a number of minutes."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("give either a number of steps or a number of minutes")
        if (self.steps or self.minutes or 0) <= 0:
            raise ConfigError("the budget must be positive")

    def progress(self, num_steps: int, elapsed_s: float) -> float:
        """The part of the budget that is spent, from 0 to 1."""
        if self.steps is not None:
            return min(1.0, num_steps / self.steps)
        assert self.minutes is not None
        return min(1.0, elapsed_s / (60.0 * self.minutes))


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """All settings that affect the weights, except the data and the objective."""

    budget: Budget
    phases: Sequence[Phase]
    tokens_per_step: int
    seed: int
    rates: Rates = field(default_factory=Rates)
    checkpoint_every_s: float = 180.0
    report_every_s: float = 300.0

    def phase_at(self, progress: float) -> int:
        """Index of the phase at this part of the budget."""
        return max(index for index, item in enumerate(self.phases) if item.start <= progress)


@dataclass(slots=True)
class Position:
    """The progress of a run; with weights and optimiser state enough to resume it."""

    num_steps: int = 0
    elapsed_s: float = 0.0
    windows_read: list[int] = field(default_factory=list)


def window_orders(streams: Sequence[Tokens], settings: TrainSettings) -> list[WindowOrder]:
    """Windows of token streams in the length of each phase."""
    return [WindowOrder(streams, phase.length, settings.seed) for phase in settings.phases]


class Trainer(Generic[Batch]):
    """Runs an objective over what the orders give, one for each phase, to the budget's end."""

    def __init__(
        self,
        network: nn.Module,
        objective: Callable[[Batch], torch.Tensor],
        orders: Sequence[Order[Batch]],
        settings: TrainSettings,
        checkpoint: Path | None = None,
    ) -> None:
        self._network = network
        self._objective = objective
        self._settings = settings
        self._checkpoint = checkpoint
        self._optimizers = Optimizers(network, settings.rates)
        self._parameters = [each for each in network.parameters() if each.requires_grad]
        self._orders = orders
        self.position = Position(windows_read=[0] * len(settings.phases))
        self.loss_nats = float("nan")

    def run(
        self,
        report: Report | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_steps: int | None = None,
    ) -> None:
        """Train to the end of the budget, or for at most `max_steps` more steps."""
        settings, position = self._settings, self.position
        began_s = clock() - position.elapsed_s
        saved_s = reported_s = position.elapsed_s
        stop_at = None if max_steps is None else position.num_steps + max_steps
        bar = tqdm(
            total=settings.budget.steps,
            initial=position.num_steps,
            unit="step",
            disable=rank() > 0,
        )
        while (progress := settings.budget.progress(position.num_steps, position.elapsed_s)) < 1.0:
            if stop_at is not None and position.num_steps >= stop_at:
                break
            self._step(progress)
            position.elapsed_s = of_first_process(clock() - began_s)
            bar.update()
            bar.set_postfix_str(f"loss {self.loss_nats:.3f} budget {progress:.1%}")
            if position.elapsed_s - reported_s >= settings.report_every_s:
                reported_s = position.elapsed_s
                if report is not None and rank() == 0:
                    report(position.num_steps)
            if position.elapsed_s - saved_s >= settings.checkpoint_every_s:
                saved_s = position.elapsed_s
                self.save()
        bar.close()
        self.save()

    def save(self) -> None:
        """Write the checkpoint, replacing the previous one atomically."""
        if self._checkpoint is None or rank() > 0:
            return
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._checkpoint.with_suffix(".tmp")
        torch.save(
            {
                "network": self._network.state_dict(),
                "optimizers": self._optimizers.state_dict(),
                "num_steps": self.position.num_steps,
                "elapsed_s": self.position.elapsed_s,
                "windows_read": self.position.windows_read,
                "random": torch.get_rng_state(),
            },
            unfinished,
        )
        os.replace(unfinished, self._checkpoint)
        log.info("checkpoint saved steps=%s path=%s", self.position.num_steps, self._checkpoint)

    def resume(self) -> bool:
        """Continue from the checkpoint; returns False if there is none."""
        if self._checkpoint is None or not self._checkpoint.exists():
            return False
        state = torch.load(self._checkpoint, weights_only=True)
        self._network.load_state_dict(state["network"])
        self._optimizers.load_state_dict(state["optimizers"])
        self.position = Position(state["num_steps"], state["elapsed_s"], state["windows_read"])
        torch.set_rng_state(state["random"])
        position = self.position
        log.info("resumed steps=%s path=%s", position.num_steps, self._checkpoint)
        if self._settings.budget.progress(position.num_steps, position.elapsed_s) >= 1.0:
            log.warning("nothing left to train; remove %s to start over", self._checkpoint)
        return True

    def _step(self, progress: float) -> None:
        index = self._settings.phase_at(progress)
        phase, order = self._settings.phases[index], self._orders[index]
        num_micro = max(1, self._settings.tokens_per_step // (phase.length * phase.rows))
        total = 0.0
        for micro in range(rank(), num_micro, process_count()):
            first = self.position.windows_read[index] + micro * phase.rows
            loss = self._objective(order.read(first, phase.rows))
            (loss / num_micro).backward()  # type: ignore[no-untyped-call]  # unannotated in torch
            total += loss.item() * process_count()
        self.position.windows_read[index] += num_micro * phase.rows
        sum_gradients(self._parameters)
        self._optimizers.step(progress)
        self.position.num_steps += 1
        self.loss_nats = total / num_micro


def compile_objective(objective: Objective) -> Objective:
    """Compile the objective per window shape; without a C++ compiler return it unchanged."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        log.warning("no C++ compiler found; training runs eagerly, about a third slower")
        return objective
    return torch.compile(objective, dynamic=False)


def mixed_precision() -> torch.autocast:
    """Autocast to bfloat16 if the processor supports it; emulated, it is several times slower.

    Create it once, outside compiled code, because the compiler would trace the check.
    """
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=computes(torch.bfloat16))


def language_loss(network: nn.Module) -> Objective:
    """Next-token cross-entropy in mixed precision, with the softmax in float32."""
    precision = mixed_precision()

    def loss(windows: torch.Tensor) -> torch.Tensor:
        with precision:
            logits = network(input_ids=windows[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    return loss
