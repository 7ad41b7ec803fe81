#pragma once

// When this engine may compute: it takes turns with its peers on the device.
// Law: waits on the queue of tasks and nowhere else, so that whatever is posted ends the wait at once. Alone, idle or off it costs one look at
// the registry per update. Threads: everything on the main thread but set_weight() and to_json().

#include "common.h"
#include "gpu-share-registry.h"
#include "json.h"

struct llama_model;
struct server_queue;

struct gpu_share_pacer {
    // after a model was loaded; what was joined before stays joined
    void join(const llama_model * model, const std::string & model_name);

    // blocks until this engine may compute; false: a task came first. `n_posted` tasks are in the queue anyway
    bool wait_turn(server_queue & queue, size_t n_posted);
    void end_turn();

    // a batch is about to be computed; true: wait for the device afterwards, so that no work leaks into the turn of a peer
    bool on_batch(int32_t n_tokens);

    // how many prompt tokens a batch may carry: beside peers no more than about half a window of work
    int32_t limit_prompt(int32_t n_batch) const;

    // false: there is nothing to share
    bool set_weight(double weight);

    common_json to_json() const;

private:
    std::shared_ptr<gpu_share_registry> get() const;

    mutable std::mutex                  mutex; // of what follows
    std::shared_ptr<gpu_share_registry> registry;
    std::string                         why_not = "no model is loaded";

    bool              shared = false; // peers computed at the last look
    gpu_share_verdict verdict;
    int64_t           t_begin      = 0; // of the turn, by the wall clock
    int32_t           n_tokens     = 0; // of its batches
    double            us_per_token = 0.0; // of batches with prompt tokens, smoothed
};

gpu_share_pacer & gpu_share_get_pacer();

// a turn as a scope: update_slots() returns early in many ways
struct gpu_share_turn_guard {
    const bool ours;

    explicit gpu_share_turn_guard(server_queue & queue) : ours(gpu_share_get_pacer().wait_turn(queue, 1)) {}
    ~gpu_share_turn_guard() {
        if (ours) {
            gpu_share_get_pacer().end_turn();
        }
    }
};
