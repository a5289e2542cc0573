"""One answer over one or more streams, and one answer from all its pieces.  No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from .errors import ProtocolError
from .generated.common_pb2 import FINISH_REASON_UNSPECIFIED
from .generated.generation_pb2 import (
    ChoiceDelta,
    GenerateRequest,
    GenerateResponse,
    ResumedChoice,
)


class Resumption:
    """The part of an answer that has come, from which a stream that broke is continued.

    Send `request()` and pass each response to `accept`.  When a stream breaks, send `request()`
    again: it carries the seed in force and every token that came, so the text goes on as if nothing
    had happened, on whichever server answers.
    """

    def __init__(self, request: GenerateRequest) -> None:
        """Copies the request."""
        self._request = deepcopy(request)
        self._choices = {choice.index: deepcopy(choice) for choice in request.resume}
        self.is_complete = False

    @property
    def is_started(self) -> bool:
        """True once a part of the answer has come."""
        return bool(self._choices)

    def request(self) -> GenerateRequest:
        """The request for the next stream."""
        del self._request.resume[:]
        self._request.resume.extend(self._choices[index] for index in sorted(self._choices))
        return self._request

    def accept(self, response: GenerateResponse) -> bool:
        """Record a response; returns True if it brings anything new.

        Raises ProtocolError for a choice that is finished or was not requested.
        """
        if not response.id:
            return False  # what stood behind Ray Serve's proxy put one before an error's status
        self._request.sampling.seed = response.seed
        self._request.request_id = response.id
        for delta in response.choices:
            choice = self._choices.setdefault(delta.index, ResumedChoice(index=delta.index))
            if choice.finished or delta.index >= max(1, self._request.n):
                raise ProtocolError(
                    f"the server sent choice {delta.index}, which is finished or not one of the "
                    f"{max(1, self._request.n)} requested"
                )
            choice.token_ids.extend(delta.token_ids)
            choice.finished = delta.finish_reason != FINISH_REASON_UNSPECIFIED
        self.is_complete = response.HasField("usage")
        return True


def whole_of(responses: Iterable[GenerateResponse]) -> GenerateResponse:
    """The pieces of an answer as one response: a choice has its whole text and all its tokens."""
    whole = GenerateResponse()
    choices: dict[int, ChoiceDelta] = {}
    texts: dict[int, list[str]] = {}
    for response in responses:
        whole.MergeFrom(response)
        for delta in response.choices:
            choices.setdefault(delta.index, ChoiceDelta()).MergeFrom(delta)
            texts.setdefault(delta.index, []).append(delta.text)
    whole.ClearField("choices")
    for index in sorted(choices):
        choices[index].text = "".join(texts[index])
        whole.choices.append(choices[index])
    return whole
