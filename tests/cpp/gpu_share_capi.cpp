// The pure part of GPU share with C names, for tests that hold it to its Python twin (tests/unit/gpu_share/).
// Law: decides nothing; bytes in, plain values out.

#include "gpu-share-schedule.h"

#include <cstring>
#include <memory>

static std::unique_ptr<gpu_share_page> make_page(const void * bytes) {
    auto page = std::make_unique<gpu_share_page>();
    std::memcpy(static_cast<void *>(page.get()), bytes, sizeof(*page));
    return page;
}

extern "C" {

struct capi_entry {
    int32_t  slot, active;
    uint64_t owner;
    int64_t  boot_us, heartbeat_us;
    double   weight;
    uint32_t busy_ppm;
    int32_t  alive;
    char     name[GPU_SHARE_NAME_SIZE + 1];
};

int32_t capi_check(const void * bytes) {
    return gpu_share_check(*make_page(bytes)).empty();
}

int32_t capi_read(const void * bytes, int64_t now_us, int64_t step_us, capi_entry * out) {
    const auto page = make_page(bytes);
    int32_t n = 0;
    for (const auto & entry : gpu_share_read(*page)) {
        out[n] = { entry.slot, entry.active, entry.owner, entry.boot_us, entry.heartbeat_us, entry.weight, entry.busy_ppm, entry.alive(now_us, step_us), {} };
        std::strncpy(out[n++].name, gpu_share_read_name(*page, entry.slot).c_str(), GPU_SHARE_NAME_SIZE);
    }
    return n;
}

// the windows as slot, begin, end; returns how many there are
int32_t capi_schedule(const void * bytes, int64_t now_us, int64_t step_us, int64_t * period_us, int64_t * out) {
    const auto schedule = gpu_share_make_schedule(gpu_share_participants(gpu_share_read(*make_page(bytes)), now_us, step_us));
    *period_us = schedule.period_us;
    for (size_t i = 0; i < schedule.n; ++i) {
        out[3*i]     = schedule.windows[i].slot;
        out[3*i + 1] = schedule.windows[i].begin_us;
        out[3*i + 2] = schedule.windows[i].end_us;
    }
    return (int32_t) schedule.n;
}

int32_t capi_verdict(const void * bytes, int32_t slot, int64_t now_us, int64_t step_us, int64_t * until_us) {
    const auto schedule = gpu_share_make_schedule(gpu_share_participants(gpu_share_read(*make_page(bytes)), now_us, step_us));
    const auto verdict  = gpu_share_get_verdict(schedule, slot, now_us);
    *until_us = verdict.until_us;
    return verdict.turn;
}

}
