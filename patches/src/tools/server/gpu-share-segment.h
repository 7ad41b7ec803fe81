#pragma once

// The registry of a device in POSIX shared memory.
// Law: opens, checks, maps; nobody removes a segment (that would race with the next who joins, and 4 KiB until the next boot harm nobody).
// Creating, sizing and writing the header are three steps, each of which anybody may do and do again: whoever comes in between, or
// finds what a killed process left, goes on from there.

#include "gpu-share-layout.h"


struct gpu_share_segment {
    // throws std::runtime_error that says what is wrong and what to do
    explicit gpu_share_segment(const std::string & key);
    ~gpu_share_segment();

    gpu_share_segment(const gpu_share_segment &) = delete;
    gpu_share_segment & operator=(const gpu_share_segment &) = delete;

    gpu_share_page & page() { return *mapped; }

    static std::string name_of(const std::string & key); // "/opencoti-gpu-<key>"

private:
    gpu_share_page * mapped = nullptr;
};

// 1 to 64 of A-Z a-z 0-9 . _ -
bool gpu_share_is_key(const std::string & key);
