"""The training loop, resumable, and repeatable for a number of steps; and where it runs."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.utils import broadcast, parse_flag_from_env, send_to_device
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from cluster.engine.device import computes
from cluster.errors import ConfigError
from cluster.records import frozen

log = logging.getLogger(__name__)

# Where training runs: one process on a GPU or the CPU, or several that share every step's work.
#
# `accelerate launch -m cluster.train ...` starts one process for each GPU, on several machines too.
# `run_together` starts single-threaded ones on the CPU: on cores shared with other work, threads
# wait for each other thousands of times per step, and each wait may last a scheduler's time slice;
# processes wait once per step.

# Processes wait so long for each other: while one measures, or draws the last answers.
_PATIENCE = timedelta(hours=2)


def processes() -> PartialState:
    """The processes of this run, and this one's index and device."""
    # accelerate reads the same variable.  Other devices than CPUs and GPUs are not served either.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    return PartialState(cpu=on_cpu, timeout=_PATIENCE)


def new_accelerator() -> Accelerator:
    """Mixes bfloat16 in where the device computes it; emulated, it is several times slower."""
    device = processes().device
    if device.type == "cuda":
        # The same seed is to give the same weights; cuBLAS wants to know before its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    precision = "bf16" if computes(torch.bfloat16, device) else "no"
    # Which parameters a batch reaches depends on it: short answers have no late drafts.
    gradients = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)
    return Accelerator(mixed_precision=precision, kwargs_handlers=[gradients])


