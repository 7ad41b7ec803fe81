"""Every metric that the proxy adds to the engine's page.

Law: what is not described here is not shown. `polykv_` is ours, in base units; the names of `opencoti_polykv:` are those of the
control plane's design, and those of `vllm:` the model-server contract of the Kubernetes Gateway API inference extension.
"""

from __future__ import annotations

from polykv_proxy.observability.described import Described, Kind


def _gauge(name: str, text: str, *labels: str) -> Described:
    return Described(name, Kind.GAUGE, text, labels)


def _counter(name: str, text: str, *labels: str) -> Described:
    return Described(name, Kind.COUNTER, text, labels)


def _histogram(name: str, text: str, *labels: str) -> Described:
    return Described(name, Kind.HISTOGRAM, text, labels)


def _info(name: str, text: str, *labels: str) -> Described:
    return Described(name, Kind.INFO, text, labels)


# -- pools -----------------------------------------------------------------------------------------------------------------

POOL_TPS = _gauge("opencoti_polykv:gen_throughput_tps", "Tokens per second that the pool's sessions generate now.", "pool")
POOL_KV_BYTES = _gauge("opencoti_polykv:pool_kv_bytes", "KV that the pool made itself, shared cells once.", "pool")
POOL_SESSIONS = _gauge("opencoti_polykv:pool_sessions", "Sessions attached to the pool.", "pool")
POOL_HITS = _counter("opencoti_polykv:prefix_cache_hits", "Requests that took tokens from the pool.", "pool")
POOL_QUERIES = _counter("opencoti_polykv:queries", "Requests that named the pool.", "pool")
POOL_SAVED_TOKENS = _counter("polykv_pool_saved_prompt_tokens", "Prompt tokens that the pool saved from being computed.", "pool")
POOL_SAVED_SECONDS = _counter("polykv_pool_saved_seconds", "Estimate of the seconds of computing that the pool saved.", "pool")

# -- the model-server contract ----------------------------------------------------------------------------------------------

RUNNING = _gauge("vllm:num_requests_running", "Requests that the engine works on.", "model_name")
WAITING = _gauge("vllm:num_requests_waiting", "Requests that wait to be processed.", "model_name")
KV_USAGE = _gauge("vllm:kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1; what can be evicted is free.", "model_name")
OLD_KV_USAGE = _gauge("vllm:gpu_cache_usage_perc", "Former name of vllm:kv_cache_usage_perc.", "model_name")
CACHE_CONFIG = _info("vllm:cache_config", "Size of the KV cache.", "model_name", "block_size", "num_gpu_blocks")
PREFIX_QUERIES = _counter("vllm:prefix_cache_queries", "Tokens of prompts.", "model_name")
PREFIX_HITS = _counter("vllm:prefix_cache_hits", "Tokens of prompts that did not have to be computed.", "model_name")
OLD_PREFIX_QUERIES = _counter("vllm:gpu_prefix_cache_queries", "Former name of vllm:prefix_cache_queries.", "model_name")
OLD_PREFIX_HITS = _counter("vllm:gpu_prefix_cache_hits", "Former name of vllm:prefix_cache_hits.", "model_name")
PROMPT_TOKENS = _counter("vllm:prompt_tokens", "Tokens of prompts, computed or cached.", "model_name")
GENERATION_TOKENS = _counter("vllm:generation_tokens", "Tokens generated.", "model_name")
TTFT = _histogram("vllm:time_to_first_token_seconds", "From when a request is decided about to its first token.", "model_name")
GAPS = _histogram("vllm:inter_token_latency_seconds", "Between tokens: the mean of a turn for each of its gaps.", "model_name")

# -- requests ---------------------------------------------------------------------------------------------------------------

REQUESTS = _counter("polykv_requests", "Relayed requests by kind of path and by how they ended.", "route", "outcome")
IN_FLIGHT = _gauge("polykv_requests_in_flight", "Relayed requests that are not over.")
CONNECTIONS = _gauge("polykv_client_connections", "Connections of clients, idle ones included.")
UNWELCOME = _counter("polykv_client_connections_ended", "Connections that were ended for what clients did.", "reason")
RELAY_DELAY = _histogram("polykv_relay_delay_seconds", "From when a request could go to the engine until it went.")
PLAN = _histogram("polykv_plan_seconds", "Deciding a request that named a pool or session, a rebuild of its pool included.")
TURNS = _counter("polykv_turns", "Tasks of the engine that generate, by how they ended.", "reason")
QUEUE = _histogram("polykv_queue_seconds", "From when a request is decided about until the engine began with it.")
TURN_TTFT = _histogram("polykv_ttft_seconds", "From when a request is decided about to its first token.")
TPOT = _histogram("polykv_tpot_seconds", "Seconds per token after the first, by turn.")

# -- speed ------------------------------------------------------------------------------------------------------------------

AGGREGATE_TPS = _gauge("polykv_aggregate_tps", "Tokens per second that the engine generates.")
MEAN_TPS = _gauge("polykv_mean_active_tps", "Mean over generating sessions of the tokens per second that each experiences.")
PROMPT_TPS = _gauge("polykv_prompt_tps", "Prompt tokens per second that the engine computes.")
PRESSURE = _gauge("polykv_compaction_pressure_ratio", "How near contexts are to no longer fitting, 0 to 1.")
SESSIONS = _gauge("polykv_sessions", "Sessions, and requests of none, by state.", "state")

# -- pools and KV -----------------------------------------------------------------------------------------------------------

