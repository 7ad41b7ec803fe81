#include "server-polykv.h"

// Law: needs no symbol of common.cpp or of the server, so that tests/cpp can link it alone (with common/json.cpp).

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <tuple>

using json = common_json;

static constexpr size_t POLYKV_N_EVENTS_MAX = 4096;
static constexpr size_t POLYKV_N_ENDED_MAX  = 65536;

int64_t polykv_now_us() {
    using namespace std::chrono;
    static const auto distance = system_clock::now().time_since_epoch() - steady_clock::now().time_since_epoch();
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch() + distance).count();
}

polykv_hub & polykv_get_hub() {
    static polykv_hub hub;
    return hub;
}

//
// polykv_seq_id
//

std::string polykv_seq_id::str() const {
    return std::to_string(seq) + "." + std::to_string(gen);
}

bool polykv_seq_id::parse(const std::string & text, polykv_seq_id & out) {
    const size_t dot = text.find('.');
    if (dot == std::string::npos || dot == 0 || dot > 4 || dot + 1 == text.size() || text.size() - dot - 1 > 19 ||
            text.find_first_not_of("0123456789.") != std::string::npos || text.find('.', dot + 1) != std::string::npos) {
        return false;
    }
    out.seq = std::stoi(text.substr(0, dot));
    out.gen = std::stoull(text.substr(dot + 1));
    return true;
}

// at most 8 states and 256 MiB a pool, and none closer than 64 tokens
polykv_spacing::polykv_spacing(int32_t n_tokens, uint64_t state_bytes) : n_tokens(n_tokens) {
    const uint64_t n_fit = (256ull << 20) / std::max<uint64_t>(1, state_bytes);
    const int32_t  n_max = (int32_t) std::clamp<uint64_t>(n_fit, 1, 8);
    step = std::max(64, (n_tokens + n_max - 1) / n_max);
}

json polykv_error::to_json() const {
    return json {{"error", {
        {"code",    status},
        {"message", message},
        {"type",    type},
    }}};
}

//
// sequences
//

bool polykv_hub::reserve(polykv_seq_id & out) {
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t i = 0; i < seqs.size(); ++i) {
        if (seqs[i].id.empty()) {
            seqs[i].id = { first_seq + (int32_t) i, ++n_gen };
            out = seqs[i].id;
            return true;
        }
    }
    return false;
}

bool polykv_hub::commit(const polykv_seq_id & id, polykv_seq_record && record) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto & seq : seqs) {
        if (seq.id == id && !id.empty()) {
            seq       = std::move(record);
            seq.id    = id;
            seq.ready = true;
            return true;
        }
    }
    return false;
}

bool polykv_hub::release(const polykv_seq_id & id) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto & seq : seqs) {
        if (seq.id == id && !id.empty()) {
            seq = {};
            return true;
        }
    }
    return false;
}

bool polykv_hub::find(const polykv_seq_id & id, polykv_seq_record & out) const {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto & seq : seqs) {
        if (seq.id == id && !id.empty()) {
            out = seq;
            return true;
        }
    }
    return false;
}

std::vector<polykv_seq_state> polykv_hub::list() const {
    std::lock_guard<std::mutex> lock(mutex);
    return list_locked();
}

std::vector<polykv_seq_state> polykv_hub::list_locked() const {
    std::vector<const polykv_seq_record *> ready;
    for (const auto & seq : seqs) {
        if (seq.ready) {
            ready.push_back(&seq);
        }
    }
    std::sort(ready.begin(), ready.end(), [](const auto * a, const auto * b) { return a->id.gen < b->id.gen; });

    std::vector<polykv_seq_state> res;
    std::set<const common_prompt_checkpoint *> counted; // a child keeps those of its parent
    for (const auto * seq : ready) {
        auto & dst = res.emplace_back();
        dst.id       = seq->id;
        dst.n_tokens = seq->tokens->size();
        dst.n_cells  = seq->n_cells;
        for (const auto & [id, own] : state.owners.seqs) {
            if (id == seq->id) {
                dst.own = own;
            }
        }
        for (const auto & cur : seq->checkpoints) {
            if (counted.insert(cur.get()).second) {
                dst.checkpoint_bytes += cur->data_tgt.size() + cur->data_dft.size() + cur->data_spec.size();
            }
        }
    }
    return res;
}

