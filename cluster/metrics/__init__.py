"""Every metric with a name of our own, declared once, with its definition and unit.

A request is what a client sends; it asks for one text or several (n, best_of, prompts in a list).
`vllm_metrics` has those with vLLM's names, `recorder` holds the values.
"""

from __future__ import annotations

from cluster.metrics.metric import ITL_SECONDS, SEGMENT_SECONDS, TOKENS, TTFT_SECONDS
from cluster.metrics.metric import Metric as Metric

REQUESTS = Metric(
    "drafthouse_requests",
    "counter",
    "Requests that are over; several texts count as one. finish_reason: the first that one has of "
    "error (after the answer had begun), cancelled, length, stop.",
    ("task", "segment", "finish_reason"),
)
REJECTED = Metric(
    "drafthouse_rejected_requests",
    "counter",
    "Requests that were answered with an error alone, by its code.",
    ("code",),
)
KEY_TOKENS = Metric(
    "drafthouse_key_tokens",
    "counter",
    "Tokens of requests that are over, by their API key's name. kind: prompt, cached (those of "
    "prompt that were in the prefix cache), output, counted as drafthouse_prompt_tokens and "
    "drafthouse_output_tokens. Beyond the first 100 keys of an ingress process: `(other)`.",
    ("key", "kind"),
)
AUDITED = Metric(
    "drafthouse_audited_texts",
    "counter",
    "Finished texts that were verified again (coordinator.audit). outcome: equal, near_tie (drawn "
    "so from logits that differ by rounding), mismatch, failed (no target could say), skipped.",
    ("outcome",),
)
ARM_TOKENS = Metric(
    "drafthouse_arm_tokens",
    "counter",
    "Tokens behind a first one, by coordinator.switchback: drafts, plain_windows.",
    ("arm",),
)
ARM_SECONDS = Metric(
    "drafthouse_arm_decode_seconds", "counter", "Time that texts waited for these.", ("arm",)
)
SWITCHBACK_SPEEDUP = Metric(
    "drafthouse_switchback_speedup",
    "gauge",
    "Speed around plain windows over that within. bound: mean, low, high (its 95 % interval).",
    ("bound",),
)
RUNNING = Metric(
    "drafthouse_running_requests",
    "gauge",
    "Texts at targets, and prompts that are scored there.",
)
QUEUED = Metric("drafthouse_queued_requests", "gauge", "Such texts in the queue.")
PROMPT_TOKENS = Metric(
    "drafthouse_prompt_tokens",
    "counter",
    "Prompt tokens of requests whose answer has begun, as `usage` says them: a prompt counts once, "
    "whether it has several texts, or is scored.",
    ("task", "segment"),
)
OUTPUT_TOKENS = Metric(
    "drafthouse_output_tokens",
    "counter",
    "Output tokens of requests, as `usage` says them: up to a stop string, of all samples "
    "(best_of), of a beam search those of the texts that it returns.",
    ("task", "segment"),
)
TOKEN_RATE = Metric(
    "drafthouse_tokens_per_second",
    "gauge",
    "These tokens, per second, in the last ten full seconds. kind: prompt or output.",
    ("kind",),
)
TTFT = Metric(
    "drafthouse_time_to_first_token_seconds",
    "histogram",
    "Time from a text's arrival to its first token.",
    ("task",),
    TTFT_SECONDS,
)
ITL = Metric(
    "drafthouse_inter_token_latency_seconds",
    "histogram",
    "Time between two pieces of a stream, divided by the tokens of the later one.",
    ("task",),
    ITL_SECONDS,
)
# Both labels on each of these would be more series than all others together.
SEGMENT_TTFT = Metric(
    "drafthouse_segment_time_to_first_token_seconds",
    "histogram",
    "drafthouse_time_to_first_token_seconds by segment, where segments are configured.",
    ("segment",),
    SEGMENT_SECONDS,
)
SEGMENT_ITL = Metric(
    "drafthouse_segment_inter_token_latency_seconds",
    "histogram",
    "drafthouse_inter_token_latency_seconds by segment, where segments are configured.",
    ("segment",),
    tuple(bound / 10.0 for bound in SEGMENT_SECONDS),
)
SEGMENT_DRAFT_TOKENS = Metric(
    "drafthouse_segment_draft_tokens",
    "counter",
    "Draft tokens verified, where segments are configured.",
    ("segment",),
)
SEGMENT_ACCEPTED_TOKENS = Metric(
    "drafthouse_segment_accepted_draft_tokens",
    "counter",
    "Draft tokens accepted, where segments are configured.",
    ("segment",),
)
STEPS = Metric("drafthouse_target_steps", "counter", "Target steps.", ("target",))
STEP_TIME = Metric(
    "drafthouse_target_step_seconds",
    "histogram",
    "Time of a target step: forward pass, drawing tokens, comparing them with the draft.",
    ("target",),
)
FORWARD_TIME = Metric(
    "drafthouse_target_forward_seconds",
    "histogram",
    "Time of the model's forward pass within a step.",
    ("target",),
)
ROUND_OVERHEAD = Metric(
    "drafthouse_round_overhead_seconds",
    "histogram",
    "Time from one step of a target to the next, without the forward pass and what residents "
    "drafted: draws, choice of drafts, verdicts. Of steps that read no prompt.",
)
BATCH_SIZE = Metric(
    "drafthouse_batch_size", "histogram", "Sequences per decode step.", (), (*TOKENS, 32.0, 64.0)
)
BATCH_PURITY = Metric(
    "drafthouse_batch_purity",
    "gauge",
    "Mean share of a coordinator's texts in a step that belongs to their most frequent task class.",
)
DEFICIT = Metric(
    "drafthouse_speculation_deficit_seconds",
    "gauge",
    "Time that speculation has cost, against plain decoding, and not yet saved again.",
    ("target",),
)
SPEEDUP = Metric(
    "drafthouse_estimated_speedup",
    "gauge",
    "Time that the latest tokens would have taken without drafts, as measured plain steps tell, "
    "divided by the time that they took, drafting included. 1 = drafts bring nothing.",
    ("target",),
)
PLAIN_STEPS = Metric(
    "drafthouse_plain_steps",
    "counter",
    "Steps without drafts of texts that could have had some.  why: guard (they have cost what they "
    "may), no_drafts, not_worth_it, unmeasured, fault, schedule "
    "(coordinator.draft_length allows none).",
    ("why",),
)
BOOKKEEPING_FAULTS = Metric(
    "drafthouse_bookkeeping_faults",
    "counter",
    "Errors in code that only learns from rounds (statistics, calibration, planning). The rounds "
    "went on without it. Each one is a bug: please report it.",
    ("part",),
)
SPEC_STEPS = Metric(
    "drafthouse_spec_steps",
    "counter",
    "Steps of a text that verified at least one draft token. Mean acceptance length = 1 + "
    "drafthouse_accepted_draft_tokens / this. These and the following count what targets have "
    "verified, also behind a stop string, which an answer leaves out of its own statistics.",
    ("task",),
)
NUM_DRAFTS = Metric(
    "drafthouse_drafts",
    "counter",
    "Steps of a text that verified at least one draft token of the drafter. A step with drafts "
    "of several counts for each of them; all steps are drafthouse_spec_steps.",
    ("drafter", "task"),
)
NUM_DRAFT_TOKENS = Metric(
    "drafthouse_draft_tokens",
    "counter",
    "Draft tokens verified. One that several drafters had proposed counts for the one whose drafts "
    "have been worth most. Acceptance rate = drafthouse_accepted_draft_tokens / this.",
    ("drafter", "task"),
)
NUM_ACCEPTED_TOKENS = Metric(
    "drafthouse_accepted_draft_tokens",
    "counter",
    "Draft tokens accepted, credited likewise.",
    ("drafter", "task"),
)
NUM_SHARED_TOKENS = Metric(
    "drafthouse_shared_accepted_tokens",
    "counter",
    "Draft tokens accepted that the drafter had proposed too, and that count for another one.",
    ("drafter", "task"),
)
# Without the task, because depths may be many.
NUM_ACCEPTED_PER_POS = Metric(
    "drafthouse_accepted_draft_tokens_per_pos",
    "counter",
    "Draft tokens accepted, by depth in the tree from 0, credited likewise.",
    ("drafter", "position"),
)
CALIBRATION_ERROR = Metric(
    "drafthouse_survival_calibration_error",
    "gauge",
    "How far predicted acceptance is from what is accepted, over the last few thousand draft "
    "tokens: the mean difference over ten bins (expected calibration error). law: greedy or "
    "sampled.",
    ("drafter", "task", "law"),
)
EXPECTED_ACCEPTED = Metric(
    "drafthouse_expected_accepted_tokens",
    "gauge",
    "Tokens that the best four nodes of the drafter's trees would have brought, on average: every "
    "tree at hand is walked along the text that followed, verified or not.",
    ("drafter", "task", "law"),
)
BREAKERS_OPEN = Metric(
    "drafthouse_drafter_breakers_open",
    "gauge",
    "Replicas of the drafter that are left alone for a while, after failures or stalls; of one "
    "inside targets, those targets.",
    ("drafter",),
)
DRAFTER_UP = Metric("drafthouse_drafter_up", "gauge", "Connected replicas.", ("drafter",))
DRAFTER_FAULTS = Metric(
    "drafthouse_drafter_faults",
    "counter",
    "Broken connections, refused messages and failed engines of drafters, by reason.",
    ("drafter", "why"),
)
DRAFTER_FOREIGN = Metric(
    "drafthouse_drafter_made_for_another_target",
    "counter",
    "Times that a drafter joined which was made for another target than the one that is served.",
    ("drafter",),
)
ROLLOUT_PHASE = Metric(
    "drafthouse_rollout_phase",
    "gauge",
    "Phase of a drafter in a rollout: 0 shadow, 1 canary, 2 active, 3 retired.",
    ("drafter",),
)
ROLLOUT_LEAD = Metric(
    "drafthouse_rollout_lead_tokens",
    "gauge",
    "Accepted tokens beyond those of the drafter that it replaces, per step of this phase.",
    ("drafter",),
)
ROLLOUT_CHANGES = Metric(
    "drafthouse_rollout_changes", "counter", "Times that it came to a phase.", ("drafter", "phase")
)
DRAFTER_AGE = Metric(
    "drafthouse_drafter_age_seconds",
    "gauge",
    "Time since the weights of the drafter's model were written, by the times of its files.",
    ("drafter",),
)
DRAFTER_REQUESTS = Metric(
    "drafthouse_drafter_requests", "gauge", "Requests that a drafter holds.", ("drafter", "worker")
)
DRAFTER_COMMITS = Metric(
    "drafthouse_drafter_commits", "counter", "Commits sent to the drafter.", ("drafter", "task")
)
DRAFT_TIME = Metric(
    "drafthouse_draft_seconds",
    "counter",
    "Time that the drafter's replicas spent on drafting. Mean time per tree = this / commits.",
    ("drafter",),
)
PRE_DRAFTED = Metric(
    "drafthouse_pre_drafted_steps",
    "counter",
    "Commits that asked for drafts. outcome: hit = the drafter's tree went on behind the committed "
    "tokens, so the next step had drafts at once; miss = it did not. Hit rate = hit / all.",
    ("drafter", "task", "outcome"),
)
DRAFT_DEMAND = Metric(
    "drafthouse_draft_demand_nodes",
    "counter",
    "Draft tokens that commits, or a resident's target, asked for. Mean = this / commits.",
    ("drafter", "task"),
)
KV_PAGES_IN_USE = Metric(
    "drafthouse_kv_pages_in_use",
    "gauge",
    "KV pages that requests hold. Pages that only the prefix cache keeps count as free.",
    ("role", "worker"),
)
KV_PAGES_TOTAL = Metric(
    "drafthouse_kv_pages",
    "gauge",
    "KV pages. Those of layers with a sliding window and those of layers without one count singly.",
    ("role", "worker"),
)
ENGINE = Metric(
    "drafthouse_engine_info",
    "gauge",
    "1 for every engine, with what it computes with. engine: the drafter inside a target whose "
    "engine it is; empty = the worker's own. attention: native, triton or sdpa. graphs: cuda or "
    "none. kernels: of the other layers on a CPU (native, packed or torch), of the draws "
    "on a GPU (triton or torch). weights: their number format; int4g32|output=bf16 = four bits in "
    "groups of 32 inputs, the output layer in bfloat16.",
    ("role", "worker", "engine", "device", "attention", "graphs", "kernels", "weights"),
)
ENGINE_FALLBACKS = Metric(
    "drafthouse_engine_fallbacks",
    "gauge",
    "What runs in a slower way than was wanted; /health and the log say why. 0 on a GPU, if well.",
    ("role", "worker", "engine"),
)
TARGET_UP = Metric("drafthouse_target_up", "gauge", "Targets that the coordinator has.")
FAILOVERS = Metric("drafthouse_failovers", "counter", "Texts that were moved to another target.")
CACHE_MISSES = Metric(
    "drafthouse_target_cache_misses",
    "counter",
    "Steps of a sequence that the target could not run, because its KV cache lacked tokens; it was "
    "filled again from the target's own copy of the text.",
)

MISSING_PROCESSES = Metric(
    "drafthouse_missing_processes",
    "gauge",
    "Processes that did not answer this scrape in time. Their series are missing in it.",
    ("role",),
)

ALL: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))
