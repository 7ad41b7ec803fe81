#include "server-polykv-routes.h"

// The routes of the engine protocol.
// Threads: HTTP threads only. What needs the context is posted to the main thread as a task.

#include "polykv.h"

#include <algorithm>

//
// answers
//

server_http_res_ptr polykv_make_json(const json & data, int status) {
    auto res = std::make_unique<server_http_res>();
    res->status = status;
    res->data   = data.dump_safe();
    return res;
}

server_http_res_ptr polykv_make_error(int status, const std::string & type, const std::string & message) {
    return polykv_make_json(polykv_error { status, type, message }.to_json(), status);
}

std::string polykv_format_event(const char * type, const json & data) {
    return std::string("event: ") + type + "\ndata: " + data.dump_safe() + "\n\n";
}

int64_t polykv_read_int(const json & data, const char * key, int64_t min, int64_t max) {
    const json & val = data.at(key);
    if (!val.is_number_integer()) {
        throw std::invalid_argument(std::string(key) + " must be an integer");
    }
    const int64_t res = val.get<int64_t>();
    if (res < min || res > max) {
        throw std::invalid_argument(string_format("%s must be in %lld..%lld", key, (long long) min, (long long) max));
    }
    return res;
}

// wraps a handler: without the key the route does not exist
static server_http_context::handler_t guarded(server_http_context::handler_t handler) {
    return [handler = std::move(handler)](const server_http_req & req) -> server_http_res_ptr {
        if (!polykv_authorized(req)) {
            return polykv_make_error(404, "not_found_error", "File Not Found");
        }
        try {
            return handler(req);
        } catch (const std::exception & e) {
            return polykv_make_error(500, "server_error", e.what());
        }
    };
}

static server_http_res_ptr handle_tokens(const server_http_req & req) {
    polykv_seq_id     id;
    polykv_seq_record record;
    if (!polykv_seq_id::parse(req.get_param("seq"), id) || !polykv_get_hub().find(id, record) || !record.ready) {
        return polykv_make_error(410, "stale_seq", "there is no sequence " + req.get_param("seq") + " any more");
    }
    auto res = std::make_unique<server_http_res>();
    res->content_type = "application/octet-stream";
    for (const llama_token token : *record.tokens) {
        polykv_append_i32(res->data, token);
    }
    return res;
}

// how often counters are sent at most; 0: never
static int64_t get_interval_ms(const server_http_req & req) {
    const std::string text = req.get_param("interval_ms");
    if (text.empty() || text.size() > 6 || text.find_first_not_of("0123456789") != std::string::npos) {
        return 100;
    }
    const int64_t val = std::stoll(text);
    return val == 0 ? 0 : std::clamp<int64_t>(val, 10, 60000);
}

