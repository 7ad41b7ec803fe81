#include "server-polykv-routes.h"

// Sequences to files and back.
// Threads: HTTP threads only.

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
    const auto result = polykv_run_op(ctx_server, std::move(op), req.should_stop);
    const auto * res  = dynamic_cast<server_task_result_polykv *>(result.get());
    if (!res) {
        throw polykv_error { 503, "unavailable_error", "the engine did not answer" };
    }
    if (res->error.status) {
        throw res->error;
    }
}

server_http_res_ptr polykv_handle_save(server_context & ctx_server, const server_http_req & req) {
    polykv_file       file;
    polykv_seq_id     id;
    polykv_seq_record record;
    std::string       path;
    try {
        const json data = json::parse(req.body);
        path = get_path(data);
        if (data.contains("from")) {
            file.from = (int32_t) polykv_read_int(data, "from", 0, INT32_MAX);
        }
    } catch (const std::exception & e) {
        return polykv_make_error(400, "invalid_request_error", e.what());
    }
    if (!polykv_seq_id::parse(req.get_param("seq"), id) || !polykv_get_hub().find(id, record) || !record.ready) {
        return polykv_make_error(410, "stale_seq", "there is no sequence " + req.get_param("seq") + " any more");
    }
    const int32_t n = (int32_t) record.tokens->size();
    const json hello = polykv_get_hub().hello_json();
    const bool whole = hello.value("prefix_sharing", "") != "any" || !hello.at("kv").value("unified", true); // cannot be cut into parts
    if (file.from >= n || (whole && file.from > 0)) {
        return polykv_make_error(400, "invalid_request_error", whole ? "with this model or cache a whole sequence can be saved only: from must be 0" : "from must be below the length of the sequence");
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
        return polykv_make_json(error.to_json(), error.status);
    } catch (const std::exception & e) {
        return polykv_make_error(507, "save_failed", e.what());
    }

    size_t n_bytes = 0;
    for (const auto & part : file.parts) {
        n_bytes += part->tgt.size() + part->dft.size();
    }
    return polykv_make_json({{"n_tokens", n}, {"from", file.from}, {"kv_bytes", n_bytes}});
}

server_http_res_ptr polykv_handle_restore(server_context & ctx_server, const server_http_req & req) {
    polykv_file   file;
    polykv_op     finish(polykv_op::FINISH);
    const bool    empty = polykv_get_hub().hello_json().value("max_pools", 0) == 0;
    if (empty) {
        return polykv_make_error(501, "pools_off", "pools are off in this engine");
    }
    try {
        const json data = json::parse(req.body);
        const std::string path = get_path(data);
        if (data.contains("parent_seq") && (!data.at("parent_seq").is_string() || !polykv_seq_id::parse(data.at("parent_seq").get<std::string>(), finish.parent))) {
            return polykv_make_error(400, "invalid_request_error", "parent_seq is written seq.gen, for example \"5.3\"");
        }
        try {
            file = polykv_read_file(path, get_file_fingerprint());
        } catch (const std::exception & e) {
            return polykv_make_error(409, "file_refused", e.what());
        }
    } catch (const std::exception & e) {
        return polykv_make_error(400, "invalid_request_error", e.what());
    }
    if (file.parts.empty() || (file.from > 0 && finish.parent.empty())) {
        return polykv_make_error(400, "invalid_request_error", string_format("the file holds the tokens from %d on: parent_seq must give those before", file.from));
    }

    auto rd = ctx_server.get_response_reader();
    rd.queue_tasks.wait_until_no_sleep();
    if (!polykv_get_hub().reserve(finish.seq)) {
        return polykv_make_error(429, "no_seq_ids", "all sequence ids for pools are taken");
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
        auto result = polykv_run_op(ctx_server, std::move(finish), req.should_stop);
        auto * res = dynamic_cast<server_task_result_polykv *>(result.get());
        if (!res || res->error.status) {
            polykv_run_op(ctx_server, polykv_make_free_op(seq), [] { return polykv_get_hub().stopping(); });
        }
        return polykv_op_response(std::move(result));
    } catch (const polykv_error & error) {
        polykv_run_op(ctx_server, polykv_make_free_op(finish.seq), [] { return polykv_get_hub().stopping(); });
        return polykv_make_json(error.to_json(), error.status);
    }
}
