// Laws of polykv_hub, held against many threads at once; built with a sanitizer by tests/engine/test_hub_sanitized.py.
// Law: threads share the hub and nothing else, so that no lock of the driver stands in for one that the hub lacks. What they saw
// is compared after they were joined. Amounts are fixed, nothing is timed; the first broken law ends the process with code 1.

#include "server-polykv.h"

#include <cstdarg>
#include <cstdio>
#include <functional>
#include <thread>
#include <unistd.h>

using json = common_json;

// the only thing of the engine that json.cpp wants
extern "C" void ggml_abort(const char * file, int line, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::fprintf(stderr, "%s:%d: ", file, line);
    std::vfprintf(stderr, fmt, args);
    va_end(args);
    _exit(2);
}

static constexpr int32_t  FIRST_SEQ = 4;
static constexpr int32_t  N_SEQS    = 8;
static constexpr uint64_t N_RING    = 4096; // as the protocol page says
static constexpr int      N_ENDED   = 65536;

static void check(bool ok, const char * law) {
    if (!ok) {
        std::fprintf(stderr, "broken law: %s\n", law);
        _exit(1); // other threads are running: no destructors
    }
}

static void run(const std::vector<std::function<void()>> & bodies) {
    std::atomic<bool> go { false }; // relaxed: lets them start together and orders nothing
    std::vector<std::thread> threads;
    for (const auto & body : bodies) {
        threads.emplace_back([&] {
            while (!go.load(std::memory_order_relaxed)) {
                std::this_thread::yield();
            }
            body();
        });
    }
    go.store(true, std::memory_order_relaxed);
    for (auto & thread : threads) {
        thread.join();
    }
}

static void boot(polykv_hub & hub, int mark) {
    hub.boot(FIRST_SEQ, N_SEQS, {{"mark", mark}});
}

static polykv_state make_state(uint32_t mark) {
    polykv_state res;
    res.n_cells      = 1u << 30;
    res.n_cells_used = mark;
    for (int32_t i = 0; i < FIRST_SEQ; ++i) {
        auto & slot = res.slots.emplace_back();
        slot.slot     = i;
        slot.state    = "generating";
        slot.n_tokens = (int32_t) mark;
        slot.n_shared = 1;
        slot.seq      = { FIRST_SEQ, mark };
    }
    return res;
}

static bool lists(const json & state, const polykv_seq_id & id) {
    for (const auto & seq : state.at("seqs")) {
        if (seq.at("seq").get<std::string>() == id.str()) {
            return true;
        }
    }
    return false;
}

// a state is whole, and newer than the one before
static uint64_t check_state(const json & state, uint64_t last_update) {
    const auto update = state.at("update").get<uint64_t>();
    check(update >= last_update, "update numbers never go back");

    const auto used = state.at("cells").at("used").get<int64_t>();
    for (const auto & slot : state.at("slots")) {
        check(slot.at("n_tokens").get<int64_t>() == used, "a state is of one moment");
        check(slot.at("seq").get<std::string>() == polykv_seq_id { FIRST_SEQ, (uint64_t) used }.str(), "a slot says what it shares");
    }
    std::set<std::string> ids;
    for (const auto & seq : state.at("seqs")) {
        check(ids.insert(seq.at("seq").get<std::string>()).second, "a sequence is listed once");
        check(seq.at("n_tokens").get<int64_t>() == seq.at("cells").get<int64_t>(), "a record is of one commit");
    }
    if (state.at("phase").get<std::string>() == "sleeping") {
        check(state.at("slots").empty() && used == 0, "nothing is held in sleep");
    }
    return update;
}

//
// events
//

static constexpr int N_EMITTERS = 3;
static constexpr int N_EMITS    = 3000;

struct event_reader {
    const polykv_hub & hub;

    uint64_t last   = 0;
    int      n_gaps = 0;
    std::map<int, int>              n_seen; // by emitter
    std::map<uint64_t, std::string> data;

