#pragma once

// Who runs when on a shared device: every peer computes the same windows from the same registry and the clock of the host.
// Law: pure, and whole numbers only, so that every peer comes to the same microsecond. The Python twin is polykv_proxy/gpu_share/schedule.py.
//
// 1. Peers that are alive and active take part, in the order of their slots.
// 2. A share is proportional to the weight, but at least a tenth (with more than ten peers: all the same).
// 3. The period is the shortest in which the smallest share still is 40 ms, between 80 and 400 ms.
// 4. Windows tile the period in that order; it repeats from the Unix epoch on.

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

    // the next window after this one
    int64_t next_us() const { return turn == GPU_SHARE_RUN ? until_us - window_us + period_us : until_us; }
};

gpu_share_entries  gpu_share_participants(const gpu_share_entries & entries, int64_t now_us, int64_t step_us);
gpu_share_schedule gpu_share_make_schedule(const gpu_share_entries & peers);

// who has no window runs freely: it is alone, or not on the list
gpu_share_verdict  gpu_share_get_verdict(const gpu_share_schedule & schedule, int32_t slot, int64_t now_us);

// Steps against windows: a step is not divided, so it may run over, by less than itself. Where steps are long enough for that to change the
// proportion, each window is rounded to whole steps and the rest carried to the next one: over many windows a peer uses what it was given.
// 1. A step is at most a sixteenth of the window, or more than half of it: it starts whenever the window is open.
// 2. Else it starts where at least half of it fits into what is left of the window, less what is carried.
struct gpu_share_pace {
    // a step may start now, verdict being RUN; false: leave the rest of the window to the carry and wait for the next one
    bool may_start(const gpu_share_verdict & verdict, int64_t now_us);

    // a step is over. it began under this verdict
    void on_step(const gpu_share_verdict & verdict, int64_t begin_us, int64_t end_us);

    int64_t step_us  = 0; // how long a step takes, smoothed
    int64_t carry_us = 0; // > 0: used more than given

private:
    int64_t declined_us = 0; // the end of the window whose rest was declined
};
