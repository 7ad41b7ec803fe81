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