static server_http_res_ptr handle_events(const server_http_req & req) {
    auto & hub = polykv_get_hub();

    auto res = std::make_unique<server_http_res>();
    res->content_type = "text/event-stream";

    struct reader_t {
        uint64_t last;
        bool     greeted = false;
        int64_t  t_sent  = ggml_time_ms();

        int64_t              interval_ms;
        int64_t              t_counters = 0; // when to look at the counters again
        polykv_counters_seen seen;
    };
    auto reader = std::make_shared<reader_t>();
    reader->interval_ms = get_interval_ms(req);

    bool resync = false;
    const std::string last_id = polykv_get_header(req, "last-event-id");
    reader->last = hub.resync_event().id; // from now on
    if (!last_id.empty()) {
        // an id is "boot_id:number", numbers of another process mean nothing here
        const size_t colon = last_id.find(':');
        resync = colon == std::string::npos || last_id.substr(0, colon) != hub.boot_id();
        if (!resync) {
            const std::string num = last_id.substr(colon + 1);
            reader->last = num.empty() || num.size() > 19 || num.find_first_not_of("0123456789") != std::string::npos ? UINT64_MAX - 1 : std::stoull(num);
        }
    }

    res->next = [reader, resync, &req](std::string & output) mutable -> bool {
        auto & hub = polykv_get_hub();

        const auto add = [&](const polykv_event & event) {
            output += "id: " + hub.boot_id() + ":" + std::to_string(event.id) + "\nevent: " + event.type + "\ndata: " + event.data + "\n\n";
            reader->last = event.id;
        };

        if (!reader->greeted) {
            reader->greeted = true;
            output = polykv_format_event("hello", {{"boot_id", hub.boot_id()}});
            if (resync) {
                add(hub.resync_event());
            }
            return true;
        }
        if (hub.stopping() || req.should_stop()) {
            return false;
        }

        const int64_t t_wait = reader->interval_ms > 0 ? reader->t_counters - ggml_time_ms() : 1000;

        bool gap = false;
        const auto events = hub.wait_events(reader->last, (int) std::clamp<int64_t>(t_wait, 0, 1000), gap);
        if (gap) {
            add(hub.resync_event());
        }
        for (const auto & event : events) {
            add(event);
        }
        if (reader->interval_ms > 0 && ggml_time_ms() >= reader->t_counters) {
            reader->t_counters = ggml_time_ms() + reader->interval_ms;

            json counters;
            if (hub.read_counters(reader->seen, counters)) {
                output += polykv_format_event("counters", counters);
            }
        }
        if (output.empty() && ggml_time_ms() - reader->t_sent > 5000) {
            output = ":\n\n";
        }
        if (!output.empty()) {
            reader->t_sent = ggml_time_ms();
        }
        return true;
    };
    return res;
}

//
// operations on the main thread
//

server_task polykv_make_op_task(server_response_reader & rd, polykv_op && op) {
    server_task task(SERVER_TASK_TYPE_POLYKV);
    task.id = rd.get_new_id();
    task.op = std::make_shared<const polykv_op>(std::move(op));
    return task;
}

server_task_result_ptr polykv_run_op(server_context & ctx_server, polykv_op && op, const std::function<bool()> & should_stop) {
    auto rd = ctx_server.get_response_reader();
    rd.post_task(polykv_make_op_task(rd, std::move(op)), true);
    rd.queue_tasks.wait_until_no_sleep(); // after the post: an engine that has just fallen asleep would leave it lying
    return rd.next(should_stop);
}

server_http_res_ptr polykv_op_response(server_task_result_ptr && result) {
    if (!result) {
        return polykv_make_error(503, "unavailable_error", "the caller is gone");
    }
    auto * res = dynamic_cast<server_task_result_polykv *>(result.get());
    if (!res) {
        const json error = result->to_json();
        return polykv_make_json({{"error", error}}, error.value("code", 500));
    }
    return res->error.status ? polykv_make_json(res->error.to_json(), res->error.status) : polykv_make_json(res->data);
}

polykv_op polykv_make_free_op(const polykv_seq_id & seq) {
    polykv_op op(polykv_op::FREE_SEQ);
    op.seq = seq;
    return op;
}

static server_http_res_ptr handle_delete_seq(server_context & ctx_server, const server_http_req & req) {
    polykv_op op(polykv_op::FREE_SEQ);
    polykv_seq_record record;
    if (!polykv_seq_id::parse(req.get_param("seq"), op.seq)) {
        return polykv_make_error(400, "invalid_request_error", "a sequence is written seq.gen, for example 5.3");
    }
    if (!polykv_get_hub().find(op.seq, record)) {
        return polykv_make_json({{"freed", false}, {"update", polykv_get_hub().last_update()}});
    }
    return polykv_op_response(polykv_run_op(ctx_server, std::move(op), req.should_stop));
}

