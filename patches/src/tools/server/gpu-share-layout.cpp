#include "gpu-share-layout.h"

#include <algorithm>
#include <cmath>

static bool is_fresh(int64_t age_us) {
    return -GPU_SHARE_AHEAD_US <= age_us && age_us <= GPU_SHARE_DEAD_AFTER_US;
}

bool gpu_share_entry::alive(int64_t now_us, int64_t step_us) const {
    if (heartbeat_us < 0) {
        return false; // forged: the difference might not fit
    }
    const int64_t age = now_us - heartbeat_us;
    return is_fresh(age) || (step_us != 0 && is_fresh(age - step_us));
}

double gpu_share_sound_weight(double weight) {
    if (!std::isfinite(weight) || weight <= 0.0) {
        return GPU_SHARE_DEFAULT_WEIGHT;
    }
    return std::min(std::max(weight, GPU_SHARE_MIN_WEIGHT), GPU_SHARE_MAX_WEIGHT);
}

gpu_share_entries gpu_share_read(const gpu_share_page & page) {
    gpu_share_entries res;
    for (int32_t i = 0; i < (int32_t) GPU_SHARE_SLOTS; ++i) {
        const auto & slot = page.slots[i];

        gpu_share_entry entry;
        entry.slot         = i;
        entry.owner        = slot.owner.load(std::memory_order_acquire);
        entry.boot_us      = slot.boot_us.load(std::memory_order_relaxed);
        entry.weight       = gpu_share_sound_weight(slot.weight.load(std::memory_order_relaxed));
        entry.active       = slot.active.load(std::memory_order_relaxed) != 0;
        entry.heartbeat_us = slot.heartbeat_us.load(std::memory_order_relaxed);
        entry.busy_ppm     = std::min<uint32_t>(slot.busy_ppm.load(std::memory_order_relaxed), 1000000);
        if (entry.pid() != 0) {
            res.data[res.n++] = entry;
        }
    }
    return res;
}

std::string gpu_share_read_name(const gpu_share_page & page, int32_t slot) {
    std::string res;
    for (const char & c : page.slots[slot].name) {
        const char val = reinterpret_cast<const std::atomic<char> &>(c).load(std::memory_order_relaxed);
        if (val == 0) {
            break;
        }
        res += val;
    }
    return res;
}

std::string gpu_share_check(const gpu_share_page & page) {
    if (page.header.magic.load(std::memory_order_acquire) != GPU_SHARE_MAGIC) {
        return "it does not begin with OCGPU";
    }
    const uint32_t version = page.header.version.load(std::memory_order_relaxed);
    if (version != GPU_SHARE_VERSION) {
        return "its layout has version " + std::to_string(version) + ", this program knows version " + std::to_string(GPU_SHARE_VERSION);
    }
    const uint32_t n_slots = page.header.slot_count.load(std::memory_order_relaxed);
    if (n_slots != GPU_SHARE_SLOTS) {
        return "it has " + std::to_string(n_slots) + " slots instead of " + std::to_string(GPU_SHARE_SLOTS);
    }
    return {};
}
