// A peer without an engine, for tests of the registry (tests/integration/gpu_share/), and its laws with a world made by hand; built with
// sanitizers there. Law: says one line for each thing that happened, waits for lines on its input, and times nothing.
//
//   golden                the bytes of the golden file on stdout
//   laws                  every law below, one line each
//   create KEY            only creates the segment; a line on the input makes it set the size
//   join KEY [WEIGHT]     joins; then `work` (one look and one step), `weight W`, `await N` (until N peers live), `await-alone` (until a
//                         step needs no window), `await-turns` (until it does), `leave`

#include "gpu-share-registry.h"

#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

static void check(bool ok, const char * what) {
    if (!ok) {
        std::fprintf(stderr, "broken: %s\n", what);
        _exit(1);
    }
}

static void fill(gpu_share_slot & slot, uint32_t pid, uint32_t claim, int64_t boot, float weight, bool active, int64_t heartbeat, uint32_t busy, const char * name) {
    slot.owner        = (uint64_t) claim << 32 | pid;
    slot.boot_us      = boot;
    slot.weight       = weight;
    slot.active       = active;
    slot.heartbeat_us = heartbeat;
    slot.busy_ppm     = busy;
    std::strncpy(slot.name, name, GPU_SHARE_NAME_SIZE - 1);
}

static void make_header(gpu_share_page & page) {
    page.header.magic      = GPU_SHARE_MAGIC;
    page.header.version    = GPU_SHARE_VERSION;
    page.header.slot_count = GPU_SHARE_SLOTS;
}

static void golden() {
    gpu_share_page page = {};
    make_header(page);
    fill(page.slots[0], 4242, 17, 1700000000000001, 1.0f, true, 1700000100000002, 250000, "first");
    fill(page.slots[1], 1, 4294967295u, 1700000000500000, 1.5f, false, 1700000099900000, 0, "sm\xc3\xb6l model.gguf");
    fill(page.slots[15], 4294967295u, 1, 1, 0.25f, true, 1700000100000001, 1000000, std::string(47, 'x').c_str());
    std::fwrite(&page, 1, sizeof(page), stdout);
}

//
// a world made by hand
//

struct hand_world {
    int64_t wall = 1800000000000000, mono = 5000000;
    std::vector<std::pair<uint32_t, int64_t>> running;

    gpu_share_world make(uint32_t pid) {
        gpu_share_world res;
        res.wall_us    = [this] { return wall; };
        res.mono_us    = [this] { return mono; };
        res.is_running = [this](uint32_t pid, int64_t boot) {
            for (const auto & one : running) {
                if (one.first == pid && one.second == boot) {
                    return true;
                }
            }
            return false;
        };
        res.pid     = pid;
        res.boot_us = wall - 1000000;
        return res;
    }

    void pass(int64_t us) {
        wall += us;
        mono += us;
    }
};

struct room {
    gpu_share_page page = {};
    hand_world     world;
    std::vector<std::unique_ptr<gpu_share_member>> members;

    room() { make_header(page); }

    gpu_share_member & add(uint32_t pid, double weight = 1.0) {
        members.push_back(std::make_unique<gpu_share_member>(page, world.make(pid), "peer", weight));
        return *members.back();
    }

    // half seconds in which these members beat
    void beats(int n, const std::vector<gpu_share_member *> & who) {
        for (int i = 0; i < n; ++i) {
            world.pass(500000);
            for (auto * member : who) {
                member->beat(0);
            }
        }
    }

    uint32_t pid_at(int i) const { return (uint32_t) page.slots[i].owner.load(); }
};

static void law_dead_are_taken_away() {
    room r;
    auto & a = r.add(1);
    auto & b = r.add(2);
    check(a.claim() && b.claim() && a.slot() == 0 && b.slot() == 1, "the first free slot");
    r.beats(6, { &a });
    check(r.pid_at(1) == 2 && a.n_alive() == 2, "three seconds without a beat are not too many");
    r.beats(2, { &a });
    check(a.n_alive() == 1, "more than three are");
    r.beats(1, { &a });
    check(r.pid_at(1) == 0, "and the slot is free");
}

static void law_stopped_process_keeps_its_slot() {
    room r;
    auto & a = r.add(1);
    auto & b = r.add(2);
    a.claim();
    b.claim();
    r.world.running.push_back({ 2, r.world.make(2).boot_us });
    a.set_active(true);
    b.set_active(true);
    r.beats(20, { &a });
    gpu_share_clock_watch watch;
    check(r.pid_at(1) == 2, "it is running, only stopped");
    check(a.look(watch).turn == GPU_SHARE_FREE, "but no window is kept for it");
    r.beats(1, { &a, &b });
    check(b.slot() == 1 && a.look(watch).turn != GPU_SHARE_FREE, "it goes on where it was");
}

