#pragma once

// A place in a registry: claimed, kept by a heartbeat, given back; and what the dead left is taken away.
// Law: no threads, no clock and no shared memory of its own: page and world are arguments. The slot is written only while it is ours; nothing
// that was read in the registry is ever sent a signal. A process that was stopped for long may find its slot in other hands and claims another.
// Threads: one beats, another may work and look.

#include "gpu-share-schedule.h"

#include <functional>
#include <map>

struct gpu_share_world {
    std::function<int64_t()> wall_us; // of the host: CLOCK_REALTIME
    std::function<int64_t()> mono_us; // never set, counts nothing while the host sleeps

    // the process with this number is the one that started then, and has not ended. false also where that cannot be known
    std::function<bool(uint32_t pid, int64_t boot_us)> is_running;

    uint32_t pid     = 0;
    int64_t  boot_us = 0;
};

gpu_share_world gpu_share_host();

// Tells when the wall clock was set. Stamps from before and after are both good for as long as it takes all peers to beat again.
struct gpu_share_clock_watch {
    int64_t look(int64_t wall_us, int64_t mono_us); // by how much it was set a moment ago, 0: it was not

private:
    bool    started   = false;
    int64_t offset_us = 0;
    int64_t step_us   = 0;
    int64_t until_us  = 0; // by the monotonic clock
};

struct gpu_share_member {
    gpu_share_member(gpu_share_page & page, gpu_share_world world, std::string name, double weight);

    bool claim(); // false: no slot is free
    void leave();

    // renews what the slot says, claims another if it was lost, frees those of the dead; false: no slot
    bool beat(uint32_t busy_ppm);

    // may be called from another thread than beat()
    void set_active(bool active);
    void set_weight(double weight);
    gpu_share_verdict look(gpu_share_clock_watch & watch); // sets active

    int32_t slot() const { return i_slot.load(); }
    double  weight() const { return w.load(); }
    bool    active() const { return is_active.load(); }
    size_t  n_alive() const; // peers, this one included

private:
    bool owns(int32_t i) const;
    bool claim_once();
    bool take(int32_t i, uint64_t expected);
    void write(int32_t i, uint32_t busy_ppm);
    void reap(int64_t now_us, int64_t step_us);
    bool is_dead(const gpu_share_entry & entry, int64_t now_us, int64_t step_us) const;

    gpu_share_page &      page;
    const gpu_share_world world;
    const std::string     name;

    std::atomic<double>   w;
    std::atomic<bool>     is_active { false };
    std::atomic<int32_t>  i_slot { -1 };
    std::atomic<uint64_t> owner { 0 };

    gpu_share_clock_watch watch; // of the thread that beats

    std::map<uint64_t, int64_t> suspects; // owner and heartbeat of those who looked dead at the last beat
};
