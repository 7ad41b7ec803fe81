#pragma once

// Shared prefixes ("pools"): records, events, the published state and the routes of the engine protocol.
// Law: public types only; nothing here touches a llama_context or a slot. The glue that does is server-polykv-slots.inc.
// Threads: every method of polykv_hub may be called from any thread.

#include "common.h"
#include "json.h"
#include "llama.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

struct server_http_context;
struct server_http_req;
struct server_http_res;
struct server_context;
struct server_task;
struct server_task_result;
struct polykv_op;

// a sequence id above the slots; gen tells its allocations apart
struct polykv_seq_id {
    int32_t  seq = -1;
    uint64_t gen = 0;

    bool empty() const { return seq < 0; }
    bool operator==(const polykv_seq_id & other) const { return seq == other.seq && gen == other.gen; }

    std::string str() const;
    static bool parse(const std::string & text, polykv_seq_id & out);
};

// part of task_params: what the headers of the request said
struct polykv_params {
    int64_t  t_post  = 0;     // ggml_time_us() just before the task was posted
    bool     named   = false; // came with a valid key and a request number
    uint64_t req     = 0;
    uint64_t session = 0;

    polykv_seq_id seq;          // attach to this
    int32_t       n_shared = 0; // at most this many tokens

    bool          prefill_only = false; // materialise: fill dst, generate nothing
    polykv_seq_id dst;

    std::shared_ptr<const common_json> echo; // merged into the opencoti object
};

// part of server_prompt: how the cells of a slot relate to other sequences
struct polykv_share {
    int32_t n     = 0;     // the first n tokens are (or may be) in cells that other sequences hold too
    bool    dirty = false; // KV was moved, or made under other adapters: never share it

    polykv_seq_id seq;     // where they came from
};

// part of server_task_result: facts about a named request, complete when the prompt starts processing
struct polykv_facts {
    int32_t slot     = -1;
    int32_t n_cached = 0;
    int32_t n_shared = 0;
    bool    has_seq  = false;

    const char * miss = nullptr;
    double       tps  = -1.0; // accepted tokens per second since the first one, < 0 if unknown

    std::shared_ptr<const common_json> echo;

    int32_t n_ctx_left = -1; // of the slot's context when the request ended, < 0 before that
};

// states of memory that cannot be cut back (window, recurrent), by number of tokens, ascending
using polykv_checkpoints = std::vector<std::shared_ptr<const common_prompt_checkpoint>>;

struct polykv_seq_record {
    polykv_seq_id id;
    bool          ready = false; // false: reserved, being materialised

    std::shared_ptr<const llama_tokens>   tokens;
    std::vector<common_adapter_lora_info> lora;
    uint32_t                              n_cells = 0;
    polykv_checkpoints                    checkpoints;
};

// the positions at which a materialisation of n_tokens keeps a state: evenly spaced, and one token before the end
struct polykv_spacing {
    int32_t n_tokens = 0;
    int32_t step     = 0; // 0: none

    polykv_spacing() = default;
    polykv_spacing(int32_t n_tokens, uint64_t state_bytes);

    bool at(int32_t n) const { return step > 0 && n > 0 && n < n_tokens && (n % step == 0 || n == n_tokens - 1); }
};

// a part of the KV in use; bytes are those of windows, recurrent state and the draft model too
struct polykv_held {
    uint32_t n_cells = 0;
    uint64_t n_bytes = 0;
};

struct polykv_slot_totals {
    uint64_t n_decoded = 0, us_decode = 0, n_prompt = 0, n_cached = 0, n_launched = 0;
    int64_t  t_last_token_us = 0;
};

struct polykv_slot_state {
    int32_t       slot = 0;
    const char *  state = "idle";
    uint64_t      req = 0, session = 0;
    int32_t       task = -1;
    bool          fill = false; // the task generates nothing
    polykv_seq_id seq;
    int32_t       n_shared = 0, n_tokens = 0, n_ctx = 0;
    polykv_held   own;
    uint64_t      checkpoint_bytes = 0;
    uint64_t      n_decoded = 0, us_decode = 0; // of the task

