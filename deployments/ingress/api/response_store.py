"""Keeps the latest answers of /v1/responses, for those that go on with one."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from cluster.errors import NotFoundError
from cluster.records import record


@record
class StoredResponse:
    """body: as it was answered.  messages: the conversation up to and with the answer, without
    its instructions.  owner: the name of the key that it was asked with, "" = anybody's."""

    body: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...]
    owner: str = ""


@record
class ResponseStore:
    """At most so many answers, and so many bytes of them; the oldest go first.

    Ids are random, so whoever knows one has been given the answer; with keys only its owner is.
    """

    max_responses: int
    max_bytes: int
    _stored: OrderedDict[str, tuple[StoredResponse, int]] = field(default_factory=OrderedDict)

    @property
    def num_bytes(self) -> int:
        # Long answers are written, and kept, in other threads.
        return sum(size for _, size in tuple(self._stored.values()))

    def put(self, response: StoredResponse) -> None:
        """Keep it, as long as there is room."""
        size = len(json.dumps(response.body)) + len(json.dumps(response.messages))
        if size <= self.max_bytes:
            self._stored[response.body["id"]] = (response, size)
        while len(self._stored) > self.max_responses or self.num_bytes > self.max_bytes:
            self._stored.popitem(last=False)

    def get(self, response_id: str, owner: str, param: str) -> StoredResponse:
        """Raises NotFoundError, naming `param`, for one that is not kept, or not for that owner."""
        found = self._stored.get(response_id)
        if found is None or found[0].owner != owner:
            raise NotFoundError.at(
                param,
                "no such answer is kept here (any more); send the whole conversation as "
                "input, or raise api.max_stored_responses",
            )
        return found[0]

    def drop(self, response_id: str, owner: str, param: str) -> None:
        """Forget one; raises NotFoundError as `get` does."""
        self.get(response_id, owner, param)
        del self._stored[response_id]
