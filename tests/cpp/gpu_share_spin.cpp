// An engine whose steps are nothing but work: the processor that it is bound to is the device. For scripts/bench gpu_share.
// Law: takes turns as the pacer of the engine does, with the same parts; what it waits on is a clock, since nobody posts tasks. A step is a
// fixed number of rounds, calibrated while it has the processor to itself, so that contention makes steps longer and not fewer.
//
//   KEY WEIGHT STEP_US CPU    KEY `-`: it shares nothing. Then on the input: `go`, `idle`, `begin` (forget what was counted), `weight W`,
//                             `end` (one line of JSON: steps, seconds, gaps between ends of steps in ms, of all steps one in a column)

#include "gpu-share-registry.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <sched.h>
#include <sstream>
#include <stdexcept>
#include <vector>

using steady = std::chrono::steady_clock;

static int64_t now_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(steady::now().time_since_epoch()).count();
}

static void work(int64_t n_rounds) {
    static volatile uint64_t sink = 1;
    uint64_t x = sink;
    for (int64_t i = 0; i < n_rounds; ++i) {
        x = x*6364136223846793005ULL + 1442695040888963407ULL;
    }
    sink = x;
}

// rounds in so many microseconds of the thread's own processor time: other work on the machine does not count
static int64_t calibrate(int64_t step_us) {
    int64_t best = 0;
    for (int i = 0; i < 5; ++i) {
        timespec t0, t1;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t0);
        work(2000000);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t1);
        const int64_t took_ns = (t1.tv_sec - t0.tv_sec)*1000000000LL + t1.tv_nsec - t0.tv_nsec;
        best = std::max(best, 2000000*1000*step_us/std::max<int64_t>(1, took_ns));
    }
    return best;
}

struct counts {
    std::mutex           mutex;
    int64_t              t_begin = 0, t_last = 0;
    std::vector<int64_t> gaps_us;

    void begin() {
        std::lock_guard<std::mutex> lock(mutex);
        t_begin = now_us();
        t_last  = 0;
        gaps_us.clear();
    }
    void step() {
        std::lock_guard<std::mutex> lock(mutex);
        const int64_t now = now_us();
        gaps_us.push_back(t_last == 0 ? now - t_begin : now - t_last);
        t_last = now;
    }
    void print() {
        std::lock_guard<std::mutex> lock(mutex);
        std::printf("{\"steps\": %zu, \"seconds\": %.6f, \"gaps_ms\": [", gaps_us.size(), (now_us() - t_begin)/1e6);
        for (size_t i = 0; i < gaps_us.size(); ++i) {
            std::printf("%s%.3f", i ? "," : "", gaps_us[i]/1e3);
        }
        std::puts("]}");
        std::fflush(stdout);
    }
};

struct engine {
    std::unique_ptr<gpu_share_registry> registry;
    int64_t n_rounds;
    counts  seen;

    std::atomic<bool> running { false }, ending { false };

    void run() {
        while (!ending) {
            if (!running) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                continue;
            }
            if (registry) {
                const auto verdict = registry->look();
                if (verdict.turn == GPU_SHARE_WAIT) {
                    const int64_t wait_us = verdict.until_us - registry->wall_us();
                    std::this_thread::sleep_for(std::chrono::microseconds(std::min(std::max<int64_t>(0, wait_us), verdict.period_us)));
                    continue;
                }
                registry->begin_step();
            }
            work(n_rounds);
            if (registry) {
                registry->end_step();
            }
            seen.step();
        }
    }
};

int main(int argc, char ** argv) {
    if (argc < 5) {
        std::cerr << "see the head of this file" << std::endl;
        return 2;
    }
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(std::stoi(argv[4]), &cpus);
    sched_setaffinity(0, sizeof(cpus), &cpus);

    engine made;
    made.n_rounds = calibrate(std::stoll(argv[3]));
    const std::string key = argv[1];
    try {
        if (key != "-") {
            made.registry = std::make_unique<gpu_share_registry>(key, "spin", std::stod(argv[2]));
        }
    } catch (const std::runtime_error & e) {
        std::cerr << e.what() << std::endl;
        return 1;
    }
    std::cout << "ready" << std::endl;
    std::thread thread([&made] { made.run(); });
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string word;
        double weight = 0;
        words >> word;
        if (word == "go" || word == "idle") {
            made.running = word == "go";
        } else if (word == "begin") {
            made.seen.begin();
        } else if (word == "end") {
            made.seen.print();
        } else if (word == "weight" && words >> weight && made.registry) {
            made.registry->set_weight(weight);
        }
    }
    made.ending = true;
    thread.join();
    return 0;
}
