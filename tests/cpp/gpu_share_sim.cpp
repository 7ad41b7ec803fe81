// Peers on a simulated device, with the real member and schedule, in virtual time: what they get, and how long they wait.
// Law: exact and deterministic. Steps that run at the same time share the device equally and slow each other down, as kernels of several
// processes do; a peer that waits wakes up exactly when it wanted to. C names, for tests/unit/gpu_share/test_sim.py.

#include "gpu-share-member.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

static constexpr double NEVER = 1e300;

enum sim_kind { SIM_WORK, SIM_IDLE, SIM_KILL, SIM_STOP, SIM_CONTINUE, SIM_CLOCK, SIM_WEIGHT };

struct sim_event { double t_us; int32_t peer, kind; double value; };

struct sim_seen { int64_t steps; double max_gap_us, last_long_us; };

namespace {

struct sim {
    gpu_share_page page = {};
    double         t    = 0.0; // microseconds since the start, monotonic
    int64_t        set  = 0;   // by how much the wall clock was set

    struct peer {
        std::unique_ptr<gpu_share_member> member;
        gpu_share_clock_watch             watch;

        double step_us = 0.0, left_us = 0.0, t_ready = NEVER, t_beat = 0.0, t_work = -NEVER, t_last = 0.0;
        bool   working = false, running = false, stopped = false, dead = false;
    };
    std::vector<peer> peers;

    double   jitter = 0.0; // steps are longer or shorter by up to this part
    uint64_t random = 1;

    double uniform() { // -1 to 1
        random = random*6364136223846793005ULL + 1442695040888963407ULL;
        return (double) (random >> 11)/(double) (1ULL << 52) - 1.0;
    }

    int64_t wall() const { return 1800000000000000 + (int64_t) std::llround(t) + set; }

    gpu_share_world world(uint32_t pid) {
        gpu_share_world res;
        res.wall_us    = [this] { return wall(); };
        res.mono_us    = [this] { return (int64_t) std::llround(t) + 77000000; };
        res.is_running = [this](uint32_t pid, int64_t) { return !peers[pid - 1].dead; };
        res.pid        = pid;
        return res;
    }

    void add(double weight, double step_us) {
        page.header.magic = GPU_SHARE_MAGIC; // read by nobody here
        peers.emplace_back();
        auto & made  = peers.back();
        made.member  = std::make_unique<gpu_share_member>(page, world((uint32_t) peers.size()), "sim", weight);
        made.step_us = step_us;
        made.t_beat  = 37000.0*(double) peers.size(); // not all at once
        made.member->claim();
    }

    void apply(const sim_event & event) {
        if (event.kind == SIM_CLOCK) {
            set += (int64_t) event.value;
            return;
        }
        auto & who = peers[event.peer];
        switch (event.kind) {
            case SIM_WORK:     who.working = true; who.t_ready = t; break;
            case SIM_IDLE:     who.working = false; who.t_ready = NEVER; break;
            case SIM_KILL:     who.dead = true; who.running = false; break;
            case SIM_STOP:     who.stopped = true; break;
            case SIM_CONTINUE: who.stopped = false; who.t_ready = who.working && !who.running ? t : NEVER; break;
            case SIM_WEIGHT:   who.member->set_weight(event.value); break;
        }
    }

    void decide(peer & who) {
        const auto verdict = who.member->look(who.watch);
        who.t_work = t;
        if (verdict.turn == GPU_SHARE_WAIT) {
            who.t_ready = t + std::min<double>(std::max<int64_t>(1, verdict.until_us - wall()), verdict.period_us);
            return;
        }
        who.running = true;
        who.left_us = who.step_us*(1.0 + jitter*uniform());
        who.t_ready = NEVER;
    }

    void finish(peer & who, sim_seen & seen, double t_from) {
        who.running = false;
        who.t_work  = t;
        who.t_ready = who.working ? t : NEVER;
        if (t >= t_from) {
            const double gap = t - std::max(who.t_last, t_from);
            seen.steps++;
            seen.max_gap_us = std::max(seen.max_gap_us, gap);
            if (gap > 3*who.step_us) {
                seen.last_long_us = t;
            }
        }
        who.t_last = t;
    }

    void beat(peer & who) {
        if (who.member->active() && !who.running && t - who.t_work >= 2000000.0) {
            who.member->set_active(false);
        }
        who.member->beat(0);
        who.t_beat = t + 500000.0;
        if (who.member->active() && !who.running) { // the heart wakes when the activity window ends
            who.t_beat = std::min(who.t_beat, std::max(t + 1000.0, who.t_work + 2000000.0));
        }
    }

    void run(double t_end, double t_from, std::vector<sim_event> events, std::vector<sim_seen> & seen) {
        std::stable_sort(events.begin(), events.end(), [](const sim_event & a, const sim_event & b) { return a.t_us < b.t_us; });
        size_t next = 0;
        while (t < t_end) {
            const auto lives = [](const peer & who) { return !who.dead && !who.stopped; };
            const double n_running = (double) std::count_if(peers.begin(), peers.end(), [](const peer & who) { return who.running && !who.dead; });
            double until = next < events.size() ? events[next].t_us : t_end;
            for (const auto & who : peers) {
                if (who.running && !who.dead) {
                    until = std::min(until, t + who.left_us*n_running); // what was submitted is computed, also for one that is stopped
                }
                if (lives(who)) {
                    until = std::min({ until, who.t_ready, who.t_beat });
                }
            }
            until = std::max(until, t);
            for (auto & who : peers) {
                if (who.running && !who.dead) {
                    who.left_us -= (until - t)/n_running;
                }
            }
            t = until;
            while (next < events.size() && events[next].t_us <= t) {
                apply(events[next++]);
            }
            for (size_t i = 0; i < peers.size(); ++i) {
                auto & who = peers[i];
                if (who.running && !who.dead && who.left_us < 1e-6 && !who.stopped) {
                    finish(who, seen[i], t_from);
                } else if (who.running && !who.dead && who.left_us < 1e-6) {
                    who.running = false; // nobody sees that it is done
                }
                if (lives(who) && t >= who.t_beat) {
                    beat(who);
                }
                if (lives(who) && t >= who.t_ready) {
                    decide(who);
                }
            }
        }
    }
};

} // namespace

extern "C" void capi_simulate(int32_t n, const double * weights, const double * steps_us, int32_t n_events, const sim_event * events,
        double jitter, double t_from_us, double t_end_us, sim_seen * out) {
    sim made;
    made.jitter = jitter;
    for (int32_t i = 0; i < n; ++i) {
        made.add(weights[i], steps_us[i]);
    }
    std::vector<sim_seen> seen(n);
    made.run(t_end_us, t_from_us, { events, events + n_events }, seen);
    std::copy(seen.begin(), seen.end(), out);
}