static void law_lost_slot_is_claimed_anew() {
    room r;
    auto & a = r.add(1);
    auto & b = r.add(2);
    a.claim();
    b.claim();
    r.beats(10, { &a });
    auto & c = r.add(3);
    check(c.claim() && c.slot() == 1, "the slot of the dead");
    check(b.beat(0) && b.slot() == 2 && r.pid_at(1) == 3, "who comes back takes another and writes nothing into the old one");
}

static void law_forged_entries() {
    room r;
    auto & a = r.add(77);
    a.claim();
    const int64_t now = r.world.wall;
    r.world.running = { { 1000, now - 500 }, { 77, now - 1000000 } };
    fill(r.page.slots[3],  1000, 5, now - 999999999, 1, true, now,            0, "another process, wrong start");
    fill(r.page.slots[4],  1001, 5, now,             1, true, now - 60000000, 0, "not visible, old heartbeat");
    fill(r.page.slots[5],  77,   5, now - 777,       1, true, now,            0, "our own number, another start");
    fill(r.page.slots[6],  1002, 5, 5,               1, true, 1000000000,     0, "an earlier boot");
    fill(r.page.slots[7],  1003, 5, now,             1, true, now + 90000000, 0, "ahead of the clock");
    fill(r.page.slots[8],  1004, 5, now,             1, true, INT64_MIN,      0, "nonsense");
    fill(r.page.slots[9],  1005, 5, now,             1, true, INT64_MAX,      0, "nonsense");
    fill(r.page.slots[10], 1006, 5, now,             1, true, now,            0, "not visible, fresh heartbeat");
    for (int i = 0; i < 10; ++i) {
        r.page.slots[10].heartbeat_us = r.world.wall + 500000;
        r.beats(1, { &a });
    }
    for (int i : { 3, 4, 5, 6, 7, 8, 9 }) {
        check(r.pid_at(i) == 0, r.page.slots[i].name);
    }
    check(r.pid_at(10) == 1006, "who beats in another namespace stays");
    check(r.pid_at(0) == 77 && a.slot() == 0, "and so do we");
}

static void law_clock_steps_kill_nobody() {
    for (const int64_t step : { 3600000000LL, -3600000000LL, 5000000LL, -5000000LL, 150000LL }) {
        room r;
        auto & a = r.add(1);
        auto & b = r.add(2);
        a.claim();
        b.claim();
        gpu_share_clock_watch watch;
        a.set_active(true);
        b.set_active(true);
        a.look(watch);
        r.beats(3, { &a, &b });
        r.world.wall += step;
        const auto at_once = a.look(watch);
        check(at_once.turn != GPU_SHARE_FREE && at_once.until_us - r.world.wall <= at_once.period_us, "the schedule goes on at once, no wait is longer than a period");
        r.beats(1, { &a });
        r.beats(1, { &a });
        check(r.pid_at(1) == 2, "who has not beaten since then stays");
        r.beats(2, { &a, &b });
        check(a.n_alive() == 2 && a.slot() == 0 && b.slot() == 1, "all are where they were");
        r.beats(10, { &a });
        check(r.pid_at(1) == 0, "and the dead still go");
    }
}

static void law_sixteen_slots() {
    room r;
    std::vector<gpu_share_member *> all;
    for (uint32_t i = 0; i < GPU_SHARE_SLOTS; ++i) {
        all.push_back(&r.add(100 + i));
        check(all.back()->claim() && all.back()->slot() == (int32_t) i, "sixteen find a place");
    }
    auto & late = r.add(500);
    check(!late.claim() && late.slot() == -1, "the seventeenth does not");
    gpu_share_clock_watch watch;
    check(late.look(watch).turn == GPU_SHARE_FREE, "and runs freely");
    all[7]->leave();
    check(late.claim() && late.slot() == 7, "until one leaves");
}

static void law_same_pid_in_two_namespaces() {
    room r;
    auto & a = r.add(1);
    a.claim();
    r.world.pass(10000000);
    auto & b = r.add(1);
    auto & c = r.add(1);
    check(b.claim() && c.claim() && b.slot() != c.slot(), "a claim is told apart by more than the process number");
    r.beats(12, { &b, &c });
    check(b.n_alive() == 2 && !(a.slot() == b.slot() && a.beat(0) && a.slot() == b.slot()), "and nobody writes for another");
}

static void law_weights_at_run_time() {
    room r;
    auto & a = r.add(1, 2.0);
    auto & b = r.add(2);
    a.claim();
    b.claim();
    gpu_share_clock_watch watch;
    b.set_active(true);
    check(a.look(watch).window_us == 80000 && a.look(watch).period_us == 120000, "two to one");
    b.set_weight(6.0);
    check(a.look(watch).window_us == 40000 && a.look(watch).period_us == 160000, "one to three at the next look");
}

