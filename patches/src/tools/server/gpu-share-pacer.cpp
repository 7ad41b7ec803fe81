#include "gpu-share-pacer.h"

#include "gpu-share-options.h"
#include "llama-ext.h"
#include "log.h"
#include "server-queue.h"

#include <algorithm>

constexpr int32_t N_PROMPT_FIRST = 128; // tokens of a batch before it is known how long they take
constexpr int32_t N_PROMPT_MIN   = 16;

gpu_share_pacer & gpu_share_get_pacer() {
    static gpu_share_pacer pacer;
    return pacer;
}

// FNV-1a, 64 bit, as 16 hex digits: also where names of segments are short
static std::string hash_text(const std::string & text) {
    uint64_t res = 0xcbf29ce484222325ull;
    for (const char c : text) {
        res = (res ^ (uint8_t) c)*0x100000001b3ull;
    }
    return string_format("%016llx", (unsigned long long) res);
}

// of the first GPU that the model uses; empty: it uses none
static std::string make_key(const llama_model * model) {
    for (int i = 0; i < llama_model_n_devices(model); ++i) {
        ggml_backend_dev_t dev = llama_model_get_device(model, i);

        ggml_backend_dev_props props = {};
        ggml_backend_dev_get_props(dev, &props);
        if (props.type != GGML_BACKEND_DEVICE_TYPE_GPU && props.type != GGML_BACKEND_DEVICE_TYPE_IGPU) {
            continue;
        }
        const std::string backend = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
        if (backend == "Metal" || backend == "MTL") {
            return "metal-0";
        }
        // a device without an id is told apart by its name, which ends in its number
        return hash_text(std::string(props.device_id ? props.device_id : props.name) + "\n" + props.description);
    }
    return {};
}

void gpu_share_pacer::join(const llama_model * model, const std::string & model_name) {
    const auto &      options = gpu_share_get_options();
    const std::string name    = model_name.substr(model_name.find_last_of("/\\") + 1); // without an alias it is a path
    if (get()) {
        return;
    }
    std::shared_ptr<gpu_share_registry> joined;
    std::string why;
    const std::string key = options.key.empty() && options.enabled ? make_key(model) : options.key;
    if (!options.enabled) {
        why = "it was turned off (--gpu-share off)";
    } else if (key.empty()) {
        why = "this engine computes on no GPU, and no --gpu-share-key was given";
    } else {
        try {
            joined = std::make_shared<gpu_share_registry>(key, name, options.weight);
            LOG_INF("gpu-share: joined %s slot %d (weight %g, %zu peers alive)\n", gpu_share_segment::name_of(key).c_str(), joined->slot(), joined->weight(), joined->n_alive());
        } catch (const std::exception & e) {
            why = gpu_share_segment::name_of(key) + ": " + e.what();
            LOG_WRN("gpu-share: off: %s\n", why.c_str());
        }
    }
    std::lock_guard<std::mutex> lock(mutex);
    registry = joined;
    why_not  = why;
}

std::shared_ptr<gpu_share_registry> gpu_share_pacer::get() const {
    std::lock_guard<std::mutex> lock(mutex);
    return registry;
}

bool gpu_share_pacer::wait_turn(server_queue & queue, size_t n_posted) {
    if (!registry) { // only this thread sets it
        return true;
    }
    while (true) {
        verdict = registry->look();
        t_begin = registry->wall_us();
        shared  = verdict.turn != GPU_SHARE_FREE;
        if (verdict.turn != GPU_SHARE_WAIT) {
            break;
        }
        const int64_t wait_us = std::min(std::max<int64_t>(0, verdict.until_us - t_begin), verdict.period_us);
        if (queue.wait_tasks(n_posted + 1, std::chrono::steady_clock::now() + std::chrono::microseconds(wait_us))) {
            return false;
        }
    }
    n_tokens = 0;
    registry->begin_step();
    return true;
}

void gpu_share_pacer::end_turn() {
    if (!registry) {
        return;
    }
    registry->end_step();
    const int64_t t_end = registry->wall_us();
    if (n_tokens >= N_PROMPT_MIN && t_end > t_begin) {
        const double took = (double) (t_end - t_begin)/n_tokens;
        us_per_token = us_per_token == 0.0 ? took : us_per_token + (took - us_per_token)/4;
    }
}

bool gpu_share_pacer::on_batch(int32_t n) {
    n_tokens += n;
    return shared;
}

int32_t gpu_share_pacer::limit_prompt(int32_t n_batch) const {
    if (!shared) {
        return n_batch;
    }
    const double half = verdict.window_us/2.0;
    const double n    = us_per_token > 0.0 ? half/us_per_token : N_PROMPT_FIRST;
    return (int32_t) std::min<double>(n_batch, std::max<double>(n, N_PROMPT_MIN));
}

bool gpu_share_pacer::set_weight(double weight) {
    const auto joined = get();
    if (joined) {
        joined->set_weight(weight);
    }
    return joined != nullptr;
}

common_json gpu_share_pacer::to_json() const {
    std::lock_guard<std::mutex> lock(mutex);
    if (!registry) {
        return common_json {{"enabled", false}, {"why", why_not}};
    }
    return common_json {{"enabled", true}, {"gpu_key", registry->key}, {"slot", registry->slot()}, {"weight", registry->weight()}};
}
