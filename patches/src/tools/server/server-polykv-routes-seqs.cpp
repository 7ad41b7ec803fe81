#include "server-polykv-routes.h"

// POST seqs: sequences from tokens, from a parent, or from a session.
// Threads: HTTP threads only.

struct seqs_request {
    llama_tokens  tokens;
    polykv_seq_id parent;
    int32_t       branch_pos = -1;
    uint64_t      session    = 0;
    int32_t       n_tokens   = -1;
    uint64_t      req        = 0;
};

static seqs_request parse_seqs_request(const std::string & body, int32_t n_vocab) {
    const json data = json::parse(body);
    if (!data.is_object()) {
        throw std::invalid_argument("the body must be a JSON object");
    }

    seqs_request res;
    if (data.contains("req")) {
        res.req = polykv_read_int(data, "req", 0, INT64_MAX);
    }
    if (data.contains("session") == data.contains("tokens")) {
        throw std::invalid_argument("give either tokens or session");
    }
    if (data.contains("session")) {
        res.session = polykv_read_int(data, "session", 1, INT64_MAX);
        if (data.contains("n_tokens")) {
            res.n_tokens = (int32_t) polykv_read_int(data, "n_tokens", 1, INT32_MAX);
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
        res.branch_pos = data.contains("branch_pos") ? (int32_t) polykv_read_int(data, "branch_pos", 0, (int64_t) res.tokens.size()) : (int32_t) res.tokens.size();
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
            rd.queue_tasks.post(polykv_make_op_task(rd, polykv_make_free_op(seq)), true); // nobody waits for the result
        }
    }

    // it holds no cells; its caller may ask again as soon as it hears of this
    void give_back() {
        polykv_get_hub().release(seq);
        seq = {};
    }

    // one event for one result; false when it was the last one
    bool format(server_task_result & result, std::string & output) {
        if (result.is_error()) {
            give_back();
            const json error = result.to_json();
            std::string type = error.value("type", "server_error");
            const bool too_long = type == "exceed_context_size_error";
            output = polykv_format_event("error", error_event(too_long ? 422 : error.value("code", 500), too_long ? "too_long" : type, error.value("message", "")));
            return false;
        }
        if (auto * partial = dynamic_cast<server_task_result_cmpl_partial *>(&result)) {
            output = polykv_format_event("progress", {
                {"total",     partial->progress.total},
                {"cached",    partial->progress.cache},
                {"processed", partial->progress.processed},
                {"t_ms",      partial->progress.time_ms},
            });
            return true;
        }
        auto & done = dynamic_cast<server_task_result_polykv &>(result);
        if (done.error.status) {
            give_back();
            output = polykv_format_event("error", error_event(done.error.status, done.error.type, done.error.message));
            return false;
        }
        delivered = true;
        output = polykv_format_event("done", done.data);
        return false;
    }
};

server_http_res_ptr polykv_handle_post_seqs(server_context & ctx_server, const server_http_req & req) {
    auto & hub = polykv_get_hub();

    const json hello = hub.hello_json();
    if (hello.value("max_pools", 0) == 0) {
        return polykv_make_error(501, "pools_off", "pools are off in this engine: " + hello.value("prefix_sharing_why", "--polykv-max-pools is 0"));
    }
    if (hello.value("prefix_sharing", "none") == "none") {
        return polykv_make_error(501, "memory_class", "this model cannot share prefixes: " + hello.value("prefix_sharing_why", ""));
    }

    seqs_request body;
    try {
        body = parse_seqs_request(req.body, hello.at("model").value("n_vocab", 0));
    } catch (const std::exception & e) {
        return polykv_make_error(400, "invalid_request_error", e.what());
    }
    const int32_t n_ctx_slot = hello.value("n_ctx_slot", 0);
    if ((int32_t) body.tokens.size() >= n_ctx_slot) {
        return polykv_make_error(422, "too_long", string_format("%zu tokens do not fit: a slot has a context of %d, one token less can be a prefix", body.tokens.size(), n_ctx_slot));
    }
    polykv_seq_record parent;
    if (!body.parent.empty() && (!hub.find(body.parent, parent) || !parent.ready)) {
        return polykv_make_error(410, "stale_seq", "there is no parent sequence " + body.parent.str() + " any more");
    }

    auto stream = std::make_shared<seqs_stream>(ctx_server);
    stream->rd.queue_tasks.wait_until_no_sleep();

    if (!hub.reserve(stream->seq)) {
        return polykv_make_error(429, "no_seq_ids", string_format("all %d sequence ids for pools are taken; release a pool or start with a larger --polykv-max-pools", hello.value("max_pools", 0)));
    }

    if (body.session) {
        polykv_op op(polykv_op::SNAPSHOT);
        op.seq      = stream->seq;
        op.session  = body.session;
        op.n_tokens = body.n_tokens;
        stream->rd.post_task(polykv_make_op_task(stream->rd, std::move(op)), true);
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
    stream->rd.queue_tasks.wait_until_no_sleep(); // as in polykv_run_op()

    // errors that are known at once are plain HTTP
    server_task_result_ptr first;
    if (body.session) {
        first = stream->rd.next(req.should_stop);
        auto * res = dynamic_cast<server_task_result_polykv *>(first.get());
        if (!res || res->error.status) {
            if (res) {
                stream->give_back();
            }
            return polykv_op_response(std::move(first));
        }
    }

    auto res = std::make_unique<server_http_res>();
    res->content_type = "text/event-stream";
    res->next = [stream, &req, first = std::shared_ptr<server_task_result>(std::move(first))](std::string & output) -> bool {
        if (stream->step++ == 0) {
            output = polykv_format_event("queued", {{"seq", stream->seq.str()}});
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