size_t polykv_hub::set_expendable(std::deque<polykv_seq_id> && ids) {
    std::lock_guard<std::mutex> lock(mutex);
    expendable = std::move(ids);
    return std::count_if(seqs.begin(), seqs.end(), [&](const auto & seq) {
        return seq.ready && std::find(expendable.begin(), expendable.end(), seq.id) != expendable.end();
    });
}

bool polykv_hub::give_up(polykv_seq_id & out) {
    std::lock_guard<std::mutex> lock(mutex);
    while (!expendable.empty()) {
        out = expendable.front();
        expendable.pop_front();
        for (auto & seq : seqs) {
            if (seq.ready && seq.id == out) {
                seq = {};
                emit_locked("evicted", {{"type", "evicted"}, {"t_us", polykv_now_us()}, {"seq", out.str()}});
                return true;
            }
        }
    }
    return false;
}

//
// pending tasks
//

void polykv_hub::pending_add(int id_task, uint64_t req, uint64_t session, size_t index) {
    std::lock_guard<std::mutex> lock(mutex);
    pending[id_task] = { req, session, index };
}

void polykv_hub::pending_take(int id_task) {
    std::lock_guard<std::mutex> lock(mutex);
    pending.erase(id_task);
}

void polykv_hub::pending_drop(int id_task) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = pending.find(id_task);
    if (it == pending.end()) {
        return;
    }
    const json data = {
        {"type",    "dropped"},
        {"t_us",    polykv_now_us()},
        {"req",     it->second.req},
        {"index",   it->second.index},
        {"task",    id_task},
        {"session", it->second.session},
    };
    pending.erase(it);
    emit_locked("dropped", data);
}

//
// sessions
//

void polykv_hub::end_session(uint64_t session) {
    std::lock_guard<std::mutex> lock(mutex);
    ended.insert(session);
    if (ended.size() > POLYKV_N_ENDED_MAX) {
        ended.erase(ended.begin()); // numbers only grow, the smallest is the oldest
    }
}

bool polykv_hub::session_ended(uint64_t session) const {
    std::lock_guard<std::mutex> lock(mutex);
    return ended.count(session) > 0;
}

//
// boot, state
//

void polykv_hub::boot(int32_t first, int32_t n_seqs, json && info) {
    static const uint64_t seed = ((uint64_t) std::random_device{}() << 32) ^ std::random_device{}();

    std::lock_guard<std::mutex> lock(mutex);

    // every context gets its own, also when the process wakes up from sleep
    char buf[17];
    std::snprintf(buf, sizeof(buf), "%016llx", (unsigned long long) (seed + 0x9e3779b97f4a7c15ull * ++n_gen));
    id_boot = buf;

    hello     = std::move(info);
    first_seq = first;
    phase     = POLYKV_PHASE_READY;
    seqs.assign(n_seqs, {});
    expendable.clear();

    emit_locked("resync", {{"boot_id", id_boot}, {"update", n_updates}});
}

void polykv_hub::set_phase(polykv_phase new_phase) {
    std::lock_guard<std::mutex> lock(mutex);
    phase = new_phase;
    if (phase != POLYKV_PHASE_READY) {
        for (auto & seq : seqs) {
            seq = {}; // the context is gone
        }
        state.owners = {};
        state.slots.clear();
        state.n_cells_used = state.n_cells_swa_used = 0;
        state.n_bytes_used = 0;
        state.update       = ++n_updates;
    }
}

