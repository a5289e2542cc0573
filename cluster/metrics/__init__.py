"""Every metric with a name of our own, declared once, with its definition and unit.

A request is what a client sends; it asks for one text or several (n, best_of, prompts in a list).
`vllm_metrics` has those with vLLM's names, `recorder` holds the values.
"""

from __future__ import annotations

from cluster.metrics.metric import Metric as Metric
from cluster.metrics.metric import counter, gauge, histogram

REQUESTS = counter(
    "drafthouse_requests",
    "Requests that are over; several texts count as one. finish_reason: the first that one has of "
    "error (after the answer had begun), cancelled, length, stop.",
    ("task", "segment", "finish_reason"),
)
REJECTED = counter(
    "drafthouse_rejected_requests",
    "Requests that were answered with an error alone, by its code.",
    ("code",),
)
KEY_TOKENS = counter(
    "drafthouse_key_tokens",
    "Tokens of requests that are over, by their API key's name. kind: prompt, cached (those of "
    "prompt that were in the prefix cache), output, counted as drafthouse_prompt_tokens and "
    "drafthouse_output_tokens. Beyond the first 100 keys of an ingress process: `(other)`.",
    ("key", "kind"),
)
AUDITED = counter(
    "drafthouse_audited_texts",
    "Finished texts that were verified again (coordinator.audit). outcome: equal, near_tie (drawn "
    "so from logits that differ by rounding), mismatch, failed (no target could say), skipped.",
    ("outcome",),
)
ARM_TOKENS = counter(
    "drafthouse_arm_tokens",
    "Tokens behind a first one, by coordinator.switchback: drafts, plain_windows.",
    ("arm",),
)
ARM_SECONDS = counter(
    "drafthouse_arm_decode_seconds", "Time that texts waited for these.", ("arm",)
)
SWITCHBACK_SPEEDUP = gauge(
    "drafthouse_switchback_speedup",
    "Speed around plain windows over that within. bound: mean, low, high (its 95 % interval).",
    ("bound",),
)
RUNNING = gauge(
    "drafthouse_running_requests",
    "Texts at targets, and prompts that are scored there.",
)
QUEUED = gauge("drafthouse_queued_requests", "Such texts in the queue.")
PROMPT_TOKENS = counter(
    "drafthouse_prompt_tokens",
    "Prompt tokens of requests whose answer has begun, as `usage` says them: a prompt counts once, "
    "whether it has several texts, or is scored.",
    ("task", "segment"),
)
OUTPUT_TOKENS = counter(
    "drafthouse_output_tokens",
    "Output tokens of requests, as `usage` says them: up to a stop string, of all samples "
    "(best_of), of a beam search those of the texts that it returns.",
    ("task", "segment"),
)
TOKEN_RATE = gauge(
    "drafthouse_tokens_per_second",
    "These tokens, per second, in the last ten full seconds. kind: prompt or output.",
    ("kind",),
)
# All bounds that vLLM has, since `vllm_metrics` tells the same series under its names; and finer
# ones below them, because small models write a token within a millisecond.
_LONG_SECONDS = (0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TTFT = histogram(
    "drafthouse_time_to_first_token_seconds",
    "Time from a text's arrival to its first token.",
    ("task",),
    (
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        *_LONG_SECONDS,
        160.0,
        640.0,
        2560.0,
    ),
)
ITL = histogram(
    "drafthouse_inter_token_latency_seconds",
    "Time between two pieces of a stream, divided by the tokens of the later one.",
    ("task",),
    (
        0.0005,
        0.001,
        0.002,
        0.003,
        0.005,
        0.0075,
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        *_LONG_SECONDS,
    ),
)
# Few bounds: there are as many histograms as segments.
_SEGMENT_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# Both labels on each of these would be more series than all others together.
SEGMENT_TTFT = histogram(
    "drafthouse_segment_time_to_first_token_seconds",
    "drafthouse_time_to_first_token_seconds by segment, where segments are configured.",
    ("segment",),
    _SEGMENT_SECONDS,
)
SEGMENT_ITL = histogram(
    "drafthouse_segment_inter_token_latency_seconds",
    "drafthouse_inter_token_latency_seconds by segment, where segments are configured.",
    ("segment",),
    tuple(bound / 10.0 for bound in _SEGMENT_SECONDS),
)
SEGMENT_DRAFT_TOKENS = counter(
    "drafthouse_segment_draft_tokens",
    "Draft tokens verified, where segments are configured.",
    ("segment",),
)
SEGMENT_ACCEPTED_TOKENS = counter(
    "drafthouse_segment_accepted_draft_tokens",
    "Draft tokens accepted, where segments are configured.",
    ("segment",),
)
STEPS = counter("drafthouse_target_steps", "Target steps.", ("target",))
STEP_TIME = histogram(
    "drafthouse_target_step_seconds",
    "Time of a target step: forward pass, drawing tokens, comparing them with the draft.",
    ("target",),
)
FORWARD_TIME = histogram(
    "drafthouse_target_forward_seconds",
    "Time of the model's forward pass within a step.",
    ("target",),
)
ROUND_OVERHEAD = histogram(
    "drafthouse_round_overhead_seconds",
    "Time from one step of a target to the next, without the forward pass and what residents "
    "drafted: draws, choice of drafts, verdicts. Of steps that read no prompt.",
)
BATCH_SIZE = histogram(
    "drafthouse_batch_size",
    "Sequences per decode step.",
    buckets=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0),
)
BATCH_PURITY = gauge(
    "drafthouse_batch_purity",
    "Mean share of a coordinator's texts in a step that belongs to their most frequent task class.",
)
DEFICIT = gauge(
    "drafthouse_speculation_deficit_seconds",
    "Time that speculation has cost, against plain decoding, and not yet saved again.",
    ("target",),
)
SPEEDUP = gauge(
    "drafthouse_estimated_speedup",
    "Time that the latest tokens would have taken without drafts, as measured plain steps tell, "
    "divided by the time that they took, drafting included. 1 = drafts bring nothing.",
    ("target",),
)
PLAIN_STEPS = counter(
    "drafthouse_plain_steps",
    "Steps without drafts of texts that could have had some.  why: guard (they have cost what they "
    "may), no_drafts, not_worth_it, unmeasured, fault, schedule "
    "(coordinator.draft_length allows none).",
    ("why",),
)
BOOKKEEPING_FAULTS = counter(
    "drafthouse_bookkeeping_faults",
    "Errors in code that only learns from rounds (statistics, calibration, planning). The rounds "
    "went on without it. Each one is a bug: please report it.",
    ("part",),
)
SPEC_STEPS = counter(
    "drafthouse_spec_steps",
    "Steps of a text that verified at least one draft token. Mean acceptance length = 1 + "
    "drafthouse_accepted_draft_tokens / this. These and the following count what targets have "
    "verified, also behind a stop string, which an answer leaves out of its own statistics.",
    ("task",),
)
NUM_DRAFTS = counter(
    "drafthouse_drafts",
    "Steps of a text that verified at least one draft token of the drafter. A step with drafts "
    "of several counts for each of them; all steps are drafthouse_spec_steps.",
    ("drafter", "task"),
)
NUM_DRAFT_TOKENS = counter(
    "drafthouse_draft_tokens",
    "Draft tokens verified. One that several drafters had proposed counts for the one whose drafts "
    "have been worth most. Acceptance rate = drafthouse_accepted_draft_tokens / this.",
    ("drafter", "task"),
)
NUM_ACCEPTED_TOKENS = counter(
    "drafthouse_accepted_draft_tokens",
    "Draft tokens accepted, credited likewise.",
    ("drafter", "task"),
)
NUM_SHARED_TOKENS = counter(
    "drafthouse_shared_accepted_tokens",
    "Draft tokens accepted that the drafter had proposed too, and that count for another one.",
    ("drafter", "task"),
)
# Without the task, because depths may be many.
NUM_ACCEPTED_PER_POS = counter(
    "drafthouse_accepted_draft_tokens_per_pos",
    "Draft tokens accepted, by depth in the tree from 0, credited likewise.",
    ("drafter", "position"),
)
CALIBRATION_ERROR = gauge(
    "drafthouse_survival_calibration_error",
    "How far predicted acceptance is from what is accepted, over the last few thousand draft "
    "tokens: the mean difference over ten bins (expected calibration error). law: greedy or "
    "sampled.",
    ("drafter", "task", "law"),
)
EXPECTED_ACCEPTED = gauge(
    "drafthouse_expected_accepted_tokens",
    "Tokens that the best four nodes of the drafter's trees would have brought, on average: every "
    "tree at hand is walked along the text that followed, verified or not.",
    ("drafter", "task", "law"),
)
BREAKERS_OPEN = gauge(
    "drafthouse_drafter_breakers_open",
    "Replicas of the drafter that are left alone for a while, after failures or stalls; of one "
    "inside targets, those targets.",
    ("drafter",),
)
DRAFTER_UP = gauge("drafthouse_drafter_up", "Connected replicas.", ("drafter",))
DRAFTER_FAULTS = counter(
    "drafthouse_drafter_faults",
    "Broken connections, refused messages and failed engines of drafters, by reason.",
    ("drafter", "why"),
)
DRAFTER_FOREIGN = counter(
    "drafthouse_drafter_made_for_another_target",
    "Times that a drafter joined which was made for another target than the one that is served.",
    ("drafter",),
)
ROLLOUT_PHASE = gauge(
    "drafthouse_rollout_phase",
    "Phase of a drafter in a rollout: 0 shadow, 1 canary, 2 active, 3 retired.",
    ("drafter",),
)
ROLLOUT_LEAD = gauge(
    "drafthouse_rollout_lead_tokens",
    "Accepted tokens beyond those of the drafter that it replaces, per step of this phase.",
    ("drafter",),
)
ROLLOUT_CHANGES = counter(
    "drafthouse_rollout_changes", "Times that it came to a phase.", ("drafter", "phase")
)
DRAFTER_AGE = gauge(
    "drafthouse_drafter_age_seconds",
    "Time since the weights of the drafter's model were written, by the times of its files.",
    ("drafter",),
)
DRAFTER_REQUESTS = gauge(
    "drafthouse_drafter_requests", "Requests that a drafter holds.", ("drafter", "worker")
)
DRAFTER_COMMITS = counter(
    "drafthouse_drafter_commits", "Commits sent to the drafter.", ("drafter", "task")
)
DRAFT_TIME = counter(
    "drafthouse_draft_seconds",
    "Time that the drafter's replicas spent on drafting. Mean time per tree = this / commits.",
    ("drafter",),
)
PRE_DRAFTED = counter(
    "drafthouse_pre_drafted_steps",
    "Commits that asked for drafts. outcome: hit = the drafter's tree went on behind the committed "
    "tokens, so the next step had drafts at once; miss = it did not. Hit rate = hit / all.",
    ("drafter", "task", "outcome"),
)
DRAFT_DEMAND = counter(
    "drafthouse_draft_demand_nodes",
    "Draft tokens that commits, or a resident's target, asked for. Mean = this / commits.",
    ("drafter", "task"),
)
KV_PAGES_IN_USE = gauge(
    "drafthouse_kv_pages_in_use",
    "KV pages that requests hold. Pages that only the prefix cache keeps count as free.",
    ("role", "worker"),
)
KV_PAGES_TOTAL = gauge(
    "drafthouse_kv_pages",
    "KV pages. Those of layers with a sliding window and those of layers without one count singly.",
    ("role", "worker"),
)
ENGINE = gauge(
    "drafthouse_engine_info",
    "1 for every engine, with what it computes with. engine: the drafter inside a target whose "
    "engine it is; empty = the worker's own. attention: native, triton or sdpa. graphs: cuda or "
    "none. kernels: of the other layers on a CPU (native, packed or torch), of the draws "
    "on a GPU (triton or torch). weights: their number format; int4g32|output=bf16 = four bits in "
    "groups of 32 inputs, the output layer in bfloat16.",
    ("role", "worker", "engine", "device", "attention", "graphs", "kernels", "weights"),
)
ENGINE_FALLBACKS = gauge(
    "drafthouse_engine_fallbacks",
    "What runs in a slower way than was wanted; /health and the log say why. 0 on a GPU, if well.",
    ("role", "worker", "engine"),
)
TARGET_UP = gauge("drafthouse_target_up", "Targets that the coordinator has.")
FAILOVERS = counter("drafthouse_failovers", "Texts that were moved to another target.")
CACHE_MISSES = counter(
    "drafthouse_target_cache_misses",
    "Steps of a sequence that the target could not run, because its KV cache lacked tokens; it was "
    "filled again from the target's own copy of the text.",
)

MISSING_PROCESSES = gauge(
    "drafthouse_missing_processes",
    "Processes that did not answer this scrape in time. Their series are missing in it.",
    ("role",),
)

ALL = tuple(value for value in globals().values() if isinstance(value, Metric))
