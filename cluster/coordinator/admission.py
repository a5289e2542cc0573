"""Who gets in: the check of a request, the drafters it may have, and the target where it goes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from cluster.config.processes import RECORDER
from cluster.config.schema import Config
from cluster.coordinator.session import Session
from cluster.coordinator.targets import TargetSeat
from cluster.core import Request
from cluster.draft.registry import has_laws
from cluster.errors import ContextLengthError, NotFoundError, RequestError, TooLargeError
from cluster.requests.fields import REMOVED_LAWS, Law
from cluster.rpc.messages import WorkerDescription
from cluster.spec.params import check_params, check_tokens, clash_of_law
from cluster.spec.tree_check import num_ids


def check_request(request: Request, served: WorkerDescription, config: Config) -> None:
    """Raise the RequestError that names the first value that cannot be served, and the remedy.

    served: what every target can serve; of what is 0 or empty nothing is known yet."""
    max_frame_tokens = config.coordinator.max_frame_tokens
    prompt_len = len(request.prompt_ids) + len(request.output_ids)
    if len(request.prompt_ids) == 0:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt")
    if served.max_context_len and prompt_len >= served.max_context_len:
        raise ContextLengthError.of(
            prompt_len,
            served.max_context_len,
            "reduce the length of the prompt or raise target.engine.max_context_len",
        )
    if prompt_len > max_frame_tokens:
        raise TooLargeError(
            f"the prompt has {prompt_len} tokens; one frame carries {max_frame_tokens}; "
            "shorten the prompt or raise coordinator.max_frame_bytes",
            param="prompt",
        )
    # While no target has told its vocabulary, ids are checked against none; the target will.
    vocab_size = num_ids(served.vocab_size)
    check_tokens("prompt", request.prompt_ids, vocab_size)
    check_tokens("output_ids", request.output_ids, vocab_size)
    check_params(request.params, vocab_size)
    if request.params.max_tokens < 1:
        raise RequestError(
            f"max_tokens is {request.params.max_tokens}; it must be at least 1", param="max_tokens"
        )
    _check_given(request, prompt_len, max_frame_tokens)
    options = request.speculation
    if options.max_draft_tokens is not None and options.max_draft_tokens < 0:
        param = "speculation.max_draft_tokens"
        raise RequestError(
            f"{param} is {options.max_draft_tokens}; it must be at least 0", param=param
        )
    for name in options.drafters or ():
        _check_known("drafter", name, config.on_their_own, "speculation.drafters")
    if options.latency_class is not None:
        classes = config.coordinator.latency_classes
        param = "speculation.latency_class"
        _check_known("latency class", options.latency_class, classes, param)


def _check_known(kind: str, name: str, known: Collection[str], param: str) -> None:
    if name not in known:
        raise NotFoundError(
            f"no {kind} is named {name!r}; served are: {', '.join(known) or 'none'}", param=param
        )


def with_law(request: Request, laws: Sequence[Law]) -> Request:
    """Return the request with the law by which its drafts are accepted.

    laws: those of the deployment, the first for requests that name none, where it can serve them.
    """
    law = request.speculation.law or laws[0]
    if law not in laws:
        remedy = REMOVED_LAWS.get(law) or f"allowed: {', '.join(laws)} (coordinator.laws)"
        raise RequestError(f"speculation.law is {law!r}; {remedy}", param="speculation.law")
    if request.speculation.law is None and clash_of_law(request.params):
        law = "coupled"
    return replace(request, params=replace(request.params, law=law))


def _check_given(request: Request, prompt_len: int, max_frame_tokens: int) -> None:
    # They stand in the frame that opens the request, beside the prompt; a forced output comes once
    # more as the tokens that an opening repeats.
    for name, times in (("prediction", 1), ("forced_ids", 2)):
        given = getattr(request.params, name)
        if given and prompt_len + len(given) * times > max_frame_tokens:
            raise TooLargeError(
                f"{name} has {len(given)} tokens and the prompt {prompt_len}; one frame carries "
                f"{max_frame_tokens}; shorten them or raise coordinator.max_frame_bytes",
                param=name,
            )


def allowed_drafters(config: Config, request: Request) -> tuple[str, ...]:
    """Return the drafters that the request and its task allow, best first."""
    allowed = request.speculation.drafters
    return config.drafters_of(request.task) if allowed is None else allowed


def helpers(config: Config, request: Request) -> tuple[str, ...]:
    """Return those of them that are to draft for it."""
    drafters, params = config.drafters, request.params
    # One of a prediction, or of a grammar, costs nothing without it.
    needed = {"prediction": params.prediction, "grammar": params.grammar, RECORDER: None}
    names = tuple(
        name for name in allowed_drafters(config, request) if needed.get(drafters[name].kind, True)
    )
    if params.is_coupled:
        # Who may come to replace a drafter is one of the text's wherever that one is.
        followers = {each.replaces: name for name, each in config.rollouts.items()}
        return tuple(dict.fromkeys((*names, *filter(None, map(followers.get, names)))))
    # A text under a textbook law has one: the first whose laws are believed, else the first.
    unproven = config.shadows.union(config.rollouts)
    able = [name for name in names if name not in unproven]
    able.sort(key=lambda name: not (name in config.residents and has_laws(drafters[name].kind)))
    return tuple(able[:1])


# Where a text goes: like to like, as long as the targets are about equally busy.


def choose_seat(session: Session, seats: Iterable[TargetSeat]) -> TargetSeat | None:
    """Return the best of the targets with room, None without one.

    It is the one that holds the longest prefix, if that is half of the text or more: with less, as
    a chat's opening is, too little is saved to crowd one target.  Then the one of whose texts the
    smallest share is of other groups, then the one with most free seats.  A target with less than
    half of the free seats of another is left out, so that no preference piles up texts.  The one
    that has failed the text is taken only if there is no other.
    """
    free = [seat for seat in seats if seat.has_room()]
    free = [seat for seat in free if seat.id != session.shunned_target] or free
    most = max((seat.num_free for seat in free), default=0)
    return max(
        (seat for seat in free if 2 * seat.num_free >= most),
        key=lambda seat: (
            _worthwhile(seat, session),
            -_share_of_others(seat, session),
            seat.num_free,
        ),
        default=None,
    )


def _worthwhile(seat: TargetSeat, session: Session) -> int:
    num_held = seat.num_held(session)
    return num_held if 2 * num_held >= len(session.tokens) else 0


def _share_of_others(seat: TargetSeat, session: Session) -> float:
    """Return which part of this coordinator's texts there is of other groups than `session`."""
    num_others = sum(each.text.group != session.text.group for each in seat.sessions.values())
    return num_others / len(seat.sessions) if num_others else 0.0
