"""`drafthouse serve`: start, report progress, serve until a signal comes, leave nothing behind."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import (
    ApplicationStatus,
    ServeDeploySchema,
)

from cluster.config.doors import from_here, joined
from cluster.config.file import ServeFile
from cluster.config.schema import Config
from cluster.errors import ConfigError, WorkerError
from cluster.logs import is_json, said
from deployments.access import access_lines
from deployments.app import begin, logging_options, names_of
from deployments.configured_models import has_chat_template
from deployments.local_ray import JoinedRay, LocalRay, ingress_of
from deployments.readiness import LogFollower, base_url, engine_line, wait_until_connected
from deployments.report import rendered

_POLL_S = 0.25
# Whoever serves looks so often for what the replicas log.
_LOOK_S = 0.5
_REPORT_S = 10.0
# After so long without an end, a stop that was asked for was swallowed.
_AGAIN_S = 0.5
# Targets and drafters tell their coordinators, and these the ingress, what they made of a change.
_TOLD_S = 2.0
# Back to the line's beginning, and nothing behind it.
_CLEAR = "\r\x1b[K"
# The last line of a traceback: the error's class, with its module unless it is Python's own.
_ERROR = re.compile(r"^(?:cluster\.errors\.)?([\w.]*(?:Error|Exception): .+)$", re.MULTILINE)
_MAX_REASON_LEN = 500


class _Stop(BaseException):
    """Raised in the main thread by SIGINT and SIGTERM, wherever it is."""


def serve_until_stopped(file: ServeFile, place: Path | str) -> int:
    """Serve `file` until SIGINT or SIGTERM; 0 after an orderly end.

    place: the folder of a Ray of this command's own, or the address of one that runs.  Ray's
    environment is prepared and the ports are free.  Raises ConfigError when the machine lacks what
    the placement asks for, and WorkerError when the application does not come up.
    """
    refuse_unserved_keys(file)
    for name in ("ray.serve", "ray"):
        logging.getLogger(name).setLevel(logging.WARNING)
    signals = _Signals()
    names, is_serving = names_of(file.document), False
    own = LocalRay(file.config, place, names) if isinstance(place, Path) else None
    cluster = own or JoinedRay(file.config, str(place), names)
    follower = LogFollower(own.log_folder if own else None)

    def look() -> str:
        """Show what the replicas log; returns how far a model that loads is."""
        signals.check()
        with contextlib.suppress(OSError):  # where nobody reads them, the server goes on
            for line in follower.new_lines():
                _say(line, sys.stderr)
        return follower.progress

    try:
        with signals.interrupt():
            _progress("starting Ray" if own else f"joining Ray at {place}")
            cluster.start()
        with signals.interrupt():
            _progress("starting Serve")
            serve.start(proxy_location="Disabled", logging_config=logging_options(file, {}))
            begin(file, is_own=own is not None)
            cluster.is_ours = True
            _wait_until_running(names, look)
            is_serving = True
            state = wait_until_connected(
                partial(state_of, names[0]),
                base_url(cluster.as_reached()),
                file.config.on_their_own,
                look,
                _progress,
            )
            if own:
                own.announce(file.document)
                if token_file := own.token_file():
                    _progress(f"the dashboard asks for a token; it is in {token_file}")
            for line in access_lines(file.config):
                _progress(line)
            seen = cluster.as_reached()
            _say(said(ready_line(seen, engine_line(state)), beginning=""), sys.stdout)
            _say(said(what_to_try(seen), beginning=""), sys.stderr)
            while True:
                look()
                time.sleep(_LOOK_S)
    except (_Stop, SystemExit, KeyboardInterrupt):
        _progress("stopping")
    finally:
        signals.ignore()
        # Ray tells on stdout of each actor that it ends, though it was asked to.
        with contextlib.redirect_stdout(io.StringIO()):
            cluster.stop(is_serving=is_serving)
    _progress("stopped")
    return 0


def ready_line(config: Config, engines: str = "") -> str:
    """The one line on stdout that says where to connect, and what serves there."""
    parts = [
        f"{base_url(config)}/v1 (OpenAI HTTP)",
        f"{joined(from_here(config.grpc.host), config.grpc.port)} (gRPC)",
    ]
    if config.dashboard.enabled:
        dashboard = config.dashboard
        parts.append(f"http://{joined(from_here(dashboard.host), dashboard.port)} (dashboard)")
    return "; ".join(filter(None, ("Drafthouse is ready: " + ", ".join(parts), engines)))


def what_to_try(config: Config) -> str:
    """Two commands that work as they stand."""
    body: dict[str, Any] = {"model": config.model_name, "max_tokens": 100}
    if has_chat_template(config.target.engine.model):
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Why is the sky blue?"}]
    else:
        path = "/v1/completions"
        body["prompt"] = "Once upon a time"
    told = {
        "program": sys.argv[0] if Path(sys.argv[0]).name == "drafthouse" else "drafthouse",
        "url": base_url(config),
        "path": path,
        "request": shlex.quote(json.dumps(body)),
        "has_keys": bool(config.access.keys_file),
        "has_page": config.ui.is_served(config.http),
    }
    return rendered("ready", told).rstrip()


def state_of(application: str) -> Mapping[str, Any]:
    """What the ingress tells operators.  Where it does not answer, `status` says why."""
    try:
        return _health_of(application)
    except Exception as error:  # noqa: BLE001 - Serve's errors have no common base; it is asked again
        return {"status": f"nothing ({type(error).__name__})"}


def _health_of(application: str) -> Mapping[str, Any]:
    return dict(ingress_of(application).health.remote().result(timeout_s=_REPORT_S))


def refuse_unserved_keys(file: ServeFile) -> None:
    """Raise ConfigError for keys that only `serve deploy` obeys."""
    for number, application in enumerate(file.document["applications"]):
        for key in ("runtime_env", "autoscaling_policy"):
            if application.get(key):
                path = f"applications[{number}].{key}"
                raise ConfigError(
                    f"{file.path}: {path}: `drafthouse serve` runs in its own environment with "
                    "fixed replicas; remove the key, or give the file to `serve deploy`",
                    param=path,
                )


def change(address: str, document: Mapping[str, Any]) -> list[str]:
    """Hand a changed document to the server whose Ray is at `address`, and wait until it runs;
    returns what its parts refuse of it, and why."""
    names = names_of(document)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(dict(document)))
        _wait_until_running(names, lambda: "")
        time.sleep(_TOLD_S)
        refused = _health_of(names[0])["refused"].items()
        return [f"{where}: {why}" for where, why in refused if where.endswith(".user_config")]
    finally:
        ray.shutdown()


def _wait_until_running(names: Sequence[str], look: Callable[[], str]) -> None:
    """Report progress until every deployment runs; raises WorkerError when one never will.

    A terminal has it in one line, all else a line for each change and every ten seconds.  look:
    called often; may raise to end the waiting, and returns how far a model that loads is."""
    is_renewed = sys.stderr.isatty() and not is_json()
    last, reported = "", 0.0
    while True:
        progress = look()
        found = serve.status().applications
        applications = [found[name] for name in names]
        deployments = [pair for each in applications for pair in each.deployments.items()]
        waiting = sorted(name for name, status in deployments if status.status != "HEALTHY")
        total = len(deployments)
        text = f"loading: {total - len(waiting)} of {total} deployments ready"
        if waiting:
            text += f", waiting for {', '.join(waiting)}"
        is_due = text != last or time.monotonic() - reported > _REPORT_S
        if total and (is_due or is_renewed):
            phase = f" ({progress})" if waiting and progress else ""
            _say(said(text + phase), sys.stderr, end="" if is_renewed and waiting else "\n")
            last, reported = text, time.monotonic()
        if all(each.status == ApplicationStatus.RUNNING for each in applications):
            return
        for each in applications:
            if each.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                raise WorkerError(f"the application did not start: {_reason(each)}")
        time.sleep(_POLL_S)


def _reason(application: Any) -> str:
    """The first deployment's own words; the application's message only names it."""
    for name, status in application.deployments.items():
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY") and status.message:
            return f"{name}: {cause_of(status.message)}"
    return cause_of(str(application.message))


def cause_of(message: str) -> str:
    """The last error of the tracebacks that Serve passes on, one for every start, on one line."""
    errors = _ERROR.findall(message)
    told = errors[-1] if errors else " ".join(message.split())
    return told if len(told) <= _MAX_REASON_LEN else told[:_MAX_REASON_LEN] + "..."


def _progress(text: str) -> None:
    _say(said(text), sys.stderr)


def _say(text: str, stream: TextIO, end: str = "\n") -> None:
    # A terminal may show a line that is to be renewed.
    stream.write(_CLEAR * stream.isatty() + text + end)
    stream.flush()


class _Signals:
    """SIGINT and SIGTERM interrupt the main thread, again and again where that is swallowed, as by
    whatever ends inside ray.init."""

    _is_asked = False

    @contextlib.contextmanager
    def interrupt(self) -> Iterator[None]:
        """Inside, the first signal raises _Stop, and a clock does so from then on; others follow
        where a whole group is signalled.  Enter anew after ray.init, which takes over SIGTERM."""

        def stop(signum: int, frame: FrameType | None) -> None:
            if self._is_asked and signum != signal.SIGALRM:
                return
            self._is_asked = True
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            raise _Stop

        former = sys.unraisablehook

        def report(unraisable: sys.UnraisableHookArgs) -> None:
            # In a finaliser nothing can be raised, but the signal is remembered.
            if unraisable.exc_type is not _Stop:
                former(unraisable)

        self._set(stop)
        sys.unraisablehook = report
        try:
            self.check()
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.unraisablehook = former

    def ignore(self) -> None:
        """The end has begun: nothing may interrupt it."""
        # Not SIG_IGN, which processes started from now on would inherit.
        self._set(lambda signum, frame: None)

    def check(self) -> None:
        """Raise _Stop when a signal has come; between any two steps that take long."""
        if self._is_asked:
            raise _Stop

    @staticmethod
    def _set(handler: Callable[[int, FrameType | None], None]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, handler)