def run_together(num_processes: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(*arguments)` in so many processes on the CPU; 1 = in this one, as it is."""
    if num_processes == 1:
        work(*arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{folder}/rendezvous"
        spawn(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            _member, (num_processes, meeting_point, work, arguments), nprocs=num_processes
        )


def _member(
    index: int,
    count: int,
    meeting_point: str,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    level = logging.INFO if index == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s")
    # As `torchrun` would, and that no GPU is used.
    os.environ |= {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    state = PartialState(cpu=True, init_method=meeting_point, timeout=_PATIENCE)
    try:
        work(*arguments)
    finally:
        state.destroy_process_group()


# Matrices between tokens and hidden rows, by a part of their name.
_OUTER = ("embed_tokens", "lm_head")


@frozen
class Rates:
    """Peak learning rates and the trapezoid that scales them.

    Rates rise linearly during the first `warmup` part of training, stay constant, and fall linearly
    to zero during the last `decay` part.
    """

    muon: float = 0.02
    adamw: float = 0.004
    warmup: float = 0.02
    decay: float = 0.55

    def scale(self, progress: float) -> float:
        """The factor on both rates when the part `progress` (0 to 1) of the budget is spent."""
        return max(0.0, min(1.0, (progress + 1e-3) / self.warmup, (1.0 - progress) / self.decay))


class _StaysFloat32(TorchFunctionMode):
    """Muon casts its iterations to bfloat16; where that is emulated one of them takes seconds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        is_cast = func is torch.Tensor.bfloat16 and not computes(torch.bfloat16, args[0].device)
        return args[0].clone() if is_cast else func(*args, **(kwargs or {}))


class Optimizers:
    """The two optimisers of named parameters, stepped together."""

    def __init__(self, trained: Mapping[str, nn.Parameter], rates: Rates) -> None:
        hidden: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in trained.items():
            is_hidden = parameter.ndim == 2 and not any(each in name for each in _OUTER)
            (hidden if is_hidden else others).append(parameter)
        self._parameters = hidden + others
        self._rates = rates
        # Each Newton-Schulz iteration costs about 2 % of a step on two cores; four nearly converge.
        muon = torch.optim.Muon(hidden, lr=rates.muon, weight_decay=0.03, momentum=0.95, ns_steps=4)
        adamw = torch.optim.AdamW(
            others, lr=rates.adamw, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
        )
        self._both: Mapping[str, torch.optim.Optimizer] = {"muon": muon, "adamw": adamw}

    def step(self, progress: float) -> None:
        """Apply the accumulated gradients with the rates at `progress`, and clear them."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._both.values():
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * self._rates.scale(progress)
            with _StaysFloat32():
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self._both.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, optimizer in self._both.items():
            optimizer.load_state_dict(state[name])


# Gives rows `first` to `first + count` of an endless order, which is fixed by a seed: a resumed run
# needs only how much it has read.
Order = Callable[[int, int], Any]


@frozen
class TrainingPhase:
    """After the part `start` of the budget, micro-batches are `rows` windows of `length` tokens."""

    start: float
    length: int
    rows: int


@frozen
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


@frozen
class TrainSettings:
    """All settings that affect the weights, except the data and the objective."""

    budget: Budget
    phases: Sequence[TrainingPhase]
    tokens_per_step: int
    seed: int
    rates: Rates = field(default_factory=Rates)
    checkpoint_every_s: float = 180.0


@dataclass(slots=True)
class Position:
    """The progress of a run; with weights and optimiser state enough to resume it."""

    num_steps: int = 0
    elapsed_s: float = 0.0
    windows_read: list[int] = field(default_factory=list)


class Trainer:
    """Minimises an objective over what the orders give, one for each phase, to the budget's end.

    objective: maps a batch to its mean loss.  What it holds is moved to this process's device; its
    parameters that want gradients are trained.
    """

    def __init__(
        self,
        objective: nn.Module,
        orders: Sequence[Order],
        settings: TrainSettings,
        checkpoint: Path | None = None,
    ) -> None:
        self._accelerator = new_accelerator()
        self._settings = settings
        self._checkpoint = checkpoint
        self._orders = orders
        self._trained = {
            name: each for name, each in objective.named_parameters() if each.requires_grad
        }
        self._optimizers = Optimizers(self._trained, settings.rates)
        self._objective = self._accelerator.prepare_model(objective)
        self.position = Position(windows_read=[0] * len(settings.phases))

    def run(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Train to the end of the budget, from the checkpoint on if there is one."""
        self._resume()
        settings, position = self._settings, self.position
        began_s = clock() - position.elapsed_s
        saved_s = position.elapsed_s
        bar = tqdm(
            total=settings.budget.steps,
            initial=position.num_steps,
            unit="step",
            disable=not self._accelerator.is_main_process,
        )
        while (progress := settings.budget.progress(position.num_steps, position.elapsed_s)) < 1.0:
            loss_nats = self._step(progress)
            # All processes go by the main one's clock.
            elapsed = torch.tensor(clock() - began_s, dtype=torch.float64)
            position.elapsed_s = float(broadcast(elapsed.to(self._accelerator.device)))
            bar.update()
            bar.set_postfix_str(f"loss {loss_nats:.3f} budget {progress:.1%}")
            if position.elapsed_s - saved_s >= settings.checkpoint_every_s:
                saved_s = position.elapsed_s
                self._save()
        bar.close()
        self._save()

    def _save(self) -> None:
        """Write the checkpoint, replacing the previous one atomically."""
        if self._checkpoint is None or not self._accelerator.is_main_process:
            return
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._checkpoint.with_suffix(".tmp")
        state = {
            "weights": self._trained,
            "optimizers": self._optimizers.state_dict(),
            "position": asdict(self.position),
        }
        torch.save(state, unfinished)
        os.replace(unfinished, self._checkpoint)
        log.info("checkpoint saved steps=%s path=%s", self.position.num_steps, self._checkpoint)

    @torch.no_grad()
    def _resume(self) -> None:
        if self._checkpoint is None or not self._checkpoint.exists():
            return
        state = torch.load(self._checkpoint, "cpu", weights_only=True)
        for name, parameter in self._trained.items():
            parameter.copy_(state["weights"][name])
        self._optimizers.load_state_dict(state["optimizers"])
        self.position = position = Position(**state["position"])
        log.info("resumed steps=%s path=%s", position.num_steps, self._checkpoint)
        if self._settings.budget.progress(position.num_steps, position.elapsed_s) >= 1.0:
            log.warning("nothing left to train; remove %s to start over", self._checkpoint)

    def _step(self, progress: float) -> float:
        """Returns the mean loss of this process's part."""
        here, count = self._accelerator.process_index, self._accelerator.num_processes
        phases = self._settings.phases
        index = max(index for index, phase in enumerate(phases) if phase.start <= progress)
        phase, order = phases[index], self._orders[index]
        # A process without a part would keep the others waiting for its gradients.
        num_micro = max(count, self._settings.tokens_per_step // (phase.length * phase.rows))
        # Noise, such as dropout's, depends on how much was done, not on whether it was in one go.
        torch.manual_seed(self._settings.seed + self.position.num_steps * count + here)
        total, mine = 0.0, range(here, num_micro, count)
        for micro in mine:
            first = self.position.windows_read[index] + micro * phase.rows
            batch = send_to_device(order(first, phase.rows), self._accelerator.device)
            # Processes wait for each other once, with the gradients of their last parts.
            is_last = micro == mine[-1]
            with nullcontext() if is_last else self._accelerator.no_sync(self._objective):
                loss = self._objective(batch)
                # The gradients are averaged over the processes.
                self._accelerator.backward(loss * (count / num_micro))
            total += loss.item()
        self.position.windows_read[index] += num_micro * phase.rows
        self._optimizers.step(progress)
        self.position.num_steps += 1
        return total / len(mine)
