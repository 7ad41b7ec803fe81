#pragma once

// The answer of a polykv operation or materialisation, sent from the main thread.

#include "gpu-share-pacer.h"
#include "server-task.h"

struct server_task_result_polykv : server_task_result {
    polykv_error error; // status 0: none
    json         data;

    json to_json() override { return error.status ? error.to_json() : data; }
};
