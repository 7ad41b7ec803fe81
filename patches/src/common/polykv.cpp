#include "polykv.h"

#include "arg.h"
#include "common.h"
#include "gpu-share-options.h"
#include "log.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

polykv_settings & polykv_get_settings() {
    static polykv_settings settings;
    return settings;
}

void polykv_add_args(std::vector<common_arg> & args) {
    gpu_share_add_args(args);

    // the key never appears in a process listing, so it has no command-line form
    if (const char * key = std::getenv("LLAMA_ARG_POLYKV_KEY")) {
        polykv_get_settings().key = key;
    }

    args.push_back(common_arg(
        {"--polykv-max-pools"}, "N",
        "number of shared prefixes (pools) that can be resident at once, each takes a sequence id above the slots (default: 0, 0 = off)",
        [](common_params & /*params*/, int value) {
            if (value < 0) {
                throw std::invalid_argument("--polykv-max-pools must not be negative");
            }
            polykv_get_settings().max_pools = value;
        }
    ).set_env("LLAMA_ARG_POLYKV_MAX_POOLS").set_examples({LLAMA_EXAMPLE_SERVER}));
}

// true if the user chose between unified and split, in either direction
static bool layout_is_explicit(int argc, char ** argv) {
    for (int i = 1; argv && i < argc; ++i) {
        for (const char * arg : {"-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"}) {
            if (std::strcmp(argv[i], arg) == 0) {
                return true;
            }
        }
    }
    return std::getenv("LLAMA_ARG_KV_UNIFIED") || std::getenv("LLAMA_ARG_NO_KV_UNIFIED");
}

// the pools take a stream each. n_ctx is the size of all streams: it grows with them, so that the context of a slot stays what it is
static bool prepare_split(common_params & params) {
    auto & settings = polykv_get_settings();

    if (params.n_ctx <= 0) {
        settings.max_pools  = 0;
        settings.off_reason = "the KV cache is split (--no-kv-unified) and -c does not say how large it is; give -c, or leave --no-kv-unified out";
        LOG_WRN("polykv: pools are off: %s\n", settings.off_reason.c_str());
        return true;
    }

    const int64_t n_ctx_slot = GGML_PAD(GGML_PAD((int64_t) params.n_ctx, 256) / params.n_parallel, 256); // as llama_context does
    const int64_t n_ctx      = n_ctx_slot * (params.n_parallel + settings.max_pools);
    if (n_ctx > INT32_MAX) {
        LOG_ERR("polykv: %d pools on a split KV cache take a stream of %lld cells each, %lld in all, and %d is the limit; use a smaller --polykv-max-pools or -c, or leave --no-kv-unified out\n",
            settings.max_pools, (long long) n_ctx_slot, (long long) n_ctx, INT32_MAX);
        return false;
    }

    LOG_WRN("polykv: split KV cache: %d pools take a stream of %d cells each, -c grows from %d to %d; without --no-kv-unified they would share cells\n",
        settings.max_pools, (int) n_ctx_slot, params.n_ctx, (int) n_ctx);
    settings.split = true;
    params.n_ctx   = (int32_t) n_ctx;
    return true;
}

bool polykv_prepare(common_params & params, int argc, char ** argv) {
    auto & settings = polykv_get_settings();

    if (!settings.on()) {
        return true;
    }
    if (params.embedding) {
        settings.max_pools  = 0;
        settings.off_reason = "the engine computes embeddings alone (--embedding), and those are never computed from a prefix";
        LOG_INF("polykv: pools are off: %s\n", settings.off_reason.c_str());
        return true;
    }

    const int32_t n_free = (int32_t) llama_max_parallel_sequences() - params.n_parallel - 1;
    if (settings.max_pools > n_free) {
        LOG_ERR("polykv: --polykv-max-pools %d and %d slots exceed the %d sequence ids of a context; use --polykv-max-pools %d or fewer slots (-np)\n",
            settings.max_pools, params.n_parallel, (int) llama_max_parallel_sequences(), std::max(0, n_free));
        return false;
    }

    if (!params.kv_unified && layout_is_explicit(argc, argv)) {
        if (!prepare_split(params)) {
            return false;
        }
    } else if (!params.kv_unified) {
        params.kv_unified = true;
        settings.n_ctx_slot_cap = -1; // known once the context exists, see polykv_n_ctx_slot()
        if (params.n_ctx > 0) {
            settings.n_ctx_slot_cap = GGML_PAD(params.n_ctx / params.n_parallel, 256); // as a split cache pads its streams
            params.n_ctx = settings.n_ctx_slot_cap * params.n_parallel;
        }
        LOG_INF("polykv: unified KV cache for pools, the context of one slot stays what a split cache gives\n");
    }

    if (params.ctx_shift) {
        LOG_WRN("polykv: context shift is on: slots that hold cells of a pool are never shifted, they stop at the limit (finish reason \"length\"); other slots still shift\n");
    }
    if (params.n_cache_reuse > 0) {
        LOG_WRN("polykv: --cache-reuse never moves cells of a pool; a request whose KV was moved cannot be made a pool\n");
    }
    return true;
}

void polykv_context_params(llama_context_params & cparams) {
    const auto & settings = polykv_get_settings();

    if (!settings.on()) {
        return;
    }

    cparams.n_seq_max += settings.n_reserved();
    if (cparams.n_outputs_max > 0) {
        cparams.n_outputs_max = std::max(cparams.n_outputs_max, cparams.n_seq_max);
    }
}
