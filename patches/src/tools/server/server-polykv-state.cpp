#include "server-polykv.h"

// What the hub shows of itself: hello, state and counters as JSON.
// Law: as server-polykv.cpp: tests/cpp links it without common.cpp and the server.

#include <algorithm>
#include <tuple>

using json = common_json;

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
        {"protocol", {{"major", 1}, {"minor", 2}}},
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