    polykv_slot_totals totals;
};

enum polykv_phase { POLYKV_PHASE_LOADING, POLYKV_PHASE_READY, POLYKV_PHASE_SLEEPING };

// who owns how much of what is in use: all of it has one owner, the oldest sequence that holds it, else a slot
struct polykv_owners {
    std::vector<std::pair<polykv_seq_id, polykv_held>> seqs;
    std::vector<polykv_held>                           slots;

    polykv_held other; // what neither holds: a sequence that is being restored
};

// a sequence that is ready. checkpoint_bytes: host memory of those that no older sequence keeps
struct polykv_seq_state {
    polykv_seq_id id;
    size_t        n_tokens = 0;
    uint32_t      n_cells  = 0;
    polykv_held   own;
    uint64_t      checkpoint_bytes = 0;
};

// published by the main thread, read by HTTP threads
struct polykv_state {
    uint64_t update = 0;
    int64_t  t_us   = 0;
    uint32_t n_cells_used = 0, n_cells = 0, n_cells_swa_used = 0, n_cells_swa = 0;
    uint64_t n_bytes_used = 0, n_bytes_total = 0; // KV and recurrent state, of the draft model too

    polykv_owners owners; // as of the last count

    std::vector<polykv_slot_state> slots;
};

// what a reader of the counters was told last
struct polykv_counters_seen {
    std::string  id_boot;
    polykv_phase phase   = POLYKV_PHASE_LOADING;
    uint32_t     n_cells_used = 0;

    std::vector<polykv_slot_state> slots;
    std::vector<polykv_seq_state>  seqs;
};

struct polykv_event {
    uint64_t    id = 0;
    const char * type = "";
    std::string data;
};

struct polykv_hub {
    // sequences
    bool reserve(polykv_seq_id & out); // false: none free
    bool commit(const polykv_seq_id & id, polykv_seq_record && record); // false: the reservation is gone
    bool release(const polykv_seq_id & id); // false: it was gone already
    bool find(const polykv_seq_id & id, polykv_seq_record & out) const;
    std::vector<polykv_seq_state> list() const; // those that are ready, the oldest first

    // those that may go when cells run out, in this order; the list takes the place of the last one. returns how many are there
    size_t set_expendable(std::deque<polykv_seq_id> && ids);
    bool   give_up(polykv_seq_id & out); // releases the next of them and emits "evicted"; false: none is left

    // tasks that were posted and not launched, so that each ends in exactly one event
    void pending_add(int id_task, uint64_t req, uint64_t session, size_t index);
    void pending_take(int id_task); // it was launched
    void pending_drop(int id_task); // emits "dropped" if it was pending

    // sessions that were ended, in any boot; numbers are never re-used by the caller
    void end_session(uint64_t session);
    bool session_ended(uint64_t session) const;

    // a new context: every sequence and session of the old one is gone
    void boot(int32_t first_seq, int32_t n_seqs, common_json && hello);
    void set_phase(polykv_phase phase);
    polykv_phase get_phase() const;

    // state, returns its number
    uint64_t publish(polykv_state && state);
    uint64_t last_update() const;

    void emit(const char * type, const common_json & data);

    // JSON for the routes
    common_json hello_json() const;
    common_json state_json() const;

    // the slots that differ from what was seen, all of them in a new boot; false: nothing is new
    bool read_counters(polykv_counters_seen & seen, common_json & out) const;

    // blocks until there are events after `last`, at most timeout_ms; sets resync if `last` cannot be served
    std::vector<polykv_event> wait_events(uint64_t last, int timeout_ms, bool & resync) const;
    polykv_event              resync_event() const;

    std::string boot_id() const;

    // wakes all readers for good
    void stop();
    bool stopping() const { return stop_flag.load(); }

private:
    void emit_locked(const char * type, const common_json & data);
    std::vector<polykv_seq_state> list_locked() const;

