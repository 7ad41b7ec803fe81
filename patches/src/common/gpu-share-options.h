#pragma once

// Options of GPU share. Law: plain values; written while arguments are parsed, read-only afterwards.

#include <string>
#include <vector>

struct common_arg;

struct gpu_share_options {
    bool        enabled = true;
    double      weight  = 1.0;
    std::string key; // empty: made of the device
};

gpu_share_options & gpu_share_get_options();

// adds --gpu-share, --gpu-share-weight and --gpu-share-key (env LLAMA_ARG_GPU_SHARE, _WEIGHT, _KEY)
void gpu_share_add_args(std::vector<common_arg> & args);