    explicit event_reader(const polykv_hub & hub) : hub(hub) {}

    void step() {
        bool gap = false;
        const auto events = hub.wait_events(last, 600000, gap); // an event ends it, not the time
        if (gap) {
            check(events.empty(), "a gap comes alone");
            const auto event = hub.resync_event();
            check(event.id > last, "a resync leads forward");
            last = event.id;
            n_gaps++;
            n_seen.clear();
        }
        check(events.size() <= N_RING, "the ring is bounded");
        for (const auto & event : events) {
            check(event.id == ++last, "ids have no holes");
            const auto it = data.emplace(event.id, event.data);
            check(it.first->second == event.data, "an event read again is the same");
            if (it.second) {
                take(event);
            }
        }
    }

    void take(const polykv_event & event) {
        const json obj = json::parse(event.data);
        if (!obj.contains("who")) {
            check(std::string(event.type) == "resync", "only a boot speaks besides the emitters");
            return;
        }
        const int  who  = obj.at("who").get<int>();
        const int  n    = obj.at("n").get<int>();
        const auto seen = n_seen.emplace(who, n);
        check(seen.second || n == seen.first->second + 1, "nothing is lost and nothing comes twice");
        seen.first->second = n;
    }
};

static void test_events() {
    static constexpr uint64_t N_ALL = N_EMITTERS * N_EMITS + 1; // the boot too

    polykv_hub hub;
    boot(hub, 0);

    const auto follow = [&] {
        event_reader reader(hub);
        while (reader.last < N_ALL) {
            reader.step();
        }
    };
    const auto resume = [&] {
        event_reader reader(hub);
        for (uint64_t i = 0; reader.last < N_ALL; ++i) {
            reader.step();
            const uint64_t back = i * 7 % 50;
            if (reader.last < N_ALL && reader.n_gaps == 0 && back < reader.last) {
                reader.last -= back;
            }
        }
    };
    const auto lag = [&] {
        event_reader reader(hub);
        while (reader.last < N_ALL) {
            while (hub.resync_event().id < std::min(reader.last + N_RING + 100, N_ALL)) {
                std::this_thread::yield();
            }
            reader.step();
        }
        check(reader.n_gaps > 0, "who is too slow is told");
    };

    std::vector<std::function<void()>> bodies = { follow, follow, resume, lag };
    for (int who = 0; who < N_EMITTERS; ++who) {
        bodies.push_back([&hub, who] {
            for (int n = 0; n < N_EMITS; ++n) {
                hub.emit("launched", {{"who", who}, {"n", n}});
            }
        });
    }
    run(bodies);

    bool gap = false;
    check(hub.wait_events(N_ALL - N_RING, 0, gap).size() == N_RING && !gap, "the whole ring can be had");
    check(hub.wait_events(N_ALL - N_RING - 1, 0, gap).empty() && gap, "one more is a gap");
    check(hub.wait_events(N_ALL + 1, 0, gap).empty() && gap, "an id from nowhere is a gap");
    check(hub.wait_events(N_ALL, 0, gap).empty() && !gap, "who has all waits");
}

//
// sequences
//

using gens = std::vector<uint64_t>;

static void check_unique(const std::vector<gens> & all) {
    std::set<uint64_t> seen;
    for (const auto & some : all) {
        for (const auto gen : some) {
            check(seen.insert(gen).second, "a number is given once");
        }
    }
}

static polykv_seq_record make_record(uint64_t gen) {
    polykv_seq_record res;
    res.tokens  = std::make_shared<const llama_tokens>(gen % 7 + 1, (llama_token) gen);
    res.n_cells = (uint32_t) res.tokens->size();
    return res;
}

