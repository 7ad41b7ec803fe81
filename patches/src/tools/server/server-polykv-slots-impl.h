// What the slots do for pools: definitions of the members that server-polykv-slots.inc declares, included below the class.
// Law: main thread only, between decodes. Policy and protocol live in server-polykv*.cpp; with pools off and no key every hook returns at once.

static bool polykv_pools()  { return polykv_get_settings().on(); }
static bool polykv_events() { return !polykv_get_settings().key.empty(); }

static int polykv_n_common(const llama_tokens & a, const server_tokens & b) {
    const size_t n = std::min(a.size(), b.size());
    size_t i = 0;
    while (i < n && a[i] == b[i]) {
        i++;
    }
    return (int) i;
}

// a moment of the engine's clock. their distance is taken once: two readings of the same moment must not differ
static int64_t polykv_unix_us(int64_t t_us) {
    static const int64_t distance = polykv_now_us() - ggml_time_us();
    return t_us + distance;
}

#include "server-polykv-slots-state.h"
#include "server-polykv-slots-attach.h"
#include "server-polykv-slots-guards.h"
#include "server-polykv-slots-ops.h"
