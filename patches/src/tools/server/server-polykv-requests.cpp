#include "server-polykv.h"

// The hooks in the completion handlers: attach headers in, facts out.
// Threads: HTTP threads only.

#include "polykv.h"
#include "server-context.h"
#include "server-http.h"
#include "server-polykv-task.h"
#include "server-queue.h"

#include <cctype>
#include <cstring>

static constexpr size_t POLYKV_ECHO_MAX = 4096;

//
// headers
//

// header names arrive in the case of the sender
std::string polykv_get_header(const server_http_req & req, const char * name) {
    for (const auto & [key, val] : req.headers) {
        if (key.size() == std::strlen(name) && std::equal(key.begin(), key.end(), name, [](char a, char b) {
                return std::tolower((unsigned char) a) == b;
            })) {
            return val;
        }
    }
    return "";
}

static uint64_t get_header_u64(const server_http_req & req, const char * name) {
    const std::string val = polykv_get_header(req, name);
    if (val.empty() || val.size() > 19 || val.find_first_not_of("0123456789") != std::string::npos) {
        return 0;
    }
    return std::stoull(val);
}

bool polykv_authorized(const server_http_req & req) {
    const std::string & want = polykv_get_settings().key;
    if (want.empty()) {
        return false;
    }

    const std::string have = polykv_get_header(req, "x-polykv-key");

    // the time taken does not depend on how much of the key is right
    unsigned char diff = have.size() != want.size();
    for (size_t i = 0; i < want.size(); ++i) {
        diff |= (unsigned char) (want[i] ^ (i < have.size() ? have[i] : 0));
    }
    return diff == 0;
}

void polykv_bind(const server_http_req & req, server_task & task, size_t index) {
    auto & params = task.params.polykv;

    params.t_post = ggml_time_us();

    if (!polykv_authorized(req)) {
        return;
    }

    params.req     = get_header_u64(req, "x-polykv-req");
    params.named   = params.req != 0;
    params.session = index == 0 ? get_header_u64(req, "x-polykv-session") : 0;

    if (polykv_seq_id::parse(polykv_get_header(req, "x-polykv-seq"), params.seq)) {
        params.n_shared = (int32_t) std::min<uint64_t>(get_header_u64(req, "x-polykv-shared"), INT32_MAX);
    }

    const std::string echo = polykv_get_header(req, "x-polykv-echo");
    if (!echo.empty()) {
        json obj = echo.size() <= POLYKV_ECHO_MAX ? json::parse_no_throw(echo) : json();
        if (obj.is_object()) {
            params.echo = std::make_shared<const json>(std::move(obj));
        } else {
            SRV_WRN("x-polykv-echo dropped: %zu bytes, not a JSON object of at most %zu bytes\n", echo.size(), POLYKV_ECHO_MAX);
        }
    }
}

void polykv_append_i32(std::string & out, int32_t val) {
    for (int i = 0; i < 4; ++i) {
        out.push_back((char) (((uint32_t) val >> (8*i)) & 0xff));
    }
}

bool polykv_before_post(const server_http_req & req, const std::vector<server_task> & tasks, server_http_res & res) {
    if (!polykv_authorized(req)) {
        return false;
    }

    if (polykv_get_header(req, "x-polykv-dry") == "tokens") {
        std::string counts;
        res.data.clear();
        for (const auto & task : tasks) {
            polykv_append_i32(res.data, task.n_tokens());
            for (int32_t i = 0; i < task.n_tokens(); ++i) {
                polykv_append_i32(res.data, task.tokens[i]);
            }
            counts += (counts.empty() ? "" : ",") + std::to_string(task.n_tokens());
        }
        res.status       = 200;
        res.content_type = "application/octet-stream";
        res.headers["x-polykv-counts"] = counts;
        return true;
    }

    size_t index = 0; // as server_response_reader::post_tasks() counts
    const auto add = [&](const server_task & task) {
        polykv_get_hub().pending_add(task.id, task.params.polykv.req, task.params.polykv.session, index++);
    };
    for (const auto & task : tasks) {
        add(task);
        for (const auto & child : task.child_tasks) {
            add(child);
        }
    }
    return false;
}

void polykv_set_headers(server_http_res & res, const server_task_result & result) {
    const auto & facts = result.polykv;
    if (!facts) {
        return;
    }
    res.headers["x-polykv-slot"]   = std::to_string(facts->slot);
    res.headers["x-polykv-cached"] = std::to_string(facts->n_cached);
    res.headers["x-polykv-shared"] = std::to_string(facts->n_shared);
    if (facts->miss) {
        res.headers["x-polykv-miss"] = facts->miss;
    }
}

// where the object goes depends on the shape of the API: see the protocol page
static void add_opencoti(json & dst, json && obj) {
    if (dst.is_array()) {
        if (dst.empty()) {
            return;
        }
        if (!dst.back().contains("event")) {
            dst.back()["opencoti"] = std::move(obj); // chunks of a stream: the last one
            return;
        }
        for (auto & item : dst) { // named events: the one that carries the usage
            const std::string name = item.value("event", "");
            if (name == "response.completed" || name == "message_delta") {
                item["data"]["opencoti"] = std::move(obj);
                return;
            }
        }
    } else if (dst.is_object()) {
        dst["opencoti"] = std::move(obj);
    }
}

json polykv_to_json(server_task_result & result) {
    json res = result.to_json();

    const auto & facts = result.polykv;
    if (!facts || !result.is_stop() || result.is_error()) {
        return res;
    }

    json obj = facts->echo ? *facts->echo : json::object();
    obj["session_tps"]          = facts->tps < 0 ? json(nullptr) : json(facts->tps);
    obj["cached_prefix_tokens"] = facts->n_shared;
    obj["ctx_headroom_tokens"]  = facts->n_ctx_left < 0 ? json(nullptr) : json(facts->n_ctx_left);
    if (facts->has_seq || !obj.contains("miss")) {
        obj["miss"] = facts->miss ? json(facts->miss) : json(nullptr); // where nothing was named the caller knows why
    }

    add_opencoti(res, std::move(obj));
    return res;
}
