"""The clients encrypt, check who answers, and show their certificate."""

from typing import Any

import grpc
import pytest

from cluster.client import Endpoint, GenerateRequest, UnavailableError
from tests.client.conftest import Complete, Serve
from tests.support.rpc.certificates import Authority
from tests.support.rpc.scripted_service import NUM_TOKENS, ScriptedService

REQUEST = GenerateRequest(model="toy", text="prompt")
AUTHORITY, OTHER = Authority.new(), Authority.new("another")
HERE, ELSEWHERE = "localhost", "llm.example.com"
CERTIFICATE, KEY = AUTHORITY.issue("somebody")
OWN = {"private_key": KEY, "certificate_chain": CERTIFICATE}


@pytest.mark.parametrize(
    ("issuer", "name", "asks", "shown", "is_answered"),
    [
        (AUTHORITY, HERE, False, {}, True),
        (OTHER, HERE, False, {}, False),
        (AUTHORITY, ELSEWHERE, False, {}, False),
        (AUTHORITY, ELSEWHERE, False, {"server_name": ELSEWHERE}, True),
        # Where the server asks for a certificate of the client's.
        (AUTHORITY, HERE, True, {}, False),
        (AUTHORITY, HERE, True, OWN, True),
    ],
    ids=["its own", "another authority", "another name", "that name", "no certificate", "shown"],
)
def test_who_answers_and_who_asks_are_checked(
    serve: Serve,
    complete: Complete,
    issuer: Authority,
    name: str,
    asks: bool,
    shown: dict[str, Any],
    is_answered: bool,
):
    certificate, key = issuer.issue(name)
    credentials = grpc.ssl_server_credentials(
        [(key, certificate)], AUTHORITY.cert if asks else None, require_client_auth=asks
    )
    service = ScriptedService()
    address = serve(service, credentials).replace("127.0.0.1", HERE)
    endpoint = Endpoint(address, tls=True, root_certificates=AUTHORITY.cert, **shown)
    if is_answered:
        assert complete(endpoint, REQUEST).usage.completion_tokens == NUM_TOKENS
        return
    with pytest.raises(UnavailableError):
        complete(endpoint, REQUEST)
    assert service.requests == []
