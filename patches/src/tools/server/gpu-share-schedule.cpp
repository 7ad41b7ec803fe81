#include "gpu-share-schedule.h"

#include <algorithm>
#include <cmath>

constexpr int64_t N_FLOOR            = 10; // the smallest share is one of so many
constexpr int64_t SMALLEST_WINDOW_US = 40000;
constexpr int64_t MIN_PERIOD_US      = 80000;
constexpr int64_t MAX_PERIOD_US      = 400000;
constexpr double  WEIGHT_UNITS       = 1000.0; // weights are compared in thousandths

using gpu_share_parts = std::array<int64_t, GPU_SHARE_SLOTS>;

// numerators over one denominator, which is returned. who would get less than the floor gets it, and the others share the rest by weight
static int64_t get_parts(const gpu_share_entries & peers, gpu_share_parts & parts) {
    const int64_t n = peers.n;
    if (n >= N_FLOOR) {
        parts.fill(1);
        return n;
    }
    gpu_share_parts                   units   = {};
    std::array<bool, GPU_SHARE_SLOTS> floored = {};
    for (int64_t i = 0; i < n; ++i) {
        units[i] = std::llrint(peers.data[i].weight*WEIGHT_UNITS);
    }
    while (true) {
        int64_t rest = 0, tenths = N_FLOOR;
        for (int64_t i = 0; i < n; ++i) {
            rest   += floored[i] ? 0 : units[i];
            tenths -= floored[i];
        }
        bool found = false;
        const auto before = floored;
        for (int64_t i = 0; i < n; ++i) {
            if (!before[i] && tenths*units[i] < rest) {
                floored[i] = found = true;
            }
        }
        if (!found) {
            for (int64_t i = 0; i < n; ++i) {
                parts[i] = floored[i] ? rest : tenths*units[i];
            }
            return N_FLOOR*rest;
        }
    }
}

gpu_share_entries gpu_share_participants(const gpu_share_entries & entries, int64_t now_us, int64_t step_us) {
    gpu_share_entries res;
    for (const auto & entry : entries) {
        if (entry.active && entry.alive(now_us, step_us)) {
            res.data[res.n++] = entry;
        }
    }
    return res;
}

gpu_share_schedule gpu_share_make_schedule(const gpu_share_entries & peers) {
    gpu_share_schedule res;
    if (peers.n < 2) {
        return res;
    }
    gpu_share_parts parts = {};
    const int64_t whole    = get_parts(peers, parts);
    const int64_t smallest = *std::min_element(parts.begin(), parts.begin() + peers.n);

    res.period_us = std::min(std::max(SMALLEST_WINDOW_US*whole/smallest, MIN_PERIOD_US), MAX_PERIOD_US);

    int64_t begin = 0, passed = 0;
    for (const auto & peer : peers) {
        passed += parts[res.n];
        const int64_t end = passed*res.period_us/whole;
        res.windows[res.n++] = { peer.slot, begin, end };
        begin = end;
    }
    return res;
}

gpu_share_verdict gpu_share_get_verdict(const gpu_share_schedule & schedule, int32_t slot, int64_t now_us) {
    for (size_t i = 0; i < schedule.n; ++i) {
        const auto & window = schedule.windows[i];
        if (window.slot != slot) {
            continue;
        }
        const int64_t start  = now_us - now_us % schedule.period_us;
        const int64_t length = window.end_us - window.begin_us;
        if (start + window.begin_us <= now_us && now_us < start + window.end_us) {
            return { GPU_SHARE_RUN, start + window.end_us, length, schedule.period_us };
        }
        const int64_t ahead = start + window.begin_us;
        return { GPU_SHARE_WAIT, ahead > now_us ? ahead : ahead + schedule.period_us, length, schedule.period_us };
    }
    return {};
}
