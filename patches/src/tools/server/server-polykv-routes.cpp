#include "server-polykv.h"

// The routes of the engine protocol.
// Threads: HTTP threads only. What needs the context is posted to the main thread as a task.

#include "polykv.h"
#include "server-context.h"
#include "server-http.h"
#include "server-polykv-task.h"
#include "server-queue.h"

#include <algorithm>

//
// answers
//

static server_http_res_ptr make_json(const json & data, int status = 200) {
    auto res = std::make_unique<server_http_res>();
    res->status = status;
    res->data   = data.dump_safe();
    return res;
}

static server_http_res_ptr make_error(int status, const std::string & type, const std::string & message) {
    return make_json(polykv_error { status, type, message }.to_json(), status);
}

static std::string format_event(const char * type, const json & data) {
    return std::string("event: ") + type + "\ndata: " + data.dump_safe() + "\n\n";
}

// wraps a handler: without the key the route does not exist
static server_http_context::handler_t guarded(server_http_context::handler_t handler) {
    return [handler = std::move(handler)](const server_http_req & req) -> server_http_res_ptr {
        if (!polykv_authorized(req)) {
            return make_error(404, "not_found_error", "File Not Found");
        }
        try {
            return handler(req);
        } catch (const std::exception & e) {
            return make_error(500, "server_error", e.what());
        }
    };
}

