#pragma once

// What the routes of the engine protocol have in common.
// Threads: HTTP threads only. What needs the context is posted to the main thread as a task.

#include "server-context.h"
#include "server-http.h"
#include "server-polykv.h"
#include "server-polykv-task.h"
#include "server-queue.h"

#include <functional>

// answers
server_http_res_ptr polykv_make_json (const json & data, int status = 200);
server_http_res_ptr polykv_make_error(int status, const std::string & type, const std::string & message);
std::string         polykv_format_event(const char * type, const json & data);

// an integer of a body; throws std::invalid_argument that says what it must be
int64_t polykv_read_int(const json & data, const char * key, int64_t min, int64_t max);

// operations on the main thread
server_task            polykv_make_op_task(server_response_reader & rd, polykv_op && op);
polykv_op              polykv_make_free_op(const polykv_seq_id & seq);
server_http_res_ptr    polykv_op_response(server_task_result_ptr && result);
// runs an operation and waits for it; null if the caller is gone
server_task_result_ptr polykv_run_op(server_context & ctx_server, polykv_op && op, const std::function<bool()> & should_stop);

// handlers in files of their own
server_http_res_ptr polykv_handle_post_seqs(server_context & ctx_server, const server_http_req & req);
server_http_res_ptr polykv_handle_save     (server_context & ctx_server, const server_http_req & req);
server_http_res_ptr polykv_handle_restore  (server_context & ctx_server, const server_http_req & req);