polykv_phase polykv_hub::get_phase() const {
    std::lock_guard<std::mutex> lock(mutex);
    return phase;
}

uint64_t polykv_hub::publish(polykv_state && next) {
    std::lock_guard<std::mutex> lock(mutex);
    state        = std::move(next);
    state.update = ++n_updates;
    state.t_us   = polykv_now_us();
    return state.update;
}

uint64_t polykv_hub::last_update() const {
    std::lock_guard<std::mutex> lock(mutex);
    return n_updates;
}

std::string polykv_hub::boot_id() const {
    std::lock_guard<std::mutex> lock(mutex);
    return id_boot;
}

static const char * phase_name(polykv_phase phase) {
    switch (phase) {
        case POLYKV_PHASE_LOADING:  return "loading";
        case POLYKV_PHASE_READY:    return "ready";
        case POLYKV_PHASE_SLEEPING: return "sleeping";
    }
    return "loading";
}

json polykv_hub::hello_json() const {
    std::lock_guard<std::mutex> lock(mutex);
    json res = {
        {"protocol", {{"major", 1}, {"minor", 1}}},
        {"boot_id",  id_boot},
        {"phase",    phase_name(phase)},
    };
    for (const auto & [key, val] : hello.items()) {
        res[key] = val;
    }
    return res;
}

static json slot_json(const polykv_slot_state & slot) {
    return json {
        {"slot",      slot.slot},
        {"state",     slot.state},
        {"req",       slot.req},
        {"task",      slot.task},
        {"session",   slot.session},
        {"fill",      slot.fill},
        {"seq",       slot.n_shared > 0 && !slot.seq.empty() ? json(slot.seq.str()) : json(nullptr)},
        {"n_shared",  slot.n_shared},
        {"n_tokens",  slot.n_tokens},
        {"n_ctx",     slot.n_ctx},
        {"own_cells", slot.own.n_cells},
        {"own_bytes", slot.own.n_bytes},
        {"checkpoint_bytes", slot.checkpoint_bytes},
        {"n_decoded", slot.n_decoded},
        {"us_decode", slot.us_decode},
        {"totals", {
            {"n_decoded",       slot.totals.n_decoded},
            {"us_decode",       slot.totals.us_decode},
            {"n_prompt",        slot.totals.n_prompt},
            {"n_cached",        slot.totals.n_cached},
            {"n_launched",      slot.totals.n_launched},
            {"t_last_token_us", slot.totals.t_last_token_us},
        }},
    };
}

static json seqs_json(const std::vector<polykv_seq_state> & seqs) {
    json res = json::array();
    for (const auto & seq : seqs) {
        res.push_back({
            {"seq",              seq.id.str()},
            {"n_tokens",         seq.n_tokens},
            {"cells",            seq.n_cells},
            {"own_cells",        seq.own.n_cells},
            {"own_bytes",        seq.own.n_bytes},
            {"checkpoint_bytes", seq.checkpoint_bytes},
        });
    }
    return res;
}

static json bytes_json(const polykv_state & state) {
    return json {{"used", state.n_bytes_used}, {"total", state.n_bytes_total}, {"other", state.owners.other.n_bytes}};
}

static auto fields(const polykv_seq_state & seq) {
    return std::tie(seq.id.seq, seq.id.gen, seq.own.n_cells, seq.own.n_bytes, seq.checkpoint_bytes);
}

template <typename T>
static bool same(const std::vector<T> & a, const std::vector<T> & b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const T & x, const T & y) { return fields(x) == fields(y); });
}

// names of states are literals of one place: the same name is the same pointer
static auto fields(const polykv_slot_state & slot) {
    const auto & t = slot.totals;
    return std::tie(slot.state, slot.req, slot.session, slot.task, slot.fill, slot.seq.seq, slot.seq.gen, slot.n_shared, slot.n_tokens, slot.n_ctx,
        slot.own.n_bytes, slot.checkpoint_bytes, slot.n_decoded, slot.us_decode, t.n_decoded, t.us_decode, t.n_prompt, t.n_cached, t.n_launched, t.t_last_token_us);
}

