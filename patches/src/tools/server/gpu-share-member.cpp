#include "gpu-share-member.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

constexpr int64_t CLOCK_STEP_US  = 100000;  // more than any slewing does between two looks
constexpr int64_t CLOCK_GRACE_US = 2000000; // until all peers have beaten again, also on a busy host

int64_t gpu_share_clock_watch::look(int64_t wall_us, int64_t mono_us) {
    const int64_t offset = wall_us - mono_us;
    const int64_t moved  = started ? offset - offset_us : 0;
    started   = true;
    offset_us = offset;
    if (std::abs(moved) > CLOCK_STEP_US) {
        step_us  = moved + (mono_us < until_us ? step_us : 0);
        until_us = mono_us + CLOCK_GRACE_US;
    }
    return mono_us < until_us ? step_us : 0;
}

static uint32_t make_claim() {
    std::random_device random;
    return random();
}

static void write_name(gpu_share_slot & slot, const std::string & name) {
    for (size_t i = 0; i < GPU_SHARE_NAME_SIZE; ++i) {
        const char val = i < name.size() && i + 1 < GPU_SHARE_NAME_SIZE ? name[i] : 0;
        reinterpret_cast<std::atomic<char> &>(slot.name[i]).store(val, std::memory_order_relaxed);
    }
}

gpu_share_member::gpu_share_member(gpu_share_page & page, gpu_share_world world, std::string name, double weight)
    : page(page), world(std::move(world)), name(std::move(name)), w(gpu_share_sound_weight(weight)) {}

bool gpu_share_member::owns(int32_t i) const {
    return i >= 0 && page.slots[i].owner.load(std::memory_order_acquire) == owner.load();
}

// a slot that was taken and not yet written looks dead to others: they may have taken it by the time it is written
bool gpu_share_member::take(int32_t i, uint64_t expected) {
    const uint64_t mine = (uint64_t) make_claim() << 32 | world.pid;
    if (!page.slots[i].owner.compare_exchange_strong(expected, mine)) {
        return false;
    }
    owner.store(mine);
    write(i, 0);
    if (!owns(i)) {
        return false;
    }
    i_slot.store(i);
    return true;
}

void gpu_share_member::write(int32_t i, uint32_t busy_ppm) {
    auto & slot = page.slots[i];
    slot.boot_us.store(world.boot_us, std::memory_order_relaxed);
    slot.weight.store((float) w.load(), std::memory_order_relaxed);
    slot.active.store(is_active.load(), std::memory_order_relaxed);
    slot.busy_ppm.store(busy_ppm, std::memory_order_relaxed);
    write_name(slot, name);
    slot.heartbeat_us.store(world.wall_us(), std::memory_order_release);
}

bool gpu_share_member::is_dead(const gpu_share_entry & entry, int64_t now_us, int64_t step_us) const {
    return entry.owner != owner.load() && !entry.alive(now_us, step_us);
}

// a claimer that is held up between taking a slot and writing it may lose it again, and what it has passed may be free by then
bool gpu_share_member::claim() {
    i_slot.store(-1);
    return claim_once() || claim_once();
}

// 1. a free slot, the first one. 2. one of a peer that is dead and gone. 3. one of a peer that only looks dead (it is stopped, or hidden from us)
bool gpu_share_member::claim_once() {
    for (int32_t i = 0; i < (int32_t) GPU_SHARE_SLOTS; ++i) {
        const uint64_t found = page.slots[i].owner.load();
        if ((uint32_t) found == 0 && take(i, found)) {
            return true;
        }
    }
    const int64_t now  = world.wall_us();
    const int64_t step = watch.look(now, world.mono_us());

    std::vector<gpu_share_entry> gone, silent;
    for (const auto & entry : gpu_share_read(page)) {
        if (is_dead(entry, now, step)) {
            (world.is_running(entry.pid(), entry.boot_us) ? silent : gone).push_back(entry);
        }
    }
    gone.insert(gone.end(), silent.begin(), silent.end());
    return std::any_of(gone.begin(), gone.end(), [this](const gpu_share_entry & entry) { return take(entry.slot, entry.owner); });
}

void gpu_share_member::leave() {
    const int32_t i = i_slot.exchange(-1);
    uint64_t mine = owner.load();
    if (i >= 0) {
        page.slots[i].owner.compare_exchange_strong(mine, 0);
    }
}

// only who looked the same dead at two beats in turn: it may just have taken the slot, or be about to beat
void gpu_share_member::reap(int64_t now_us, int64_t step_us) {
    std::map<uint64_t, int64_t> seen;
    for (const auto & entry : gpu_share_read(page)) {
        if (!is_dead(entry, now_us, step_us)) {
            continue;
        }
        const auto known = suspects.find(entry.owner);
        if (known != suspects.end() && known->second == entry.heartbeat_us && !world.is_running(entry.pid(), entry.boot_us)) {
            uint64_t dead = entry.owner;
            page.slots[entry.slot].owner.compare_exchange_strong(dead, 0);
            continue;
        }
        seen[entry.owner] = entry.heartbeat_us;
    }
    suspects = std::move(seen);
}

bool gpu_share_member::beat(uint32_t busy_ppm) {
    const int32_t i = i_slot.load();
    if (owns(i)) {
        write(i, busy_ppm);
    } else if (!claim()) {
        return false;
    }
    const int64_t now = world.wall_us();
    reap(now, watch.look(now, world.mono_us()));
    return true;
}

void gpu_share_member::set_active(bool active) {
    is_active.store(active);
    const int32_t i = i_slot.load();
    if (owns(i)) {
        page.slots[i].active.store(active, std::memory_order_relaxed);
    }
}

void gpu_share_member::set_weight(double weight) {
    w.store(gpu_share_sound_weight(weight));
    const int32_t i = i_slot.load();
    if (owns(i)) {
        page.slots[i].weight.store((float) w.load(), std::memory_order_relaxed);
    }
}

gpu_share_verdict gpu_share_member::look(gpu_share_clock_watch & watch) {
    if (!active()) {
        set_active(true);
    }
    const int64_t now  = world.wall_us();
    const int64_t step = watch.look(now, world.mono_us());
    const int32_t i    = i_slot.load();
    if (!owns(i)) {
        return {}; // the next beat claims another
    }
    auto & heartbeat = page.slots[i].heartbeat_us;
    if (std::abs(now - heartbeat.load(std::memory_order_relaxed)) > GPU_SHARE_AHEAD_US/2) {
        heartbeat.store(now, std::memory_order_relaxed); // the heart is late: who works is alive
    }
    return gpu_share_get_verdict(gpu_share_make_schedule(gpu_share_participants(gpu_share_read(page), now, step)), i, now);
}

size_t gpu_share_member::n_alive() const {
    const int64_t now  = world.wall_us();
    const auto    read = gpu_share_read(page);
    return std::count_if(read.begin(), read.end(), [&](const gpu_share_entry & entry) { return entry.alive(now, 0); });
}
