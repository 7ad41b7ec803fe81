#pragma once

// Options of the shared-prefix ("pool") support and the two places where they touch context creation.
// Law: no llama_context here, no server types; plain values only. Everything is off by default.

#include "llama.h"

#include <string>
#include <vector>

struct common_params;
struct common_arg;

struct polykv_settings {
    int32_t max_pools = 0;      // pools that can be resident at once, 0 = off
    int32_t n_ctx_slot_cap = 0; // context of one slot where the cache was made unified for the pools, 0 = no cap
    bool    split = false;      // each sequence has a stream of its own: prefixes are copied, never shared

    std::string key;            // callers of the engine protocol must send it, empty = no protocol
    std::string off_reason;     // why pools are off although they were asked for

    bool on() const { return max_pools > 0; }

    // sequence ids above those of the slots. on a unified cache one more, for copying parts of a pool to and from a file
    int32_t n_reserved() const { return on() ? max_pools + !split : 0; }
};

// written while arguments are parsed and by polykv_prepare(), read-only afterwards
polykv_settings & polykv_get_settings();

// adds --polykv-max-pools (env LLAMA_ARG_POLYKV_MAX_POOLS) and the options of GPU share
void polykv_add_args(std::vector<common_arg> & args);

// validates the reserve and settles the cache layout; false: the process must end, the reason and the remedy are logged
bool polykv_prepare(common_params & params, int argc, char ** argv);

// reserves the sequence ids of the pools
void polykv_context_params(llama_context_params & cparams);