bool polykv_hub::read_counters(polykv_counters_seen & seen, json & out) const {
    // no JSON under the lock: the main thread waits for it once per batch
    polykv_state         now;
    polykv_counters_seen was = std::move(seen);
    {
        std::lock_guard<std::mutex> lock(mutex);
        now          = state;
        seen.id_boot = id_boot;
        seen.phase   = phase;
        seen.seqs    = list_locked();
    }
    const bool is_new = seen.id_boot != was.id_boot || now.slots.size() != was.slots.size();

    json arr = json::array();
    for (size_t i = 0; i < now.slots.size(); ++i) {
        if (is_new || fields(now.slots[i]) != fields(was.slots[i])) {
            arr.push_back(slot_json(now.slots[i]));
        }
    }
    const bool new_seqs = is_new || !same(seen.seqs, was.seqs);

    seen.n_cells_used = now.n_cells_used;
    seen.slots        = std::move(now.slots);
    if (!new_seqs && arr.empty() && seen.phase == was.phase && seen.n_cells_used == was.n_cells_used) {
        return false;
    }
    out = json {
        {"boot_id", seen.id_boot},
        {"update",  now.update},
        {"phase",   phase_name(seen.phase)},
        {"t_us",    now.t_us},
        {"slots",   std::move(arr)},
        {"cells",   {{"used", now.n_cells_used}, {"total", now.n_cells}}},
        {"kv_bytes", bytes_json(now)},
    };
    if (new_seqs) {
        out["seqs"] = seqs_json(seen.seqs);
    }
    return true;
}

json polykv_hub::state_json() const {
    std::lock_guard<std::mutex> lock(mutex);

    json arr_slots = json::array();
    for (const auto & slot : state.slots) {
        arr_slots.push_back(slot_json(slot));
    }

    return json {
        {"boot_id",   id_boot},
        {"update",    state.update},
        {"phase",     phase_name(phase)},
        {"t_us",      state.t_us},
        {"seqs",      seqs_json(list_locked())},
        {"slots",     std::move(arr_slots)},
        {"cells",     {{"used", state.n_cells_used}, {"total", state.n_cells}}},
        {"cells_swa", {{"used", state.n_cells_swa_used}, {"total", state.n_cells_swa}}},
        {"kv_bytes",  bytes_json(state)},
    };
}

//
// events
//

void polykv_hub::emit(const char * type, const json & data) {
    std::lock_guard<std::mutex> lock(mutex);
    emit_locked(type, data);
}

void polykv_hub::emit_locked(const char * type, const json & data) {
    events.push_back({ ++n_events, type, data.dump_safe() });
    if (events.size() > POLYKV_N_EVENTS_MAX) {
        events.pop_front();
    }
    cond.notify_all();
}

std::vector<polykv_event> polykv_hub::wait_events(uint64_t last, int timeout_ms, bool & resync) const {
    std::unique_lock<std::mutex> lock(mutex);

    cond.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] {
        return stop_flag.load() || last != n_events;
    });

    resync = last > n_events || (!events.empty() && last + 1 < events.front().id);

    std::vector<polykv_event> res;
    if (!resync && last < n_events) {
        res.assign(events.end() - (n_events - last), events.end());
    }
    return res;
}

polykv_event polykv_hub::resync_event() const {
    std::lock_guard<std::mutex> lock(mutex);
    return { n_events, "resync", json {{"boot_id", id_boot}, {"update", n_updates}}.dump() };
}

void polykv_hub::stop() {
    stop_flag.store(true);
    std::lock_guard<std::mutex> lock(mutex);
    cond.notify_all();
}

void polykv_stop() {
    polykv_get_hub().stop();
}
