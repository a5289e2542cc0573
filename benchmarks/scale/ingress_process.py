"""An ingress without Ray, as a process: `python -m benchmarks.scale.ingress_process CONFIG ...`.

On uvloop, as in a replica of Ray Serve.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvloop

from benchmarks.support.options import parser_of
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.core import SamplingParams
from cluster.lead import known
from cluster.rpc.server import RunningServer, run_until_signal
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.grpc_api import GrpcListener
from deployments.ingress.http import create_app
from deployments.ingress.http_listener import HttpListener
from deployments.ingress.ingress import Ingress

_PATIENCE_S = 1.0


class _Listeners(RunningServer):
    """Both listeners, to be stopped by a signal."""

    def __init__(self, config: Config, http: HttpListener, grpc: GrpcListener) -> None:
        self.address = f"{config.http.port} {config.grpc.port}"
        self._both = (http, grpc)

    async def stop(self, grace_s: float = 1.0) -> None:
        for listener in self._both:
            await listener.stop()


async def _serve(config: Config, coordinators: Sequence[str]) -> None:
    tokenizer = Tokenizer.load(config.target.engine.model)
    ingress = Ingress(config, tokenizer, SamplingParams(max_tokens=0), known(coordinators))
    ingress.start()
    http = HttpListener(create_app(ingress), config.http, _PATIENCE_S)
    grpc = GrpcListener(ingress, _PATIENCE_S)
    for listener in (http, grpc):
        await listener.start()
    async for _ in ingress.coordinators.changes():
        if (await ingress.health())["coordinators"] == len(coordinators):
            break
    await run_until_signal(_Listeners(config, http, grpc), "ingress")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config")
    parser.add_argument("--coordinator", action="append", required=True)
    arguments = parser.parse_args()
    uvloop.run(_serve(load(arguments.config).config, arguments.coordinator))
    return 0


if __name__ == "__main__":
    sys.exit(main())