POOLS = _gauge("polykv_pools", "Pools by where their KV is.", "residency")
PINNED = _gauge("polykv_pools_pinned", "Pools with a pin.")
SEQ_IDS = _gauge("polykv_seq_ids_used", "Sequence ids of the engine that pools hold.")
MAX_SEQ_IDS = _gauge("polykv_seq_ids_max", "Sequence ids of the engine for pools.")
CELLS = _gauge("polykv_kv_cells_used", "Cells of the KV cache in use.")
MAX_CELLS = _gauge("polykv_kv_cells_max", "Cells of the KV cache.")
KV_BYTES = _gauge("polykv_kv_bytes", "KV by whose it is, shared cells once: pools, their sessions, all others.", "kind")
OWNED_BYTES = _gauge("polykv_kv_owned_bytes", "Sum of polykv_kv_bytes: what the proxy knows of.")
USED_BYTES = _gauge("polykv_kv_used_bytes", "KV in use by the engine's own count.")
NOT_SHARED = _counter("polykv_not_shared", "Turns that saved nothing by a pool, by reason.", "reason")
SAVED_TOKENS = _counter("polykv_saved_prompt_tokens", "Prompt tokens that pools saved from being computed.")
SAVED_SECONDS = _counter("polykv_saved_seconds", "Estimate of the seconds of computing that pools saved.")
REBUILDS = _counter("polykv_pool_rebuilds", "Pools whose KV was made anew for a request.", "outcome")
EVICTIONS = _counter("polykv_pool_evictions", "Pools that gave up their KV.", "cause")

DISK_BYTES = _gauge("polykv_disk_bytes", "Bytes of copies of pools' KV on disk.")
MAX_DISK_BYTES = _gauge("polykv_disk_bytes_max", "Bytes that copies may take; 0 without --kv-disk-bytes.")
COPIES = _counter("polykv_disk_copies", "Copies of pools' KV, by what became of them.", "outcome")
CHECKS = _counter("polykv_pool_checks", "Self-checks of pools, asked for or at intervals.", "verdict")

# -- the device -------------------------------------------------------------------------------------------------------------

GPU_SHARED = _gauge("polykv_gpu_share_enabled", "1 while the engine's device has a registry in which it can be found.")
GPU_PEERS = _gauge("polykv_gpu_peers", "Living engines on the device, ours included.")
GPU_SLOT = _gauge("polykv_gpu_slot", "Our engine's slot in the registry: its label `peer`. Absent while it has none.")
PEER_WEIGHT = _gauge("polykv_gpu_peer_weight", "Weight of an engine on the device, by its slot (0 to 15).", "peer")
PEER_SHARE = _gauge("polykv_gpu_peer_share_ratio", "Part of the device that it gets while those that are active compute.", "peer")
PEER_BUSY = _gauge("polykv_gpu_peer_busy_ratio", "Part of the time in which it computed.", "peer")
PEER_ACTIVE = _gauge("polykv_gpu_peer_active", "1 while it has computed within two seconds.", "peer")
PEER_AGE = _gauge("polykv_gpu_peer_heartbeat_age_seconds", "Since it last said that it lives.", "peer")

# -- admission --------------------------------------------------------------------------------------------------------------

DECISIONS = _counter("polykv_admission_decisions", "Requests by the arm that decided about them, and how.", "arm", "outcome")
HOLDS = _counter("polykv_admission_holds", "Requests that had to wait, by the arm that made them.", "arm")
ADVICE = _counter("polykv_admission_advised", "What advisory policies would have done, had they been enforced.", "arm", "outcome")
WAITS = _histogram("polykv_admission_wait_seconds", "How long those who had to wait waited, let in or not.")
QUEUED = _gauge("polykv_admission_queued", "Requests that wait to be admitted.")
ADMITTED = _gauge("polykv_admission_running", "Admitted requests that are not over.")
FLOOR_TPS = _gauge(
    "polykv_admission_floor_tps", "Tokens per second that the mean is to keep, where a policy was set.", "pool", "mode"
)
SETTLING = _gauge("polykv_admission_settling", "Policies whose last admissions are still being measured.", "pool")

# -- the proxy and its engine -----------------------------------------------------------------------------------------------

BUILD = _info("polykv_build", "This proxy.", "version")
ENGINE_STATE = _gauge("polykv_engine_state", "1 for the state that the engine is in.", "state")
LINKED = _gauge("polykv_engine_linked", "1 while the engine has pools and its events are followed.")
RESTARTS = _counter("polykv_engine_restarts", "Starts of the engine after the first.")
PAGE_FAILURES = _counter("polykv_engine_page_failures", "Attempts to read the engine's own metrics that failed.", "reason")
PAGE_AGE = _gauge("polykv_engine_page_age_seconds", "How old the engine's own metrics on this page are; absent without them.")
EVENT_GAPS = _counter("polykv_engine_event_gaps", "Times that events of the engine were missed and its state was read instead.")
WATCHER_GAPS = _counter("polykv_watcher_event_gaps", "Times that events for a watcher were gone before he took them.")
LOOP_LAG = _histogram("polykv_event_loop_lag_seconds", "How late the event loop ran a timer.")
JOURNAL_ERRORS = _counter("polykv_journal_errors", "Writes to the journal that failed.")
REPLAYS = _counter("polykv_idempotent_replays", "Answers repeated to an Idempotency-Key.")

ALL: tuple[Described, ...] = tuple(one for one in list(globals().values()) if isinstance(one, Described))


def reference() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for one in ALL:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        lines.append(f"| `{one.shown}` | {one.kind.value} | {labels} | {one.help} |")
    return "\n".join(lines)