static server_http_res_ptr handle_expendable(const server_http_req & req) {
    std::deque<polykv_seq_id> ids;
    try {
        const json data = json::parse(req.body);
        for (const auto & val : data.at("seqs")) {
            ids.emplace_back();
            if (!val.is_string() || !polykv_seq_id::parse(val.get<std::string>(), ids.back())) {
                throw std::invalid_argument("a sequence is written seq.gen, for example \"5.3\"");
            }
        }
    } catch (const std::exception & e) {
        return polykv_make_error(400, "invalid_request_error", e.what());
    }
    return polykv_make_json({{"n", polykv_get_hub().set_expendable(std::move(ids))}});
}

static server_http_res_ptr handle_gpu(const server_http_req & req) {
    double weight = 0.0;
    try {
        weight = json::parse(req.body).at("weight").get<double>();
    } catch (const std::exception & e) {
        return polykv_make_error(400, "invalid_request_error", e.what());
    }
    if (weight != gpu_share_sound_weight(weight)) {
        return polykv_make_error(400, "invalid_request_error", string_format("weight must be a number from %g to %g", GPU_SHARE_MIN_WEIGHT, GPU_SHARE_MAX_WEIGHT));
    }
    if (!gpu_share_get_pacer().set_weight(weight)) {
        return polykv_make_error(501, "gpu_share_off", "GPU share is off: " + gpu_share_get_pacer().to_json().value("why", std::string()));
    }
    return polykv_make_json(gpu_share_get_pacer().to_json());
}

static server_http_res_ptr handle_state() {
    json res = polykv_get_hub().state_json();
    res["gpu_share"] = gpu_share_get_pacer().to_json();
    return polykv_make_json(res);
}

static server_http_res_ptr handle_delete_session(server_context & ctx_server, const server_http_req & req) {
    const std::string text = req.get_param("session");
    if (text.empty() || text.size() > 19 || text.find_first_not_of("0123456789") != std::string::npos || std::stoull(text) == 0) {
        return polykv_make_error(400, "invalid_request_error", "a session is a positive integer");
    }
    polykv_op op(polykv_op::END_SESSION);
    op.session = std::stoull(text);

    auto & hub = polykv_get_hub();
    if (hub.get_phase() == POLYKV_PHASE_SLEEPING) { // it holds no session, and is not woken up to say so
        hub.end_session(op.session);
        return polykv_make_json({{"cancelled", 0}, {"cells_freed", 0}, {"update", hub.last_update()}});
    }
    return polykv_op_response(polykv_run_op(ctx_server, std::move(op), req.should_stop));
}

void polykv_register_routes(const server_http_context & ctx_http, server_context & ctx_server) {
    if (polykv_get_settings().key.empty()) {
        return;
    }

    static const std::string base = "/_polykv/v1";

    ctx_http.get (base + "/hello",            guarded([](const server_http_req &) { return polykv_make_json(polykv_get_hub().hello_json()); }));
    ctx_http.get (base + "/state",            guarded([](const server_http_req &) { return handle_state(); }));
    ctx_http.get (base + "/events",           guarded(handle_events));
    ctx_http.post(base + "/seqs",             guarded([&ctx_server](const server_http_req & req) { return polykv_handle_post_seqs(ctx_server, req); }));
    ctx_http.get (base + "/seqs/:seq/tokens", guarded(handle_tokens));
    ctx_http.post(base + "/expendable",       guarded(handle_expendable));
    ctx_http.post(base + "/gpu",              guarded(handle_gpu));
    ctx_http.post(base + "/seqs/restore",     guarded([&ctx_server](const server_http_req & req) { return polykv_handle_restore(ctx_server, req); }));
    ctx_http.post(base + "/seqs/:seq/save",   guarded([&ctx_server](const server_http_req & req) { return polykv_handle_save(ctx_server, req); }));
    ctx_http.del (base + "/seqs/:seq",        guarded([&ctx_server](const server_http_req & req) { return handle_delete_seq(ctx_server, req); }));
    ctx_http.del (base + "/sessions/:session", guarded([&ctx_server](const server_http_req & req) { return handle_delete_session(ctx_server, req); }));
}
