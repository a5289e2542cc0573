"""Runs the functions of a script whose names begin with `check_`, and says how each one ended.

It is imported by scripts that run in the environments of other clients: standard library only.
"""

import asyncio
import inspect
import json
import sys
import time
import traceback


def arguments() -> tuple[str, str]:
    """URL of the server, name of the model."""
    return sys.argv[1], sys.argv[2]


def run(names: dict) -> None:
    """One line of JSON for each check; a failed assertion tells its own message."""
    for name, check in names.items():
        if not name.startswith("check_"):
            continue
        started_at = time.perf_counter()
        error = ""
        try:
            result = check()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as raised:  # noqa: BLE001  # whatever a client raises is a result
            where = traceback.extract_tb(raised.__traceback__)[-1]
            error = f"{type(raised).__name__}: {raised or where.line}"
        record = {
            "check": name.removeprefix("check_").replace("_", " "),
            "error": error,
            "seconds": round(time.perf_counter() - started_at, 2),
        }
        print(json.dumps(record), flush=True)