static server_http_res_ptr handle_tokens(const server_http_req & req) {
    polykv_seq_id     id;
    polykv_seq_record record;
    if (!polykv_seq_id::parse(req.get_param("seq"), id) || !polykv_get_hub().find(id, record) || !record.ready) {
        return make_error(410, "stale_seq", "there is no sequence " + req.get_param("seq") + " any more");
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
            output = format_event("hello", {{"boot_id", hub.boot_id()}});
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
                output += format_event("counters", counters);
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

static server_task make_op_task(server_response_reader & rd, polykv_op && op) {
    server_task task(SERVER_TASK_TYPE_POLYKV);
    task.id = rd.get_new_id();
    task.op = std::make_shared<const polykv_op>(std::move(op));
    return task;
}

// runs an operation and waits for it; null if the caller is gone
static server_task_result_ptr run_op(server_context & ctx_server, polykv_op && op, const std::function<bool()> & should_stop) {
    auto rd = ctx_server.get_response_reader();
    rd.post_task(make_op_task(rd, std::move(op)), true);
    rd.queue_tasks.wait_until_no_sleep(); // after the post: an engine that has just fallen asleep would leave it lying
    return rd.next(should_stop);
}

static server_http_res_ptr op_response(server_task_result_ptr && result) {
    if (!result) {
        return make_error(503, "unavailable_error", "the caller is gone");
    }
    auto * res = dynamic_cast<server_task_result_polykv *>(result.get());
    if (!res) {
        const json error = result->to_json();
        return make_json({{"error", error}}, error.value("code", 500));
    }
    return res->error.status ? make_json(res->error.to_json(), res->error.status) : make_json(res->data);
}

static polykv_op make_free_op(const polykv_seq_id & seq) {
    polykv_op op(polykv_op::FREE_SEQ);
    op.seq = seq;
    return op;
}

static server_http_res_ptr handle_delete_seq(server_context & ctx_server, const server_http_req & req) {
    polykv_op op(polykv_op::FREE_SEQ);
    polykv_seq_record record;
    if (!polykv_seq_id::parse(req.get_param("seq"), op.seq)) {
        return make_error(400, "invalid_request_error", "a sequence is written seq.gen, for example 5.3");
    }
    if (!polykv_get_hub().find(op.seq, record)) {
        return make_json({{"freed", false}, {"update", polykv_get_hub().last_update()}});
    }
    return op_response(run_op(ctx_server, std::move(op), req.should_stop));
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
        return make_error(400, "invalid_request_error", e.what());
    }
    return make_json({{"n", polykv_get_hub().set_expendable(std::move(ids))}});
}

static server_http_res_ptr handle_delete_session(server_context & ctx_server, const server_http_req & req) {
    const std::string text = req.get_param("session");
    if (text.empty() || text.size() > 19 || text.find_first_not_of("0123456789") != std::string::npos || std::stoull(text) == 0) {
        return make_error(400, "invalid_request_error", "a session is a positive integer");
    }
    polykv_op op(polykv_op::END_SESSION);
    op.session = std::stoull(text);

    auto & hub = polykv_get_hub();
    if (hub.get_phase() == POLYKV_PHASE_SLEEPING) { // it holds no session, and is not woken up to say so
        hub.end_session(op.session);
        return make_json({{"cancelled", 0}, {"cells_freed", 0}, {"update", hub.last_update()}});
    }
    return op_response(run_op(ctx_server, std::move(op), req.should_stop));
}

//
// POST seqs
//

struct seqs_request {
    llama_tokens  tokens;
    polykv_seq_id parent;
    int32_t       branch_pos = -1;
    uint64_t      session    = 0;
    int32_t       n_tokens   = -1;
    uint64_t      req        = 0;
};

static int64_t read_int(const json & data, const char * key, int64_t min, int64_t max) {
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

static seqs_request parse_seqs_request(const std::string & body, int32_t n_vocab) {
    const json data = json::parse(body);
    if (!data.is_object()) {
        throw std::invalid_argument("the body must be a JSON object");
    }

    seqs_request res;
    if (data.contains("req")) {
        res.req = read_int(data, "req", 0, INT64_MAX);
    }
    if (data.contains("session") == data.contains("tokens")) {
        throw std::invalid_argument("give either tokens or session");
    }
    if (data.contains("session")) {
        res.session = read_int(data, "session", 1, INT64_MAX);
        if (data.contains("n_tokens")) {
            res.n_tokens = (int32_t) read_int(data, "n_tokens", 1, INT32_MAX);
        }
        return res;
    }

    const json & tokens = data.at("tokens");
    if (!tokens.is_array() || tokens.empty()) {
        throw std::invalid_argument("tokens must be an array of at least one integer");
    }
    res.tokens.reserve(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
        const json & token = tokens.at(i);
        const int64_t id = token.is_number_integer() ? token.get<int64_t>() : -1;
        if (id < 0 || id >= n_vocab) {
            throw std::invalid_argument(string_format("tokens[%zu] is not a token of this model (0..%d)", i, n_vocab - 1));
        }
        res.tokens.push_back((llama_token) id);
    }
    if (data.contains("parent_seq")) {
        if (!data.at("parent_seq").is_string() || !polykv_seq_id::parse(data.at("parent_seq").get<std::string>(), res.parent)) {
            throw std::invalid_argument("parent_seq is written seq.gen, for example \"5.3\"");
        }
        res.branch_pos = data.contains("branch_pos") ? (int32_t) read_int(data, "branch_pos", 0, (int64_t) res.tokens.size()) : (int32_t) res.tokens.size();
    }
    return res;
}

static json error_event(int status, const std::string & type, const std::string & message) {
    return json {{"status", status}, {"type", type}, {"message", message}, {"param", nullptr}};
}

// one running POST seqs; what its caller did not take delivery of is freed again
struct seqs_stream {
    server_response_reader rd;
    polykv_seq_id          seq;
    bool                   delivered = false;
    int                    step      = 0;

    explicit seqs_stream(server_context & ctx_server) : rd(ctx_server.get_response_reader()) {}

    ~seqs_stream() {
        if (!delivered && !seq.empty()) {
            rd.queue_tasks.post(make_op_task(rd, make_free_op(seq)), true); // nobody waits for the result
        }
    }

    // one event for one result; false when it was the last one
    bool format(server_task_result & result, std::string & output) {
        if (result.is_error()) {
            const json error = result.to_json();
            std::string type = error.value("type", "server_error");
            const bool too_long = type == "exceed_context_size_error";
            output = format_event("error", error_event(too_long ? 422 : error.value("code", 500), too_long ? "too_long" : type, error.value("message", "")));
            return false;
        }
        if (auto * partial = dynamic_cast<server_task_result_cmpl_partial *>(&result)) {
            output = format_event("progress", {
                {"total",     partial->progress.total},
                {"cached",    partial->progress.cache},
                {"processed", partial->progress.processed},
                {"t_ms",      partial->progress.time_ms},
            });
            return true;
        }
        auto & done = dynamic_cast<server_task_result_polykv &>(result);
        if (done.error.status) {
            output = format_event("error", error_event(done.error.status, done.error.type, done.error.message));
            return false;
        }
        delivered = true;
        output = format_event("done", done.data);
        return false;
    }
};

static server_http_res_ptr handle_post_seqs(server_context & ctx_server, const server_http_req & req) {
    auto & hub = polykv_get_hub();

    const json hello = hub.hello_json();
    if (hello.value("max_pools", 0) == 0) {
        return make_error(501, "pools_off", "pools are off in this engine: " + hello.value("prefix_sharing_why", "--polykv-max-pools is 0"));
    }
    if (hello.value("prefix_sharing", "none") == "none") {
        return make_error(501, "memory_class", "this model cannot share prefixes: " + hello.value("prefix_sharing_why", ""));
    }

    seqs_request body;
    try {
        body = parse_seqs_request(req.body, hello.at("model").value("n_vocab", 0));
    } catch (const std::exception & e) {
        return make_error(400, "invalid_request_error", e.what());
    }
    const int32_t n_ctx_slot = hello.value("n_ctx_slot", 0);
    if ((int32_t) body.tokens.size() >= n_ctx_slot) {
        return make_error(422, "too_long", string_format("%zu tokens do not fit: a slot has a context of %d, one token less can be a prefix", body.tokens.size(), n_ctx_slot));
    }
    polykv_seq_record parent;
    if (!body.parent.empty() && (!hub.find(body.parent, parent) || !parent.ready)) {
        return make_error(410, "stale_seq", "there is no parent sequence " + body.parent.str() + " any more");
    }

    auto stream = std::make_shared<seqs_stream>(ctx_server);
    stream->rd.queue_tasks.wait_until_no_sleep();

    if (!hub.reserve(stream->seq)) {
        return make_error(429, "no_seq_ids", string_format("all %d sequence ids for pools are taken; release a pool or start with a larger --polykv-max-pools", hello.value("max_pools", 0)));
    }

    if (body.session) {
        polykv_op op(polykv_op::SNAPSHOT);
        op.seq      = stream->seq;
        op.session  = body.session;
        op.n_tokens = body.n_tokens;
        stream->rd.post_task(make_op_task(stream->rd, std::move(op)), true);
    } else {
        server_task task(SERVER_TASK_TYPE_COMPLETION);
        task.id     = stream->rd.get_new_id();
        task.tokens = server_tokens(body.tokens, hello.at("model").value("multimodal", false));

        task.params.stream          = true;
        task.params.return_progress = true;
        task.params.cache_prompt    = false; // from its parent or from nothing: never from what a slot happens to hold

        task.params.polykv.t_post       = ggml_time_us();
        task.params.polykv.named        = true;
        task.params.polykv.req          = body.req;
        task.params.polykv.prefill_only = true;
        task.params.polykv.dst          = stream->seq;
        task.params.polykv.seq          = body.parent;
        task.params.polykv.n_shared     = body.branch_pos;

        hub.pending_add(task.id, body.req, 0, 0);
        stream->rd.post_task(std::move(task));
    }
    stream->rd.queue_tasks.wait_until_no_sleep(); // as in run_op()

    // errors that are known at once are plain HTTP
    server_task_result_ptr first;
    if (body.session) {
        first = stream->rd.next(req.should_stop);
        auto * res = dynamic_cast<server_task_result_polykv *>(first.get());
        if (!res || res->error.status) {
            return op_response(std::move(first));
        }
    }

    auto res = std::make_unique<server_http_res>();
    res->content_type = "text/event-stream";
    res->next = [stream, &req, first = std::shared_ptr<server_task_result>(std::move(first))](std::string & output) -> bool {
        if (stream->step++ == 0) {
            output = format_event("queued", {{"seq", stream->seq.str()}});
            return true;
        }
        if (first) {
            return stream->format(*first, output);
        }
        const auto result = stream->rd.next([&] { return req.should_stop() || polykv_get_hub().stopping(); });
        return result && stream->format(*result, output);
    };
    return res;
}

//
// save and restore
//

static constexpr int32_t POLYKV_PART_TOKENS = 2048; // the main thread copies so many at a time, decoding goes on between

// what a saved state depends on
static std::string get_file_fingerprint() {
    const json hello = polykv_get_hub().hello_json();
    return hello.at("model").value("fingerprint", "") + "/" + hello.value("kv_identity", "");
}

static std::string get_path(const json & data) {
    if (!data.is_object() || !data.contains("path") || !data.at("path").is_string() || data.at("path").get<std::string>().substr(0, 1) != "/") {
        throw std::invalid_argument("path must be an absolute path");
    }
    return data.at("path").get<std::string>();
}

// runs an operation; throws polykv_error
static void must_run(server_context & ctx_server, polykv_op && op, const server_http_req & req) {
    const auto result = run_op(ctx_server, std::move(op), req.should_stop);
    const auto * res  = dynamic_cast<server_task_result_polykv *>(result.get());
    if (!res) {
        throw polykv_error { 503, "unavailable_error", "the engine did not answer" };
    }
    if (res->error.status) {
        throw res->error;
    }
}

static server_http_res_ptr handle_save(server_context & ctx_server, const server_http_req & req) {
    polykv_file       file;
    polykv_seq_id     id;
    polykv_seq_record record;
    std::string       path;
    try {
        const json data = json::parse(req.body);
        path = get_path(data);
        if (data.contains("from")) {
            file.from = (int32_t) read_int(data, "from", 0, INT32_MAX);
        }
    } catch (const std::exception & e) {
        return make_error(400, "invalid_request_error", e.what());
    }
    if (!polykv_seq_id::parse(req.get_param("seq"), id) || !polykv_get_hub().find(id, record) || !record.ready) {
        return make_error(410, "stale_seq", "there is no sequence " + req.get_param("seq") + " any more");
    }
    const int32_t n = (int32_t) record.tokens->size();
    const json hello = polykv_get_hub().hello_json();
    const bool whole = hello.value("prefix_sharing", "") != "any" || !hello.at("kv").value("unified", true); // cannot be cut into parts
    if (file.from >= n || (whole && file.from > 0)) {
        return make_error(400, "invalid_request_error", whole ? "with this model or cache a whole sequence can be saved only: from must be 0" : "from must be below the length of the sequence");
    }

    try {
        for (int32_t at = file.from; at < n; at = file.parts.back()->to) {
            polykv_op op(polykv_op::READ_PART);
            op.seq  = id;
            op.part = std::make_shared<polykv_part>();
            op.part->from = at;
            op.part->to   = whole ? n : std::min(n, at + POLYKV_PART_TOKENS);
            file.parts.push_back(op.part);
            must_run(ctx_server, std::move(op), req);
        }
        file.fingerprint = get_file_fingerprint();
        file.tokens      = *record.tokens;
        file.checkpoints = record.checkpoints;
        polykv_write_file(path, file);
    } catch (const polykv_error & error) {
        return make_json(error.to_json(), error.status);
    } catch (const std::exception & e) {
        return make_error(507, "save_failed", e.what());
    }

    size_t n_bytes = 0;
    for (const auto & part : file.parts) {
        n_bytes += part->tgt.size() + part->dft.size();
    }
    return make_json({{"n_tokens", n}, {"from", file.from}, {"kv_bytes", n_bytes}});
}

static server_http_res_ptr handle_restore(server_context & ctx_server, const server_http_req & req) {
    polykv_file   file;
    polykv_op     finish(polykv_op::FINISH);
    const bool    empty = polykv_get_hub().hello_json().value("max_pools", 0) == 0;
    if (empty) {
        return make_error(501, "pools_off", "pools are off in this engine");
    }
    try {
        const json data = json::parse(req.body);
        const std::string path = get_path(data);
        if (data.contains("parent_seq") && (!data.at("parent_seq").is_string() || !polykv_seq_id::parse(data.at("parent_seq").get<std::string>(), finish.parent))) {
            return make_error(400, "invalid_request_error", "parent_seq is written seq.gen, for example \"5.3\"");
        }
        try {
            file = polykv_read_file(path, get_file_fingerprint());
        } catch (const std::exception & e) {
            return make_error(409, "file_refused", e.what());
        }
    } catch (const std::exception & e) {
        return make_error(400, "invalid_request_error", e.what());
    }
    if (file.parts.empty() || (file.from > 0 && finish.parent.empty())) {
        return make_error(400, "invalid_request_error", string_format("the file holds the tokens from %d on: parent_seq must give those before", file.from));
    }

    auto rd = ctx_server.get_response_reader();
    rd.queue_tasks.wait_until_no_sleep();
    if (!polykv_get_hub().reserve(finish.seq)) {
        return make_error(429, "no_seq_ids", "all sequence ids for pools are taken");
    }
    try {
        for (const auto & part : file.parts) {
            polykv_op op(polykv_op::WRITE_PART);
            op.seq  = finish.seq;
            op.part = part;
            must_run(ctx_server, std::move(op), req);
        }
        finish.from               = file.from;
        finish.record.tokens      = std::make_shared<const llama_tokens>(std::move(file.tokens));
        finish.record.checkpoints = std::move(file.checkpoints);
        const polykv_seq_id seq = finish.seq;
        auto result = run_op(ctx_server, std::move(finish), req.should_stop);
        auto * res = dynamic_cast<server_task_result_polykv *>(result.get());
        if (!res || res->error.status) {
            run_op(ctx_server, make_free_op(seq), [] { return polykv_get_hub().stopping(); });
        }
        return op_response(std::move(result));
    } catch (const polykv_error & error) {
        run_op(ctx_server, make_free_op(finish.seq), [] { return polykv_get_hub().stopping(); });
        return make_json(error.to_json(), error.status);
    }
}

void polykv_register_routes(const server_http_context & ctx_http, server_context & ctx_server) {
    if (polykv_get_settings().key.empty()) {
        return;
    }

    static const std::string base = "/_polykv/v1";

    ctx_http.get (base + "/hello",            guarded([](const server_http_req &) { return make_json(polykv_get_hub().hello_json()); }));
    ctx_http.get (base + "/state",            guarded([](const server_http_req &) { return make_json(polykv_get_hub().state_json()); }));
    ctx_http.get (base + "/events",           guarded(handle_events));
    ctx_http.post(base + "/seqs",             guarded([&ctx_server](const server_http_req & req) { return handle_post_seqs(ctx_server, req); }));
    ctx_http.get (base + "/seqs/:seq/tokens", guarded(handle_tokens));
    ctx_http.post(base + "/expendable",       guarded(handle_expendable));
    ctx_http.post(base + "/seqs/restore",     guarded([&ctx_server](const server_http_req & req) { return handle_restore(ctx_server, req); }));
    ctx_http.post(base + "/seqs/:seq/save",   guarded([&ctx_server](const server_http_req & req) { return handle_save(ctx_server, req); }));
    ctx_http.del (base + "/seqs/:seq",        guarded([&ctx_server](const server_http_req & req) { return handle_delete_seq(ctx_server, req); }));
    ctx_http.del (base + "/sessions/:session", guarded([&ctx_server](const server_http_req & req) { return handle_delete_session(ctx_server, req); }));
}