static void live_and_die(polykv_hub & hub, gens & seen, gens & updates) {
    polykv_seq_id     id;
    polykv_seq_record record;
    if (!hub.reserve(id)) {
        return;
    }
    seen.push_back(id.gen);
    check(id.seq >= FIRST_SEQ && id.seq < FIRST_SEQ + N_SEQS, "an id is one of those above the slots");
    check(hub.find(id, record) && !record.ready && !lists(hub.state_json(), id), "a reservation is known and not shown");

    check(hub.commit(id, make_record(id.gen)), "what is reserved can be committed");
    const uint64_t filled = hub.publish(make_state((uint32_t) id.gen));
    const json with = hub.state_json();
    check(check_state(with, filled) >= filled && lists(with, id), "reply seen: state shows it");
    check(hub.find(id, record) && record.ready && record.tokens->front() == (llama_token) id.gen, "a record is found by its id");

    updates.push_back(filled);
    check(hub.release(id), "what is there can be released");
    const uint64_t freed = hub.publish(make_state((uint32_t) id.gen));
    const json without = hub.state_json();
    check(check_state(without, freed) >= freed && !lists(without, id), "release seen: state shows it");
    updates.push_back(freed);
    check(!hub.release(id) && !hub.commit(id, make_record(id.gen)) && !hub.find(id, record), "what is gone is gone");
}

static void test_sequences() {
    polykv_hub hub;
    boot(hub, 0);

    std::vector<gens> seen(4), updates(4);
    std::vector<std::function<void()>> bodies;
    for (size_t i = 0; i < seen.size(); ++i) {
        bodies.push_back([&hub, &seen = seen[i], &updates = updates[i]] {
            for (int n = 0; n < 300; ++n) {
                live_and_die(hub, seen, updates);
            }
        });
    }
    for (int i = 0; i < 2; ++i) {
        bodies.push_back([&hub] {
            uint64_t last = 0;
            for (int i = 0; i < 500; ++i) {
                last = check_state(hub.state_json(), last);
                check(hub.last_update() >= last, "the last number is the largest");
            }
        });
    }
    run(bodies);
    check_unique(seen);
    check_unique(updates);
}

static void test_double_release() {
    polykv_hub hub;
    boot(hub, 0);
    for (int round = 0; round < 100; ++round) {
        std::vector<polykv_seq_id> ids(N_SEQS);
        for (auto & id : ids) {
            check(hub.reserve(id), "all ids can be had");
        }
        polykv_seq_id more;
        check(!hub.reserve(more) && more.empty(), "there are no more");

        std::vector<int> n_released(3);
        std::vector<std::function<void()>> bodies;
        for (auto & mine : n_released) {
            bodies.push_back([&hub, &ids, &mine] {
                for (const auto & id : ids) {
                    mine += hub.release(id);
                    check(!hub.commit(id, make_record(id.gen)), "no commit after a release");
                }
            });
        }
        run(bodies);
        check(n_released[0] + n_released[1] + n_released[2] == N_SEQS, "one release is true");
    }
}

//
// tasks and sessions
//

static void test_pending() {
    static constexpr int N_TASKS = 1500;

    polykv_hub hub;
    const auto add  = [&](int first) { return [&hub, first] { for (int id = first; id < N_TASKS; id += 2) { hub.pending_add(id, id + 10000, id + 20000, id % 5); } }; };
    const auto drop = [&] { for (int id = 0; id < N_TASKS; ++id) { hub.pending_drop(id); } };
    const auto take = [&] { for (int id = 0; id < N_TASKS; id += 3) { hub.pending_take(id); } };
    run({ add(0), add(1) });
    run({ drop, take, drop });
    run({ drop, drop });

    std::map<int, int> n_dropped;
    bool gap = false;
    for (const auto & event : hub.wait_events(0, 0, gap)) {
        const json data = json::parse(event.data);
        const int  id   = data.at("task").get<int>();
        check(std::string(event.type) == "dropped", "only drops are told");
        check(data.at("req").get<int>() == id + 10000 && data.at("session").get<int>() == id + 20000 && data.at("index").get<int>() == id % 5, "a drop says whose it was");
        check(++n_dropped[id] == 1, "a task is dropped once");
    }
    for (int id = 0; id < N_TASKS; ++id) {
        check(!gap && (id % 3 == 0 || n_dropped[id] == 1), "what is not taken is dropped");
    }
}

