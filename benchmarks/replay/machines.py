"""The machines of the replay's cells."""

from __future__ import annotations

from dataclasses import replace

from cluster.simulate.world import Machine
from cluster.spec.step_profile import StepProfile

# SmolLM2-135M-Instruct on two cores, with the rows and times that its engine has profiled.  The
# model among its residents is its distilled LM.
_ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)
_TIMES_S = (0.0066, 0.0066, 0.0067, 0.0068, 0.0069, 0.0082, 0.0126, 0.0214, 0.039, 0.0742)
CPU = Machine(
    StepProfile(_ROWS, _TIMES_S),
    look_up_s=(0.0001, 0.0000005),
    model_s=(0.0034, 0.000055),
)
# The same with rows beyond the first that cost half as much.
HALF = replace(
    CPU,
    steps=StepProfile(_ROWS, tuple((_TIMES_S[0] + each) / 2 for each in _TIMES_S)),
)
# The same with profiles of a wrong shape: one has no knee, the other one too early.
FLAT = replace(CPU, told=StepProfile(_ROWS, tuple(0.0066 + 0.00001 * rows for rows in _ROWS)))
STEEP = replace(CPU, told=StepProfile(_ROWS, tuple(0.0066 + 0.00060 * rows for rows in _ROWS)))
# The same model on two cores of a Xeon that multiplies matrices with AMX.
AMX = Machine(
    StepProfile((1, 4, 16, 64), (0.0130, 0.0142, 0.0187, 0.0330)),
    look_up_s=(0.0001, 0.0000005),
    model_s=(0.0060, 0.000055),
)
# Reading the weights takes 10 ms, and computing catches up with that at 256 rows; a small model
# as resident, whose passes are as memory-bound.
GPU = Machine(
    StepProfile(
        (1, 64, 128, 256, 512, 1024, 2048),
        (0.0100, 0.0101, 0.0103, 0.0108, 0.0200, 0.0390, 0.0770),
    ),
    look_up_s=(0.0001, 0.0),
    model_s=(0.0010, 0.000002),
)
# A random mixture of 64 experts, four to a row, on two cores, and its own profile
# (docs/benchmarks/rounds/experts.json): nearly each row reads experts that no other row reads.
_EXPERT_ROWS = (1, 3, 5, 7, 9, 14, 18, 22, 26, 36, 44, 56, 72, 112, 144, 176, 224)
MOE = Machine(
    StepProfile(
        _EXPERT_ROWS,
        (
            0.0130,
            0.0149,
            0.0173,
            0.0193,
            0.0212,
            0.0251,
            0.0282,
            0.0316,
            0.0327,
            0.0393,
            0.0406,
            0.0465,
            0.0530,
            0.0663,
            0.0755,
            0.0972,
            0.1152,
        ),
    ),
    look_up_s=(0.0001, 0.0000005),
    model_s=(0.0034, 0.000055),
    told=StepProfile(
        _EXPERT_ROWS,
        (
            0.0136,
            0.0154,
            0.0177,
            0.0198,
            0.0218,
            0.0255,
            0.0276,
            0.0305,
            0.0331,
            0.0377,
            0.0403,
            0.0457,
            0.0536,
            0.0646,
            0.0832,
            0.1037,
            0.1199,
        ),
    ),
)

MACHINES = {
    "cpu": CPU,
    "cpu-half": HALF,
    "cpu-flat": FLAT,
    "cpu-steep": STEEP,
    "amx": AMX,
    "gpu": GPU,
    "moe": MOE,
}
