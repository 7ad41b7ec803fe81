#pragma once

// The place of this process in the registry of its device, kept by a thread of its own: an idle engine runs no loop, and would look dead.
// Law: the heart never waits for anybody. Threads: on_step() and look() on the main thread, everything else on any.

#include "gpu-share-member.h"
#include "gpu-share-segment.h"

#include <condition_variable>
#include <mutex>
#include <thread>

struct gpu_share_registry {
    // throws std::runtime_error that says why there is nothing to share
    gpu_share_registry(const std::string & key, const std::string & name, double weight, gpu_share_world world = gpu_share_host());
    ~gpu_share_registry();

    gpu_share_verdict look(); // may this process compute now? it counts as active from here on

    // the work of a step begins and ends; between steps that follow each other a process stays active for two seconds
    void begin_step();
    void end_step();

    void set_weight(double weight) { member.set_weight(weight); }

    const std::string key;

    double  weight() const { return member.weight(); }
    int32_t slot()   const { return member.slot(); }
    size_t  n_alive() const { return member.n_alive(); }
    int64_t wall_us() const { return world.wall_us(); }

private:
    void     run();
    uint32_t take_busy_ppm(int64_t now_us);

    const gpu_share_world world;
    gpu_share_segment     segment;
    gpu_share_member      member;
    gpu_share_clock_watch watch;

    // by the monotonic clock; t_step is 0 between steps
    std::atomic<int64_t> t_work { 0 }, t_step { 0 }, busy_us { 0 };

    int64_t t_beat = 0, t_counted = 0, busy_counted = 0; // of the heart
    double  busy   = 0.0;

    std::mutex              mutex;
    std::condition_variable cond;
    bool                    stopping = false;
    std::thread             heart;
};
