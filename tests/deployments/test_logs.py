"""What people ask stays out of every log."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.client import ChatMessage, ChatMessages, Client, GenerateRequest, InvalidRequestError
from tests.deployments.conftest import Served
from tests.support.deployments.api import MODEL

SECRET = "quartz xylophone seventy-seven"


def test_no_log_holds_prompt_text(served: Served):
    import ray

    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": SECRET}),
        ("/v1/completions", {"prompt": SECRET, "stream": True}),
        ("/v1/completions", {"prompt": SECRET * 1000}),
        ("/v1/completions", {"prompt": SECRET, "temperature": "hot"}),
        ("/v1/completions", {"prompt": {"text": SECRET}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": SECRET}]}),
        ("/v1/chat/completions", {"messages": [SECRET]}),
    ]
    for path, body in bodies:
        body |= {"model": MODEL, "max_tokens": 4}
        assert httpx.post(f"{served.http}{path}", json=body, timeout=120).status_code in (200, 400)
    with Client(served.grpc) as client:
        client.complete(GenerateRequest(model=MODEL, text=SECRET))
        wizard = ChatMessages(messages=[ChatMessage(role="wizard", content=SECRET)])
        with pytest.raises(InvalidRequestError):
            client.complete(GenerateRequest(model=MODEL, chat=wizard))
        with pytest.raises(InvalidRequestError):
            client.complete(GenerateRequest(model=MODEL, text=SECRET * 1000))
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert files
    assert not [path.name for path in files if b"xylophone" in path.read_bytes()]
    assert any(b": request id=" in path.read_bytes() for path in files)
