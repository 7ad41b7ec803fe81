#include "gpu-share-options.h"

#include "arg.h"

#include <stdexcept>

gpu_share_options & gpu_share_get_options() {
    static gpu_share_options options;
    return options;
}

static double parse_weight(const std::string & text) {
    size_t n    = 0;
    double res  = 0.0;
    try {
        res = std::stod(text, &n);
    } catch (const std::exception &) {
        n = 0;
    }
    if (n == 0 || n != text.size() || !(res >= 0.001 && res <= 1000.0)) {
        throw std::invalid_argument("--gpu-share-weight must be a number from 0.001 to 1000, not \"" + text + "\"");
    }
    return res;
}

static std::string parse_key(const std::string & text) {
    const char * allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    if (text.empty() || text.size() > 64 || text.find_first_not_of(allowed) != std::string::npos) {
        throw std::invalid_argument("--gpu-share-key must be 1 to 64 letters, digits, dots, underscores and hyphens, not \"" + text + "\"");
    }
    return text;
}

void gpu_share_add_args(std::vector<common_arg> & args) {
    args.push_back(common_arg(
        {"--gpu-share"}, "{on,off}",
        "find other engines on the same device and take turns with them (default: on; without a GPU only where --gpu-share-key is given)",
        [](common_params & /*params*/, const std::string & value) {
            if (value != "on" && value != "off") {
                throw std::invalid_argument("--gpu-share must be on or off, not \"" + value + "\"");
            }
            gpu_share_get_options().enabled = value == "on";
        }
    ).set_env("LLAMA_ARG_GPU_SHARE").set_examples({LLAMA_EXAMPLE_SERVER}));

    args.push_back(common_arg(
        {"--gpu-share-weight"}, "W",
        "share of the device beside other engines that compute at the same time, relative to theirs (default: 1.0)",
        [](common_params & /*params*/, const std::string & value) {
            gpu_share_get_options().weight = parse_weight(value);
        }
    ).set_env("LLAMA_ARG_GPU_SHARE_WEIGHT").set_examples({LLAMA_EXAMPLE_SERVER}));

    args.push_back(common_arg(
        {"--gpu-share-key"}, "KEY",
        "engines with one key share one device (default: made of the id of the device)",
        [](common_params & /*params*/, const std::string & value) {
            gpu_share_get_options().key = parse_key(value);
        }
    ).set_env("LLAMA_ARG_GPU_SHARE_KEY").set_examples({LLAMA_EXAMPLE_SERVER}));
}
