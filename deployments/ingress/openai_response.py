"""Writes answers in OpenAI's format: whole ones, and the chunks of a stream.

Chunks are assembled from prepared JSON text, so only the new text of each chunk is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from cluster.errors import DrafthouseError
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.chat_message import delta_json, finish_reason, whole_message
from deployments.ingress.choice import Delta
from deployments.ingress.generation import Generation
from deployments.ingress.logprob_writer import LogprobWriter, joined
from deployments.ingress.openai_error import error_event
from deployments.ingress.prompt_logprobs import prompt_entries, trimmed
from deployments.ingress.spec import OpenAIRequest
from deployments.ingress.text_offsets import TextOffsets
from deployments.ingress.usage import metrics, usage

DONE = b"data: [DONE]\n\n"


class Answer:
    """Collects or streams the deltas of one generation in the format that its client asked for."""

    def __init__(
        self,
        request: OpenAIRequest,
        generation: Generation,
        tokenizer: Tokenizer,
        created: int,
        request_id: str,
    ) -> None:
        self._request = request
        self._generation = generation
        self._tokenizer = tokenizer
        self._created = created
        self._request_id = request_id
        count = len(request.spec.prompts) * request.spec.num_choices
        self._writers = [
            self._logprob_writer(index) if request.shows_logprobs else None
            for index in range(count)
        ]
        self._open = count
        self._begun: set[int] = set()  # choices whose echo is written
        self._prefix = self._head("chat.completion.chunk" if request.is_chat else "text_completion")

    def _logprob_writer(self, choice: int) -> LogprobWriter:
        offsets = None
        if not self._request.is_chat:
            spec = self._request.spec
            prompt_ids = self._generation.prompt_ids[choice // spec.num_choices]
            offsets = TextOffsets(
                self._tokenizer, prompt_ids, skip_special_tokens=spec.skip_special_tokens
            )
        names_ids = self._request.names_token_ids
        return LogprobWriter(self._tokenizer, offsets, names_token_ids=names_ids)

    def _head(self, kind: str) -> str:
        """The start of every JSON object of this answer, without the closing brace."""
        head = {
            "id": self._generation.id,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
        }
        return json.dumps(head, separators=(",", ":"))[:-1]

    # Whole answers

    def whole(self, deltas: Iterable[Delta]) -> bytes:
        """The answer to a request without `stream`."""
        collected: list[list[Delta]] = [[] for _ in self._writers]
        for delta in deltas:
            collected[delta.choice].append(delta)
        choices = [
            {"index": place, **self._whole_choice(sample, collected[sample])}
            for place, sample in enumerate(self._kept(collected))
        ]
        body: dict[str, Any] = {"choices": choices}
        if self._request.is_chat:
            if self._request.return_token_ids:
                body["prompt_token_ids"] = self._prompt_ids(0)
            if self._request.shows_prompt_logprobs is not None:
                body["prompt_logprobs"] = self._prompt_logprobs(0)
        body["usage"] = usage(self._generation)
        body["metrics"] = metrics(self._generation)
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        tail = json.dumps(body, separators=(",", ":"))
        return f"{self._head(kind)},{tail[1:]}".encode()

    def _kept(self, collected: Sequence[Sequence[Delta]]) -> list[int]:
        """The samples that are answered with: all, or the likeliest of each prompt."""
        count, kept = self._request.spec.num_choices, self._request.num_kept
        samples = range(len(collected))
        if kept == count:
            return list(samples)

        def mean_logprob(sample: int) -> float:
            values = [one.logprob for part in collected[sample] for one in part.logprobs]
            return sum(values) / max(len(values), 1)

        groups = (samples[start : start + count] for start in range(0, len(collected), count))
        return [
            sample
            for group in groups
            for sample in sorted(group, key=mean_logprob, reverse=True)[:kept]
        ]

    def _whole_choice(self, index: int, parts: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        token_ids = [int(token) for part in parts for token in part.token_ids]
        last = parts[-1] if parts else Delta(index, "")
        choice: dict[str, Any] = {}
        if self._request.is_chat:
            choice["message"] = whole_message(parts)
        else:
            choice["text"] = self._echoed(index) + text
        writer = self._writers[index]
        logprobs = [one for part in parts for one in part.logprobs]
        if writer is not None:
            echoed = self._echoed_logprobs(index, writer)
            choice["logprobs"] = joined(echoed, writer.write(token_ids, logprobs))
        else:
            choice["logprobs"] = None
        if self._request.shows_prompt_logprobs is not None and not self._request.is_chat:
            choice["prompt_logprobs"] = self._prompt_logprobs(index)
        choice["finish_reason"] = finish_reason(last)
        choice["stop_reason"] = last.stop
        choice["seed"] = self._generation.seed_of(index)
        if last.cumulative_logprob is not None:
            choice["cumulative_logprob"] = last.cumulative_logprob
        if self._request.spec.speculation.return_draft_sources:
            choice["draft_sources"] = [one for part in parts for one in self._sources(part)]
        if self._request.return_token_ids:
            choice["token_ids"] = token_ids
            if not self._request.is_chat:
                choice["prompt_token_ids"] = self._prompt_ids(index)
        return choice

    def _sources(self, delta: Delta) -> list[dict[str, Any]]:
        """Each token's text, and the drafters that had proposed it."""
        token_ids = delta.token_ids.tolist()
        return [
            {
                "token": self._tokenizer.token_text(token),
                "bytes": list(self._tokenizer.token_bytes(token)),
                "drafters": list(drafters),
            }
            for token, drafters in zip(
                token_ids, delta.draft_sources or [()] * len(token_ids), strict=True
            )
        ]

    def _prompt_ids(self, choice: int) -> list[int]:
        number = choice // self._request.spec.num_choices
        ids: list[int] = self._generation.prompt_ids[number].tolist()
        return ids

    def _echoed(self, choice: int) -> str:
        if not self._request.echo:
            return ""
        number = choice // self._request.spec.num_choices
        text = self._request.spec.prompts[number].text
        if text is not None and not self._generation.is_cut[number]:
            return text
        # Special tokens of a text are those that it has itself: what a tokenizer adds was cut off.
        return self._tokenizer.decode(self._prompt_ids(choice), skip_special_tokens=text is None)

    @property
    def _echoes_logprobs(self) -> bool:
        return self._request.echo and self._request.shows_logprobs

    def _echoed_logprobs(self, choice: int, writer: LogprobWriter) -> dict[str, Any]:
        if not self._echoes_logprobs:
            return {}
        num_top = self._request.spec.params.logprobs or 0
        logprobs = trimmed(self._generation.prompt_logprobs(choice), num_top)
        return writer.write_prompt(self._prompt_ids(choice), logprobs, self._echoed(choice))

    def _prompt_logprobs(self, choice: int) -> list[dict[str, Any] | None]:
        return prompt_entries(
            self._prompt_ids(choice),
            trimmed(
                self._generation.prompt_logprobs(choice), self._request.shows_prompt_logprobs or 0
            ),
            self._tokenizer,
            names_token_ids=self._request.names_token_ids,
        )

    # Streams

    def opening(self) -> bytes:
        """Chunks before the first token: the roles of a chat, the echo of a prompt."""
        parts = []
        for index in range(len(self._writers)):
            if self._request.is_chat:
                content = '"delta":{"role":"assistant","content":"","refusal":null}'
            elif self._request.echo and not self._echoes_logprobs:
                content = f'"text":{json.dumps(self._echoed(index))}'
            else:
                continue
            parts.append(
                self._chunk(
                    f'{{"index":{index},{content},"logprobs":null,"finish_reason":null,'
                    f'"seed":{self._generation.seed_of(index)}}}'
                )
            )
        return b"".join(parts)

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The server-sent events for `deltas`; the last event of the stream has the statistics."""
        parts = []
        for delta in deltas:
            self._open -= delta.finish_reason is not None
            is_last = self._open == 0 and delta is deltas[-1]
            tail = self._statistics() if is_last and not self._request.include_usage else ""
            parts.append(self._chunk(self._choice(delta), tail))
        return b"".join(parts)

    def failing(self, error: DrafthouseError) -> bytes:
        """The events that end a stream with an error."""
        return error_event(error, self._request_id) + DONE

    def closing(self) -> bytes:
        """The events that end a stream without errors."""
        if not self._request.include_usage:
            return DONE
        total = json.dumps(usage(self._generation), separators=(",", ":"))
        text = f'data: {self._prefix},"choices":[],"usage":{total}{self._statistics()}}}\n\n'
        return text.encode() + DONE

    def _choice(self, delta: Delta) -> str:
        echoed: dict[str, Any] = {}
        text = delta.text
        writer = self._writers[delta.choice]
        if writer is not None and self._echoes_logprobs and delta.choice not in self._begun:
            # An echo with log-probabilities comes with the first text: they are known then.
            self._begun.add(delta.choice)
            echoed, text = (
                self._echoed_logprobs(delta.choice, writer),
                self._echoed(delta.choice) + text,
            )
        text = json.dumps(text)
        reason = json.dumps(finish_reason(delta))
        content = f'"delta":{delta_json(delta)}' if self._request.is_chat else f'"text":{text}'
        logprobs = "null"
        if writer is not None:
            written = joined(echoed, writer.write(delta.token_ids.tolist(), delta.logprobs))
            logprobs = json.dumps(written, separators=(",", ":"))
        extra = f',"seed":{self._generation.seed_of(delta.choice)}'
        if delta.stop is not None:
            extra += f',"stop_reason":{json.dumps(delta.stop)}'
        if self._request.return_token_ids:
            extra += f',"token_ids":{delta.token_ids.tolist()}'
        if self._request.spec.speculation.return_draft_sources:
            sources = json.dumps(self._sources(delta), separators=(",", ":"))
            extra += f',"draft_sources":{sources}'
        return (
            f'{{"index":{delta.choice},{content},"logprobs":{logprobs},'
            f'"finish_reason":{reason}{extra}}}'
        )

    def _chunk(self, choice: str, tail: str = "") -> bytes:
        # As in OpenAI: with include_usage, every chunk but the last has `usage: null`.
        usage_field = ""
        if self._request.continuous_usage:
            so_far = json.dumps(usage(self._generation), separators=(",", ":"))
            usage_field = f',"usage":{so_far}'
        elif self._request.include_usage:
            usage_field = ',"usage":null'
        return f'data: {self._prefix},"choices":[{choice}]{usage_field}{tail}}}\n\n'.encode()

    def _statistics(self) -> str:
        return f',"metrics":{json.dumps(metrics(self._generation), separators=(",", ":"))}'
