from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.replay.synthetic import texts
from cluster.simulate.world import save

SERVED = {
    "applications": [
        {
            "name": "drafthouse",
            "import_path": "deployments.app:build",
            "args": {
                "target": {"engine": {"model": "none", "max_running_sequences": 16}},
                "drafters": {"lm": {"kind": "lm", "placement": {"num_cpus": 1}}},
                "coordinator": {"max_running_sequences": 256, "max_queued_requests": 8},
            },
        }
    ]
}
SIMULATED: Mapping[str, Any] = {
    "config": "serve.yaml",
    "recording": "texts.npz",
    "target": {"replicas": 4, "rows": [1, 64, 256, 512], "times_ms": [10, 10.1, 10.8, 20]},
    "drafter": {"price_per_hour": 0.1},
    "load": {"streams": 32},
    "ratios": [0, 1],
    "seconds": 8,
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recording and a configuration."""
    folder = tmp_path_factory.mktemp("simulate")
    save(folder / "texts.npz", texts(16, 60, agreement=0.8), {})
    (folder / "serve.yaml").write_text(yaml.safe_dump(SERVED), "utf-8")
    return folder


def written(folder: Path, **changes: Any) -> Path:
    """Write the file of a fleet; a change is merged into its section."""
    document: dict[str, Any] = dict(SIMULATED)
    for key, value in changes.items():
        former = document.get(key)
        is_section = isinstance(value, dict) and isinstance(former, dict)
        document[key] = {**former, **value} if is_section else value
    path = folder / "simulate.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")
    return path
