#pragma once

// The registry of a device, as it lies in shared memory: a header and 16 slots in 4 KiB, little-endian.
// Law: pure. A slot is written by the process that claimed it and by nobody else, read by all, without a lock; whatever is read may
// be torn or forged and does no harm. Times are microseconds since the Unix epoch. The Python twin is polykv_proxy/gpu_share/layout.py.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

constexpr uint64_t GPU_SHARE_MAGIC     = 0x000000555047434FULL; // "OCGPU\0\0\0"
constexpr uint32_t GPU_SHARE_VERSION   = 1;
constexpr uint32_t GPU_SHARE_SLOTS     = 16;
constexpr size_t   GPU_SHARE_SIZE      = 4096;
constexpr size_t   GPU_SHARE_NAME_SIZE = 48;

constexpr int64_t GPU_SHARE_DEAD_AFTER_US = 3000000; // a heartbeat older than this is that of a dead peer
constexpr int64_t GPU_SHARE_AHEAD_US      = 1000000; // one further ahead of the clock than this was not made by it

constexpr double GPU_SHARE_DEFAULT_WEIGHT = 1.0;
constexpr double GPU_SHARE_MIN_WEIGHT     = 0.001;
constexpr double GPU_SHARE_MAX_WEIGHT     = 1000.0;

struct gpu_share_header {
    std::atomic<uint64_t> magic; // stored last
    std::atomic<uint32_t> version;
    std::atomic<uint32_t> slot_count;
    uint8_t               reserved[48];
};

struct gpu_share_slot {
    std::atomic<uint64_t> owner;    // pid in the lower half (0: free), a number of this claim in the upper one; changed by compare-and-swap
    std::atomic<int64_t>  boot_us;  // when the process started
    std::atomic<float>    weight;
    std::atomic<uint32_t> active;   // computed within the activity window
    std::atomic<int64_t>  heartbeat_us;
    std::atomic<uint32_t> busy_ppm; // of the time
    char                  name[GPU_SHARE_NAME_SIZE]; // for display only
    uint8_t               reserved[44];
};

struct gpu_share_page {
    gpu_share_header header;
    gpu_share_slot   slots[GPU_SHARE_SLOTS];
    uint8_t          reserved[GPU_SHARE_SIZE - sizeof(gpu_share_header) - GPU_SHARE_SLOTS*sizeof(gpu_share_slot)];
};

static_assert(sizeof(gpu_share_header) == 64 && sizeof(gpu_share_slot) == 128 && sizeof(gpu_share_page) == GPU_SHARE_SIZE, "sizes of the registry");
static_assert(offsetof(gpu_share_header, magic) == 0 && offsetof(gpu_share_header, version) == 8 && offsetof(gpu_share_header, slot_count) == 12, "the header");
static_assert(offsetof(gpu_share_page, slots) == 64, "the first slot");
static_assert(offsetof(gpu_share_slot, owner) == 0 && offsetof(gpu_share_slot, boot_us) == 8 && offsetof(gpu_share_slot, weight) == 16, "a slot");
static_assert(offsetof(gpu_share_slot, active) == 20 && offsetof(gpu_share_slot, heartbeat_us) == 24, "a slot");
static_assert(offsetof(gpu_share_slot, busy_ppm) == 32 && offsetof(gpu_share_slot, name) == 36, "a slot");
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free, "processes share no lock");
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<float>::is_always_lock_free, "processes share no lock");

// the plain values of a claimed slot
struct gpu_share_entry {
    int32_t  slot         = -1;
    uint64_t owner        = 0;
    int64_t  boot_us      = 0;
    double   weight       = GPU_SHARE_DEFAULT_WEIGHT;
    bool     active       = false;
    int64_t  heartbeat_us = 0;
    uint32_t busy_ppm     = 0;

    uint32_t pid() const { return (uint32_t) owner; }

    // step_us: by how much the clock has just been set; stamps from before count as well until they are renewed
    bool alive(int64_t now_us, int64_t step_us) const;
};

// the claimed slots in their order
struct gpu_share_entries {
    std::array<gpu_share_entry, GPU_SHARE_SLOTS> data;
    size_t n = 0;

    const gpu_share_entry * begin() const { return data.data(); }
    const gpu_share_entry * end()   const { return data.data() + n; }
};

// the weight itself or the nearest one allowed; the default for what is no weight at all
double gpu_share_sound_weight(double weight);

gpu_share_entries gpu_share_read(const gpu_share_page & page);

std::string gpu_share_read_name(const gpu_share_page & page, int32_t slot);

// what is wrong with a registry; empty: nothing
std::string gpu_share_check(const gpu_share_page & page);