static void law_races() {
    for (int round = 0; round < 50; ++round) {
        gpu_share_page page = {};
        make_header(page);
        std::vector<std::unique_ptr<gpu_share_member>> members;
        for (uint32_t i = 0; i < GPU_SHARE_SLOTS; ++i) {
            auto world = gpu_share_host();
            world.pid += i;
            world.is_running = [](uint32_t, int64_t) { return true; }; // they beat without a pause: who is held up is not dead
            members.push_back(std::make_unique<gpu_share_member>(page, world, "peer", 1.0));
        }
        std::vector<std::thread> threads;
        for (auto & member : members) {
            threads.emplace_back([&member] {
                check(member->claim(), "there is a slot for each");
                gpu_share_clock_watch watch;
                for (int i = 0; i < 20; ++i) {
                    member->beat(i);
                    member->look(watch);
                    member->set_weight(1.0 + i);
                    member->set_active(i % 2);
                }
            });
        }
        for (auto & thread : threads) {
            thread.join();
        }
        std::vector<bool> used(GPU_SHARE_SLOTS);
        for (auto & member : members) {
            check(member->slot() >= 0 && !used[member->slot()], "each has one of its own");
            used[member->slot()] = true;
            member->leave();
        }
        check(gpu_share_read(page).n == 0, "and all are free again");
    }
}

static void laws() {
    const std::pair<const char *, void (*)()> all[] = {
        { "the dead are taken away",                law_dead_are_taken_away },
        { "a stopped process keeps its slot",       law_stopped_process_keeps_its_slot },
        { "a lost slot is claimed anew",            law_lost_slot_is_claimed_anew },
        { "forged entries do no harm",              law_forged_entries },
        { "a set clock kills nobody",               law_clock_steps_kill_nobody },
        { "sixteen slots",                          law_sixteen_slots },
        { "one process number in two namespaces",   law_same_pid_in_two_namespaces },
        { "weights at run time",                    law_weights_at_run_time },
        { "many at once",                           law_races },
    };
    for (const auto & law : all) {
        law.second();
        std::printf("%s: holds\n", law.first);
    }
}

//
// processes
//

static void create(const char * key) {
    const int fd = shm_open(gpu_share_segment::name_of(key).c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    check(fd >= 0, "it was there already");
    std::cout << "created" << std::endl;
    std::string line;
    std::getline(std::cin, line);
    check(ftruncate(fd, GPU_SHARE_SIZE) == 0, "its size could not be set");
    std::cout << "sized" << std::endl;
}

template <typename F>
static void wait_until(F && done) {
    while (!done()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
}

static void peer(const char * key, double weight) {
    std::unique_ptr<gpu_share_registry> registry;
    try {
        registry = std::make_unique<gpu_share_registry>(key, "driver", weight);
    } catch (const std::runtime_error & e) {
        std::cout << "refused: " << e.what() << std::endl;
        return;
    }
    std::cout << "joined " << registry->slot() << std::endl;

    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string word;
        words >> word;
        if (word == "work") {
            const auto verdict = registry->look();
            registry->begin_step();
            registry->end_step();
            std::cout << (verdict.turn == GPU_SHARE_FREE ? "free" : verdict.turn == GPU_SHARE_RUN ? "run" : "wait") << std::endl;
        } else if (word == "weight" && words >> weight) {
            registry->set_weight(weight);
            std::cout << "weight " << registry->weight() << std::endl;
        } else if (size_t n = 0; word == "await" && words >> n) {
            wait_until([&] { return registry->n_alive() == n && registry->slot() >= 0; });
            std::cout << "peers " << n << " slot " << registry->slot() << std::endl;
        } else if (word == "await-turns") {
            wait_until([&] { return registry->look().turn != GPU_SHARE_FREE; });
            std::cout << "turns" << std::endl;
        } else if (word == "await-alone") {
            wait_until([&] { return registry->look().turn == GPU_SHARE_FREE; });
            std::cout << "alone" << std::endl;
        } else if (word == "leave") {
            break;
        }
    }
    registry.reset();
    std::cout << "left" << std::endl;
}

int main(int argc, char ** argv) {
    const std::string verb = argc > 1 ? argv[1] : "";
    if (verb == "golden") {
        golden();
    } else if (verb == "laws") {
        laws();
    } else if (verb == "create" && argc > 2) {
        create(argv[2]);
    } else if (verb == "join" && argc > 2) {
        peer(argv[2], argc > 3 ? std::stod(argv[3]) : 1.0);
    } else {
        std::cerr << "see the head of this file" << std::endl;
        return 2;
    }
    return 0;
}
