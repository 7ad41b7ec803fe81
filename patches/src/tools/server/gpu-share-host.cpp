#include "gpu-share-member.h"

// The real world of a member: clocks and processes of the host.

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>

#ifdef _WIN32
#include <process.h>
#define getpid _getpid
#else
#include <unistd.h>
#endif

constexpr int64_t BOOT_TOLERANCE_US = 2000000; // the boot time of the host is known to a second, and moves when its clock is set

static int64_t wall_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

static int64_t mono_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// when a process started, 0: there is none, it has ended, or this system does not say
static int64_t start_of(uint32_t pid) {
#ifdef __linux__
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string text;
    if (!std::getline(stat, text) || text.rfind(')') == std::string::npos) {
        return 0;
    }
    std::istringstream fields(text.substr(text.rfind(')') + 1)); // from the third field on
    std::string state, skipped;
    fields >> state;
    for (int i = 4; i < 22; ++i) {
        fields >> skipped;
    }
    int64_t ticks = 0;
    fields >> ticks;

    std::ifstream host("/proc/stat");
    for (std::string name; host >> name;) {
        int64_t boot = 0;
        if (name == "btime" && host >> boot && fields && state != "Z" && state != "X") {
            return boot*1000000 + ticks*1000000/sysconf(_SC_CLK_TCK);
        }
        std::getline(host, skipped);
    }
#endif
    (void) pid;
    return 0;
}

gpu_share_world gpu_share_host() {
    gpu_share_world res;
    res.wall_us    = wall_us;
    res.mono_us    = mono_us;
    res.pid        = (uint32_t) getpid();
    res.boot_us    = start_of(res.pid);
    res.is_running = [](uint32_t pid, int64_t boot_us) {
        const int64_t start = start_of(pid);
        return start > 0 && std::llabs(start - boot_us) <= BOOT_TOLERANCE_US;
    };
    if (res.boot_us == 0) {
        res.boot_us = wall_us();
    }
    return res;
}
