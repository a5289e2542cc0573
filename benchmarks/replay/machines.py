"""The machines of the replay's cells."""

from __future__ import annotations

from dataclasses import replace

from cluster.simulate.world import Machine

# SmolLM2-135M-Instruct on two cores, with the rows and times that its engine has profiled.  The
# model among its residents is its distilled LM.
CPU = Machine(
    (1, 2, 4, 8, 12, 16, 32, 64, 128, 256),
    (0.0066, 0.0066, 0.0067, 0.0068, 0.0069, 0.0082, 0.0126, 0.0214, 0.039, 0.0742),
    look_up_s=(0.0001, 0.0000005), model_s=(0.0034, 0.000055),
)  # fmt: skip
# The same with profiles of a wrong shape: one has no knee, the other one too early.
FLAT = replace(CPU, told_s=tuple(0.0066 + 0.00001 * rows for rows in CPU.rows))
STEEP = replace(CPU, told_s=tuple(0.0066 + 0.00060 * rows for rows in CPU.rows))
# The same model on two cores of a Xeon that multiplies matrices with AMX.
AMX = Machine(
    (1, 4, 16, 64), (0.0130, 0.0142, 0.0187, 0.0330),
    look_up_s=(0.0001, 0.0000005), model_s=(0.0060, 0.000055),
)  # fmt: skip
# Reading the weights takes 10 ms, and computing catches up with that at 256 rows; a small model
# as resident, whose passes are as memory-bound.
GPU = Machine(
    (1, 64, 128, 256, 512, 1024, 2048),
    (0.0100, 0.0101, 0.0103, 0.0108, 0.0200, 0.0390, 0.0770),
    look_up_s=(0.0001, 0.0), model_s=(0.0010, 0.000002),
)  # fmt: skip

MACHINES = {"cpu": CPU, "cpu-flat": FLAT, "cpu-steep": STEEP, "amx": AMX, "gpu": GPU}
