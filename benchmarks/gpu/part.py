"""One part of `benchmarks.gpu`: a module whose `rows(setting)` gives labels and what measures each.

What fails becomes a row with its traceback, and the next is measured.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.support.record import ROOT, reason_of
from cluster.records import frozen

if TYPE_CHECKING:  # what starts the parts is to run even where torch does not
    import torch

    from benchmarks.gpu.model import Sizes

Row = dict[str, Any]
# Labels, which begin the row, and what measures the rest.
Measurements = Iterator[tuple[Row, Callable[[], Row]]]


class Skipped(Exception):
    """What cannot be measured here, and why."""


@frozen
class Setting:
    """tiny: sizes for a CPU.  folder: for files that nobody keeps."""

    tiny: bool
    folder: Path

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu") if self.tiny else torch.device("cuda", 0)

    @property
    def sizes(self) -> Sizes:
        from benchmarks.gpu.model import LLAMA_8B, TINY

        return TINY if self.tiny else LLAMA_8B

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.float32 if self.tiny else torch.bfloat16

    def need_gpu(self) -> None:
        if self.device.type != "cuda":
            raise Skipped("there is no NVIDIA GPU here")


def measured(measurements: Measurements) -> Iterator[Row]:
    """The rows; where the part itself fails, the last of them says so."""
    try:
        for labels, measure in measurements:
            try:
                yield labels | measure()
            except Exception as error:  # noqa: BLE001 - the other rows are to be measured
                yield labels | _failed(error)
    except Exception as error:  # noqa: BLE001 - the other parts are to be measured
        yield _failed(error)


def _failed(error: Exception) -> Row:
    if isinstance(error, Skipped):
        return {"skipped": str(error)}
    told = "".join(traceback.format_exception(error)).replace(f"{ROOT}/", "")
    return {"failed": f"{type(error).__name__}: {reason_of(error)}", "traceback": told}


def run(name: str, *, tiny: bool, log: str, rows: Connection) -> None:
    """Measure a part, as the target of a process of its own.

    log: a file for what it says.  rows: gets each row as soon as it is there."""
    os.setsid()  # so that whatever it starts can be ended with it
    with open(log, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    module = importlib.import_module(f"benchmarks.gpu.{name}")
    with tempfile.TemporaryDirectory() as folder:
        for row in measured(module.rows(Setting(tiny, Path(folder)))):
            rows.send(row)
