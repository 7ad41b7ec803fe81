#include "gpu-share-registry.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

constexpr int64_t BEAT_US          = 500000;
constexpr int64_t ACTIVE_US        = 2000000; // the activity window
constexpr double  BUSY_AVERAGED_US = 2000000.0;

gpu_share_registry::gpu_share_registry(const std::string & key, const std::string & name, double weight, gpu_share_world host)
    : key(key), world(std::move(host)), segment(key), member(segment.page(), world, name, weight) {
    if (!member.claim()) {
        throw std::runtime_error("all " + std::to_string(GPU_SHARE_SLOTS) + " slots are taken by living engines");
    }
    t_beat = t_counted = world.mono_us();
    heart = std::thread([this] { run(); });
}

gpu_share_registry::~gpu_share_registry() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    cond.notify_one();
    heart.join();
    member.leave();
}

gpu_share_verdict gpu_share_registry::look() {
    t_work.store(world.mono_us());
    return member.look(watch);
}

void gpu_share_registry::begin_step() {
    t_step.store(world.mono_us());
}

void gpu_share_registry::end_step() {
    const int64_t now   = world.mono_us();
    const int64_t begin = t_step.exchange(0);
    busy_us += now - begin;
    t_work.store(now);
}

// of the time since the last call, averaged over about two seconds; a step that is still running counts so far
uint32_t gpu_share_registry::take_busy_ppm(int64_t now_us) {
    const int64_t begin = t_step.load();
    const int64_t total = busy_us.load() + (begin > 0 ? std::max<int64_t>(0, now_us - begin) : 0);
    const double  took  = std::max<int64_t>(1, now_us - t_counted);
    const double  part  = std::min(1.0, std::max<int64_t>(0, total - busy_counted)/took);
    busy += (part - busy)*(1.0 - std::exp(-took/BUSY_AVERAGED_US));
    t_counted    = now_us;
    busy_counted = std::max(busy_counted, total);
    return (uint32_t) std::lround(busy*1e6);
}

void gpu_share_registry::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopping) {
        const int64_t now = world.mono_us();
        if (member.active() && t_step.load() == 0 && now - t_work.load() >= ACTIVE_US) {
            member.set_active(false);
        }
        if (now >= t_beat) {
            member.beat(take_busy_ppm(now));
            t_beat = now + BEAT_US;
        }
        int64_t until = t_beat;
        if (member.active() && t_step.load() == 0) {
            until = std::min(until, t_work.load() + ACTIVE_US); // its window goes to others at once
        }
        cond.wait_for(lock, std::chrono::microseconds(std::max<int64_t>(1000, until - world.mono_us())));
    }
}
