"""Paths that other servers have and this one has not, each with the reason that is answered."""

from __future__ import annotations

from collections.abc import Mapping

_GENERATES = (
    "this server continues text with one language model: POST /v1/chat/completions, "
    "/v1/completions, /v1/responses or /v1/messages"
)
_STATELESS = "this server keeps nothing beside the answers of /v1/responses; send the whole request"

# By the beginning of the path, after `/v1` or `/v2` if it has that: what it is for elsewhere, and
# what to do here.
UNSERVED: Mapping[str, tuple[str, str]] = {
    "/embeddings": ("embeddings", _GENERATES),
    "/pooling": ("embeddings", _GENERATES),
    "/rerank": ("ranking of documents", _GENERATES),
    "/score": ("scores of pairs of texts", _GENERATES),
    "/classify": ("classification", _GENERATES),
    "/moderations": ("moderation", _GENERATES),
    "/audio": ("speech", _GENERATES),
    "/realtime": ("speech over a web socket", _GENERATES),
    "/images": ("images", _GENERATES),
    "/videos": ("videos", _GENERATES),
    "/files": ("files", _STATELESS),
    "/uploads": ("files", _STATELESS),
    "/batches": ("batches", "send the requests themselves, as many at a time as you like"),
    "/messages/batches": ("batches", "send the requests themselves, as many at a time as you like"),
    "/fine_tuning": ("training", "`drafthouse train` makes drafters; the model itself is as it is"),
    "/evals": ("evaluations", "`drafthouse try` compares an answer with and without drafts"),
    "/assistants": ("assistants", _STATELESS),
    "/threads": ("threads of assistants", _STATELESS),
    "/conversations": ("conversations", _STATELESS),
    "/vector_stores": ("search in files", _STATELESS),
    "/containers": ("programs that the model runs", "call your own tools with `tools`"),
    "/load_lora_adapter": ("adapters", "name them in target.engine.adapters, or in a user_config"),
    "/unload_lora_adapter": ("adapters", "leave them out of a user_config"),
}


def reason_of(path: str) -> str:
    """Return why a path is not served, "" for one that no server has."""
    for version in ("/v1", "/v2"):
        path = path.removeprefix(version)
    for beginning in sorted(UNSERVED, key=len, reverse=True):
        if path == beginning or path.startswith(f"{beginning}/"):
            what, remedy = UNSERVED[beginning]
            return f"{what}: not served here; {remedy}"
    return ""