static void test_sessions() {
    polykv_hub hub;
    const auto end  = [&](int first) { return [&hub, first] { for (int i = first; i <= N_ENDED + 100; i += 2) { hub.end_session(i); check(hub.session_ended(i), "an end is seen"); } }; };
    const auto look = [&] { for (int i = 0; i < 20000; ++i) { check(!hub.session_ended(0) && !hub.session_ended(N_ENDED + 101), "what was not ended goes on"); } };
    run({ end(1), end(2), look });
    check(!hub.session_ended(1) && hub.session_ended(N_ENDED + 100), "the oldest ends are forgotten");
}

//
// boots and sleep
//

static void test_boots() {
    static constexpr int N_BOOTS = 300;

    polykv_hub hub;
    boot(hub, 0);
    std::vector<std::map<std::string, int>> marks(3);
    std::vector<gens> seen(2);

    const auto sleep_and_wake = [&] {
        for (int mark = 1; mark <= N_BOOTS; ++mark) {
            hub.publish(make_state(mark));
            hub.set_phase(POLYKV_PHASE_SLEEPING);
            check(hub.get_phase() == POLYKV_PHASE_SLEEPING, "a phase is seen");
            const json asleep = hub.state_json();
            check(asleep.at("phase").get<std::string>() == "sleeping" && asleep.at("slots").empty() && asleep.at("seqs").empty(), "sleep is seen");
            polykv_seq_id     id;
            polykv_seq_record record;
            const bool reserved = hub.reserve(id);
            boot(hub, mark);
            check(!reserved || !hub.find(id, record), "a boot takes every reservation");
            const json awake = hub.hello_json();
            check(awake.at("phase").get<std::string>() == "ready" && awake.at("mark").get<int>() == mark, "a boot is seen");
            marks[0][hub.boot_id()] = mark;
        }
    };
    const auto greet = [&](size_t i) { return [&hub, &mine = marks[i]] {
        int last = 0;
        while (last < N_BOOTS) {
            const json hello = hub.hello_json();
            const int  mark  = hello.at("mark").get<int>();
            const auto it    = mine.emplace(hello.at("boot_id").get<std::string>(), mark);
            check(it.first->second == mark && mark >= last && it.first->first.size() == 16, "a boot has one number of its own");
            last = mark;
        }
    }; };
    const auto use = [&](size_t i) { return [&hub, &mine = seen[i]] {
        for (int i = 0; i < 600; ++i) {
            polykv_seq_id     id;
            polykv_seq_record record;
            hub.end_session(i);
            check(hub.session_ended(i) && hub.session_ended(i / 2), "what was ended stays ended over boots");
            if (hub.reserve(id)) {
                mine.push_back(id.gen);
                if (!hub.find(id, record)) {
                    check(!hub.release(id), "what a boot has taken does not come back");
                }
                hub.release(id);
                check(!hub.find(id, record), "what is gone is gone");
            }
        }
    }; };
    const auto watch = [&] {
        uint64_t last = 0;
        for (int i = 0; i < 1000; ++i) {
            last = check_state(hub.state_json(), last);
        }
    };
    const auto follow = [&] {
        event_reader reader(hub);
        while (reader.last < N_BOOTS + 1) {
            reader.step();
        }
        check(reader.n_gaps == 0 && reader.data.size() == N_BOOTS + 1, "each boot is told");
    };
    run({ sleep_and_wake, greet(1), greet(2), use(0), use(1), watch, follow });

    check_unique(seen);
    for (const auto & some : marks) {
        for (const auto & [id, mark] : some) {
            check(mark == 0 || marks[0].at(id) == mark, "all see the same boots");
        }
    }
    check(marks[0].size() == N_BOOTS, "every boot has an id of its own");
}

