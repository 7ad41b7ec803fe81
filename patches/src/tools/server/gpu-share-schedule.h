#pragma once

// Who runs when on a shared device: every peer computes the same windows from the same registry and the clock of the host.
// Law: pure, and whole numbers only, so that every peer comes to the same microsecond. The Python twin is polykv_proxy/gpu_share/schedule.py.
//
// 1. Peers that are alive and active take part, in the order of their slots.
// 2. A share is proportional to the weight, but at least a tenth (with more than ten peers: all the same).
// 3. The period is the shortest in which the smallest share still is 40 ms, between 80 and 400 ms.
// 4. Windows tile the period in that order; it repeats from the Unix epoch on.
// 5. A step that has begun is not divided: it may run beyond its window, by less than itself.

#include "gpu-share-layout.h"

// [begin_us, end_us) of each period belongs to the peer in this slot
struct gpu_share_window {
    int32_t slot     = -1;
    int64_t begin_us = 0;
    int64_t end_us   = 0;
};

// fewer than two peers have no windows and no period
struct gpu_share_schedule {
    int64_t period_us = 0;
    std::array<gpu_share_window, GPU_SHARE_SLOTS> windows;
    size_t n = 0;
};

enum gpu_share_turn { GPU_SHARE_FREE, GPU_SHARE_RUN, GPU_SHARE_WAIT };

struct gpu_share_verdict {
    gpu_share_turn turn = GPU_SHARE_FREE;

    int64_t until_us  = 0; // run: the end of the window, wait: its next beginning
    int64_t window_us = 0; // how long the window is
    int64_t period_us = 0;
};

gpu_share_entries  gpu_share_participants(const gpu_share_entries & entries, int64_t now_us, int64_t step_us);
gpu_share_schedule gpu_share_make_schedule(const gpu_share_entries & peers);

// who has no window runs freely: it is alone, or not on the list
gpu_share_verdict  gpu_share_get_verdict(const gpu_share_schedule & schedule, int32_t slot, int64_t now_us);