    struct pending_task { uint64_t req; uint64_t session; size_t index; };

    mutable std::mutex              mutex;
    mutable std::condition_variable cond;

    std::atomic<bool> stop_flag { false };

    polykv_phase phase = POLYKV_PHASE_LOADING;
    std::string  id_boot;
    common_json  hello;

    int32_t  first_seq = 0;
    uint64_t n_gen     = 0; // generations are unique over all ids and boots
    std::vector<polykv_seq_record> seqs;
    std::deque<polykv_seq_id>      expendable;

    std::map<int, pending_task> pending;

    std::set<uint64_t> ended;

    polykv_state state;
    uint64_t     n_updates = 0;

    uint64_t                 n_events = 0;
    std::deque<polykv_event> events;
};

polykv_hub & polykv_get_hub();

// unix time that never steps: read once, then counted by the steady clock
int64_t polykv_now_us();

// work for the main thread, carried by a task of type SERVER_TASK_TYPE_POLYKV
struct polykv_op {
    enum kind_t { SNAPSHOT, FREE_SEQ, END_SESSION, READ_PART, WRITE_PART, FINISH } kind;

    polykv_seq_id seq;     // SNAPSHOT, WRITE_PART, FINISH: reserved for it. FREE_SEQ, READ_PART: the one meant
    uint64_t      session  = 0;
    int32_t       n_tokens = -1;

    std::shared_ptr<struct polykv_part> part; // READ_PART fills it, WRITE_PART puts it into the cache

    polykv_seq_id             parent; // FINISH: [0, from) comes from here
    int32_t                   from = 0;
    polykv_seq_record         record; // FINISH: tokens and checkpoints

    explicit polykv_op(kind_t kind) : kind(kind) {}
};

// KV of the positions [from, to) of a sequence, as llama_state_seq_get_data_ext() gives it
struct polykv_part {
    int32_t from = 0, to = 0;

    std::vector<uint8_t> tgt, dft;
};

// a sequence in a file: its own range, with the identity of model and build, lengths and a hash over everything
struct polykv_file {
    std::string  fingerprint;
    llama_tokens tokens;   // [0, n)
    int32_t      from = 0; // parts cover [from, n)

    std::vector<std::shared_ptr<polykv_part>> parts;
    polykv_checkpoints                        checkpoints;
};

// throws std::runtime_error that says what is wrong with the file; nothing half-written stays
void        polykv_write_file(const std::string & path, const polykv_file & file);
polykv_file polykv_read_file (const std::string & path, const std::string & fingerprint);

// what hello says of a model and its memory
common_json polykv_hello(const struct llama_model * model, const std::string & path, const std::string & name, const struct llama_polykv_info & mem);

// what saved KV depends on beside the model: cache types and streams, position encoding, build
std::string polykv_kv_identity(const common_params & params, uint32_t n_streams);

// an error of the protocol, known to the caller by its type
struct polykv_error {
    int         status = 0; // 0: no error
    std::string type;
    std::string message;

    common_json to_json() const;
};

//
// hooks in the HTTP handlers
//

// a header of the request, its name compared without regard to case; empty if absent
std::string polykv_get_header(const server_http_req & req, const char * name);

// little-endian
void polykv_append_i32(std::string & out, int32_t val);

// true if the request carries the key of this process
bool polykv_authorized(const server_http_req & req);

// reads the x-polykv-* headers into the task
void polykv_bind(const server_http_req & req, server_task & task, size_t index);

// before the tasks are posted; true if the answer is already complete (dry run)
bool polykv_before_post(const server_http_req & req, const std::vector<server_task> & tasks, server_http_res & res);

void        polykv_set_headers(server_http_res & res, const server_task_result & result);
common_json polykv_to_json(server_task_result & result); // to_json() and the opencoti object

void polykv_register_routes(const server_http_context & ctx_http, server_context & ctx_server);
void polykv_stop();