//
// counters
//

static int64_t check_counters(const json & counters, int64_t last_update) {
    const auto update = counters.at("update").get<int64_t>();
    check(update > last_update, "counters are told once, and in order");
    const auto used = counters.at("cells").at("used").get<int64_t>();
    for (const auto & slot : counters.at("slots")) {
        check(slot.at("n_tokens").get<int64_t>() == used, "counters are of one moment");
    }
    return update;
}

static void test_counters() {
    static constexpr int64_t N_MARKS = 2000;

    polykv_hub hub;
    boot(hub, 0);

    const auto work = [&] {
        for (int64_t mark = 1; mark <= N_MARKS; ++mark) {
            hub.publish(make_state((uint32_t) mark));
        }
    };
    const auto read = [&] {
        polykv_counters_seen seen;
        int64_t last = -1; // 0: nothing was published yet
        json    counters;
        while (last < N_MARKS) {
            if (!hub.read_counters(seen, counters)) {
                std::this_thread::yield();
                continue;
            }
            last = check_counters(counters, last);
            check(last == 0 || counters.at("slots").size() == FIRST_SEQ, "a slot that changed is told");
        }
        check(!hub.read_counters(seen, counters), "what was told is not news");
    };
    run({ work, read, read });

    // one slot of four moves; then only a cell; then all in a new boot
    polykv_counters_seen seen;
    json counters;
    check(hub.read_counters(seen, counters) && counters.at("slots").size() == FIRST_SEQ, "a new reader is told of all slots");
    auto next = make_state((uint32_t) N_MARKS);
    next.slots[2].totals.n_decoded = 7;
    hub.publish(polykv_state(next));
    check(hub.read_counters(seen, counters) && counters.at("slots").size() == 1 && counters.at("slots")[0].at("slot").get<int>() == 2, "who did not change is left out");
    next.n_cells_used++;
    hub.publish(polykv_state(next));
    check(hub.read_counters(seen, counters) && counters.at("slots").empty(), "cells are news too");
    hub.set_phase(POLYKV_PHASE_SLEEPING);
    check(hub.read_counters(seen, counters) && counters.at("phase").get<std::string>() == "sleeping" && counters.at("slots").empty(), "sleep is news");
    boot(hub, 1);
    hub.publish(std::move(next));
    check(hub.read_counters(seen, counters) && counters.at("slots").size() == FIRST_SEQ && counters.at("boot_id").get<std::string>() == hub.boot_id(), "a boot is told whole");
}

static void test_clock() {
    const auto look = [] {
        int64_t last = 0;
        for (int i = 0; i < 10000; ++i) {
            const int64_t now = polykv_now_us();
            check(now >= last, "time never steps back");
            last = now;
        }
    };
    run({ look, look });
}

static void test_stop() {
    for (int round = 0; round < 50; ++round) {
        polykv_hub hub;
        const auto wait = [&] {
            uint64_t last = 0;
            bool     gap  = false;
            while (!hub.stopping()) {
                const auto events = hub.wait_events(last, 600000, gap); // only a stop ends it
                last += events.size();
            }
        };
        const auto end = [&] {
            hub.emit("launched", {{"who", 0}, {"n", 0}});
            hub.stop();
        };
        run({ wait, end, wait });
    }
}

int main() {
    const std::pair<const char *, void (*)()> tests[] = {
        { "events", test_events }, { "sequences", test_sequences }, { "double release", test_double_release },
        { "pending", test_pending }, { "sessions", test_sessions }, { "boots", test_boots },
        { "counters", test_counters }, { "clock", test_clock }, { "stop", test_stop },
    };
    for (const auto & [name, test] : tests) {
        test();
        std::printf("%s: holds\n", name);
    }
    return 0;
}
