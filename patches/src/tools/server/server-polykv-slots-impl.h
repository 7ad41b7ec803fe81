// What the slots do for pools: definitions of the members that server-polykv-slots.inc declares, included below the class.
// Law: main thread only, between decodes. Policy and protocol live in server-polykv*.cpp; with pools off and no key every hook returns at once.

static bool polykv_pools()  { return polykv_get_settings().on(); }
static bool polykv_events() { return !polykv_get_settings().key.empty(); }

static int polykv_n_common(const llama_tokens & a, const server_tokens & b) {
    const size_t n = std::min(a.size(), b.size());
    size_t i = 0;
    while (i < n && a[i] == b[i]) {
        i++;
    }
    return (int) i;
}

static int64_t polykv_now_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// --- boot and sleep ----------------------------------------------------------------------------------------------

void server_context_impl::polykv_boot() {
    const auto & settings = polykv_get_settings();

    polykv_slots.assign(slots.size(), {});
    polykv_no_draft = false;
    polykv_memory   = llama_polykv_get_info(ctx_tgt, settings.max_pools);

    for (int i = 0; i < settings.max_pools; ++i) {
        llama_set_sampler(ctx_tgt, params_base.n_parallel + i, nullptr); // backend sampling gave every id one
    }
    if (polykv_memory.price_bytes > 0) {
        SRV_INF("polykv: %d pool ids cost %.1f MiB on this model\n", settings.max_pools, polykv_memory.price_bytes / 1024.0 / 1024.0);
    }
    if (polykv_pools() || polykv_events()) {
        json hello = polykv_hello(model_tgt, params_base.model.path, model_name, polykv_memory);
        hello["n_slots"]                  = (int) slots.size();
        hello["n_ctx"]                    = (int) llama_n_ctx(ctx_tgt);
        hello["n_ctx_slot"]               = n_ctx_slot();
        hello["n_seq_max"]                = (int) llama_n_seq_max(ctx_tgt);
        hello["context_shift"]            = params_base.ctx_shift;
        hello["cache_reuse"]              = params_base.n_cache_reuse;
        hello["speculative"]              = spec != nullptr;
        hello["kv"]["unified"]            = params_base.kv_unified;
        hello["model"]["multimodal"]      = mctx != nullptr;
        polykv_get_hub().boot(params_base.n_parallel, settings.max_pools, std::move(hello));
        polykv_publish();
    }
}

// the context of one slot stays what a split cache would give
int server_context_impl::polykv_n_ctx_slot(int n_ctx_seq) const {
    const int cap = polykv_get_settings().n_ctx_slot_cap;
    return cap == 0 ? n_ctx_seq : std::min(n_ctx_seq, cap > 0 ? cap : (int) GGML_PAD(n_ctx_seq / params_base.n_parallel, 256));
}

// --- state and events ----------------------------------------------------------------------------------------------

polykv_slot_totals server_context_impl::polykv_get_totals(const server_slot & slot) const {
    auto res = polykv_slots[slot.id].totals;
    res.n_decoded += slot.stats.n_gen;
    res.us_decode += slot.stats.t_gen_us();
    res.n_prompt  += slot.stats.n_prompt_processed;
    res.n_cached  += slot.stats.n_prompt_cached;
    if (slot.stats.t_gen_last > 0) {
        res.t_last_token_us = polykv_now_us() - (ggml_time_us() - slot.stats.t_gen_last);
    }
    return res;
}

uint64_t server_context_impl::polykv_publish() {
    if (!polykv_events()) {
        return 0;
    }
    polykv_state res;
    res.n_cells      = polykv_memory.n_cells;
    res.n_cells_used = llama_polykv_n_used(ctx_tgt);
    for (const auto & slot : slots) {
        if (slot.is_processing() && slot.stats.n_gen > 0 && !polykv_slots[slot.id].first_token) {
            polykv_slots[slot.id].first_token = true;
            polykv_emit("first_token", slot, nullptr);
        }

        auto & dst = res.slots.emplace_back();
        dst.slot     = slot.id;
        dst.state    = slot.state == SLOT_STATE_IDLE ? "idle" : slot.state == SLOT_STATE_GENERATING ? "generating" : slot.state == SLOT_STATE_WAIT_OTHER ? "waiting" : "prefill";
        dst.req      = slot.task ? slot.task->params.polykv.req : 0;
        dst.session  = polykv_slots[slot.id].session;
        dst.task     = slot.task ? slot.task->id : -1;
        dst.seq      = slot.prompt.share.seq;
        dst.n_shared = slot.prompt.share.n;
        dst.n_tokens = slot.prompt.n_tokens();
        dst.n_ctx    = slot.n_ctx;
        dst.totals   = polykv_get_totals(slot);
    }
    return polykv_get_hub().publish(std::move(res));
}

void server_context_impl::polykv_emit(const char * type, const server_slot & slot, const char * reason) const {
    const auto & params = slot.task->params.polykv;
    const auto & share  = slot.prompt.share;
    const auto & facts  = polykv_slots[slot.id].facts;
    polykv_get_hub().emit(type, {
        {"type",      type},
        {"t_us",      polykv_now_us()},
        {"req",       params.req},
        {"index",     slot.task->index},
        {"task",      slot.task->id},
        {"slot",      slot.id},
        {"session",   params.session},
        {"seq",       share.n > 0 && !share.seq.empty() ? json(share.seq.str()) : json(nullptr)},
        {"n_prompt",  slot.task->n_tokens()},
        {"n_cached",  slot.stats.n_prompt_cached},
        {"n_shared",  facts ? facts->n_shared : 0},
        {"miss",      facts && facts->miss ? json(facts->miss) : json(nullptr)},
        {"n_decoded", slot.stats.n_gen},
        {"reason",    reason ? json(reason) : json(nullptr)},
    });
}

void server_context_impl::polykv_on_launch(server_slot & slot) {
    auto & info = polykv_slots[slot.id];

    if (slot.prompt.n_tokens() > 0 && !are_lora_equal(info.lora, slot.lora)) {
        // stock keeps what was computed under the former default adapters
        if (polykv_pools() && lora_should_clear_cache(info.lora, slot.lora)) {
            slot.prompt_clear();
        }
        slot.prompt.share.dirty = slot.prompt.n_tokens() > 0;
    }
    info.lora        = slot.lora;
    info.session     = slot.task->is_child() ? 0 : slot.task->params.polykv.session; // a child leaves no cells behind
    info.first_token = info.failed = info.filled = info.window_ok = false;
    info.facts.reset();
    info.checkpoints.clear();
    info.spacing = {};
    if (slot.task->params.polykv.prefill_only && polykv_memory.kind != LLAMA_POLYKV_CLASS_ANY) {
        info.spacing = { slot.task->n_tokens(), polykv_memory.bytes_per_row + (uint64_t) polykv_memory.bytes_per_cell_swa * llama_model_n_swa(model_tgt) };
    }
    info.totals.n_launched++;

    if (polykv_events()) {
        polykv_get_hub().pending_take(slot.task->id);
        polykv_emit("launched", slot, nullptr);
    }
}

void server_context_impl::polykv_on_error(int id_task) {
    if (!polykv_events()) {
        return;
    }
    polykv_get_hub().pending_drop(id_task);
    for (const auto & slot : slots) {
        if (slot.task && slot.task->id == id_task) {
            polykv_slots[slot.id].failed = true;
        }
    }
}

void server_context_impl::polykv_on_release(const server_slot & slot) {
    auto & info = polykv_slots[slot.id];

    if (polykv_events()) {
        const bool done = slot.stop != STOP_TYPE_NONE || info.filled;
        const char * reason = info.failed ? "error" : !done ? "cancelled" : slot.stop != STOP_TYPE_LIMIT ? "stop" : slot.truncated ? "truncated" : "limit";
        if (slot.stats.n_gen > 0 && !info.first_token) {
            polykv_emit("first_token", slot, nullptr);
        }
        if (done && !info.failed) {
            polykv_emit("finished", slot, reason);
        }
        polykv_emit("released", slot, reason);
    }

    info.totals = polykv_get_totals(slot);

    if (slot.task->params.polykv.prefill_only && !info.filled) {
        slots[slot.id].prompt_clear(); // a cancelled materialisation leaves nothing behind
    }
}

// --- choice of slots -------------------------------------------------------------------------------------------------

bool server_context_impl::polykv_kept(const server_slot & slot) const {
    return polykv_slots[slot.id].session != 0 || slot.prompt.share.n > 0;
}

// for the choice of the least recently used slot: kept ones come last
int64_t server_context_impl::polykv_t_last_used(const server_slot & slot) const {
    return polykv_kept(slot) ? slot.t_last_used/2 + INT64_MAX/2 : slot.t_last_used;
}

// a task that must not run; the error is sent
bool server_context_impl::polykv_refuse(const server_task & task) {
    const auto & params = task.params.polykv;
    polykv_seq_record record;
    if (params.session && polykv_get_hub().session_ended(params.session)) {
        send_error(task, "the session of this request was ended", ERROR_TYPE_INVALID_REQUEST);
        return true;
    }
    if (params.prefill_only && !polykv_get_hub().find(params.dst, record)) {
        send_error(task, "the materialisation was cancelled", ERROR_TYPE_INVALID_REQUEST);
        return true;
    }
    return false;
}

// null: the stock choice decides
server_slot * server_context_impl::polykv_get_slot(const server_task & task) {
    const auto & params = task.params.polykv;
    if (!params.named || task.id_slot != -1 || (!params.session && params.seq.empty() && !params.prefill_only)) {
        return nullptr;
    }

    polykv_seq_record record;
    polykv_get_hub().find(params.seq, record);
    const int n_pool = record.ready ? polykv_n_common(*record.tokens, task.tokens) : 0;

    // the smaller the better: own session, own tokens beyond the pool, empty, without session, least recently used
    const auto rank = [&](const server_slot & slot) {
        const uint64_t session = polykv_slots[slot.id].session;
        const int64_t  t_last  = slot.t_last_used;
        const int      n_own   = params.prefill_only || session ? 0 : (int) slot.prompt.tokens.get_common_prefix(task.tokens);

        if (session && session == params.session) {
            return std::make_tuple(0, -t_last);
        }
        if (n_own > n_pool) {
            return std::make_tuple(1, (int64_t) -n_own);
        }
        return std::make_tuple(slot.prompt.n_tokens() == 0 ? 2 : session ? 4 : 3, t_last);
    };

    server_slot * res = nullptr;
    for (auto & slot : slots) {
        if (!slot.is_processing() && (!res || rank(slot) < rank(*res))) {
            res = &slot;
        }
    }
    if (res && std::get<0>(rank(*res)) >= 3 && prompt_cache && res->prompt_save(*prompt_cache)) {
        prompt_cache->update(); // what another conversation left here can still be loaded by it
    }
    return res;
}

// like try_clear_idle_slots(): sessions last, then the least recently used; a slot with only shared cells frees nothing
bool server_context_impl::polykv_clear_idle_slot() {
    server_slot * res = nullptr;
    for (auto & slot : slots) {
        if (slot.is_processing() || slot.prompt.n_tokens() <= slot.prompt.share.n) {
            continue;
        }
        if (!res || polykv_t_last_used(slot) < polykv_t_last_used(*res)) {
            res = &slot;
        }
    }
    if (!res) {
        return false;
    }
    SRV_WRN("purging slot %d with %d tokens, %d of them shared\n", res->id, res->prompt.n_tokens(), res->prompt.share.n);
    polykv_slots[res->id].session = 0;
    res->prompt_clear();
    return true;
}

// --- attach ------------------------------------------------------------------------------------------------------------

// called with what the slot itself can reuse; returns the new n_past
int server_context_impl::polykv_attach(server_slot & slot, int n_past) {
    const auto & params = slot.task->params.polykv;
    auto       & info   = polykv_slots[slot.id];

    info.miss = nullptr;

    // a conversation that goes on right where its cells end needs no earlier state, whatever the stock check says
    info.window_ok = params.named && n_past > 0 && n_past == slot.prompt.n_tokens() && n_past < slot.task->n_tokens() && polykv_verify(slot, n_past);

    if (params.seq.empty()) {
        return n_past;
    }

    polykv_seq_record record;
    if (!polykv_get_hub().find(params.seq, record) || !record.ready) {
        info.miss = "stale_seq";
        return n_past;
    }
    const int n_common = std::min({ params.n_shared, polykv_n_common(*record.tokens, slot.task->tokens), slot.task->n_tokens() - 1 });
    if (slot.prompt.share.seq == params.seq && slot.prompt.share.n > 0 && n_past > 0 && polykv_n_own(slot, n_past) >= n_common) {
        return n_past; // its own cells already are those of the sequence
    }
    if (!slot.task->params.cache_prompt && !params.prefill_only) {
        info.miss = "cache_prompt_off";
        return n_past;
    }
    if (!are_lora_equal(record.lora, slot.lora) && !(lora_get_enabled_ids(record.lora).empty() && lora_all_alora(slot.lora))) {
        info.miss = "lora";
        return n_past;
    }

    const int n_prompt = slot.task->n_tokens();
    const int n_pool   = (int) record.tokens->size();

    int n = std::min(params.n_shared, polykv_n_common(*record.tokens, slot.task->tokens));
    if (slot.alora_invocation_start > 0) {
        n = std::min(n, slot.alora_invocation_start - 1);
    }
    if (n <= 0 || n_prompt < 2) {
        info.miss = n > 0 ? "too_short" : slot.task->tokens[0] == LLAMA_TOKEN_NULL ? "media" : "token_mismatch";
        return n_past;
    }

    // memory that cannot be cut back is shared as a whole, or up to a checkpoint of the pool
    const common_prompt_checkpoint * checkpoint = nullptr;
    if (polykv_memory.kind != LLAMA_POLYKV_CLASS_ANY && (n != n_pool || n == n_prompt)) {
        for (const auto & cur : record.checkpoints) {
            if (cur->n_tokens <= std::min(n, n_prompt - 1)) {
                checkpoint = cur.get();
            }
        }
        n = checkpoint ? (int) checkpoint->n_tokens : 0;
    }
    if (polykv_memory.kind == LLAMA_POLYKV_CLASS_NONE || n == 0) {
        info.miss = "memory_class";
        return n_past;
    }
    if (std::min(n, n_prompt - 1) <= polykv_n_own(slot, n_past)) {
        info.miss = "own_cache_longer";
        return n_past;
    }

    slot.prompt_clear();

    bool ok = true;
    if (checkpoint) {
        ok = polykv_restore(slot, params.seq, *checkpoint);
    } else if (n == n_pool) {
        slot.mem.seq_cp(params.seq.seq, slot.id, -1, -1);
    } else {
        slot.mem.seq_cp(params.seq.seq, slot.id, 0, n);
    }
    llama_polykv_trim_window(ctx_tgt, slot.id, n);

    if (!ok || !polykv_verify(slot, n)) {
        SLT_WRN(slot, "attach of %d tokens from %s failed, the prompt is processed in full\n", n, params.seq.str().c_str());
        slot.prompt_clear();
        info.miss = "memory_class";
        return 0;
    }

    slot.prompt.tokens = server_tokens(llama_tokens(record.tokens->begin(), record.tokens->begin() + n), mctx != nullptr);
    slot.prompt.share  = { n, false, params.seq };
    if (checkpoint) {
        slot.prompt.checkpoints.push_back(*checkpoint);
    }
    info.window_ok = true;
    return n;
}

int server_context_impl::polykv_n_own(const server_slot & slot, int n_past) const {
    if (polykv_memory.kind == LLAMA_POLYKV_CLASS_ANY || polykv_slots[slot.id].window_ok || n_past == 0) {
        return n_past;
    }

    // as the stock position check decides, see pre_decode()
    const llama_pos pos_next = slot.prompt.tokens.pos_next(n_past);
    const llama_pos pos_min  = std::max(0, pos_next - n_swa - (n_past < slot.task->n_tokens() ? 0 : 1));
    if (llama_memory_seq_pos_min(llama_get_memory(ctx_tgt), slot.id) < pos_min) {
        return n_past;
    }
    int res = 0;
    for (const auto & cur : slot.prompt.checkpoints) {
        if (cur.pos_max <= pos_next - polykv_exact_state() && (cur.pos_min < pos_min || cur.pos_min == 0)) {
            res = std::min<int>(n_past, cur.n_tokens);
        }
    }
    return res;
}

// the base cache is shared, the rest comes from the checkpoint and is the slot's own; false: no room for it
bool server_context_impl::polykv_restore(server_slot & slot, const polykv_seq_id & seq, const common_prompt_checkpoint & checkpoint) {
    const auto load = [&](llama_context * ctx, const std::vector<uint8_t> & data) {
        return data.empty() || llama_state_seq_set_data_ext(ctx, data.data(), data.size(), slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == data.size();
    };

    llama_polykv_share_base(ctx_tgt, seq.seq, slot.id, checkpoint.n_tokens);
    if (ctx_dft) {
        llama_memory_seq_cp(llama_get_memory(ctx_dft), seq.seq, slot.id, 0, checkpoint.n_tokens);
    }
    if (!load(ctx_tgt, checkpoint.data_tgt) || (ctx_dft && !load(ctx_dft, checkpoint.data_dft))) {
        return false;
    }
    common_speculative_set_state(spec.get(), slot.id, checkpoint.data_spec);
    return true;
}

bool server_context_impl::polykv_verify(const server_slot & slot, int n) const {
    return llama_polykv_verify(ctx_tgt, slot.id, n) && (!ctx_dft || llama_memory_seq_pos_max(llama_get_memory(ctx_dft), slot.id) == n - 1);
}

// the stock cache decision is over: n_past tokens are kept
void server_context_impl::polykv_on_cached(server_slot & slot, int n_past) {
    const auto & params = slot.task->params.polykv;
    auto & share = slot.prompt.share;
    auto & info  = polykv_slots[slot.id];

    if (n_past == 0) {
        share = {};
    }
    share.n = std::min(share.n, n_past);

    if (params.named) {
        info.facts = std::make_shared<polykv_facts>();
        info.facts->slot     = slot.id;
        info.facts->n_cached = n_past;
        info.facts->n_shared = params.seq.empty() || share.seq == params.seq ? share.n : 0;
        info.facts->has_seq  = !params.seq.empty();
        info.facts->echo     = params.echo;
        if (info.facts->has_seq && info.facts->n_shared == 0) {
            info.facts->miss = info.miss ? info.miss : "memory_class";
        }
    }
}

std::shared_ptr<const polykv_facts> server_context_impl::polykv_get_facts(const server_slot & slot, bool is_final) {
    const auto & params = slot.task->params.polykv;
    if (!params.named) {
        return nullptr;
    }
    auto & facts = polykv_slots[slot.id].facts;
    if (!facts) { // a child: it has the cells of its parent
        facts = std::make_shared<polykv_facts>(polykv_facts { slot.id, (int32_t) slot.stats.n_prompt_cached, slot.prompt.share.n, !params.seq.empty(), nullptr, -1.0, params.echo });
        if (facts->has_seq && facts->n_shared == 0) {
            facts->miss = "memory_class";
        }
    }
    if (!is_final) {
        return facts;
    }
    auto res = std::make_shared<polykv_facts>(*facts);
    res->tps = slot.stats.n_gen > 1 ? slot.stats.n_gen_tps() : -1.0;
    return res;
}

// --- guards ------------------------------------------------------------------------------------------------------------

bool server_context_impl::polykv_is_checkpoint(const server_slot & slot) const {
    return slot.task->params.polykv.prefill_only && polykv_slots[slot.id].spacing.at(slot.prompt.n_tokens());
}

// called when all tokens of the slot are decoded
void server_context_impl::polykv_make_checkpoint(server_slot & slot) {
    auto & kept = polykv_slots[slot.id].checkpoints;
    const int n = slot.prompt.n_tokens();

    if (!polykv_is_checkpoint(slot) || (!kept.empty() && kept.back()->n_tokens >= n)) {
        return;
    }

    auto cur = std::make_shared<common_prompt_checkpoint>();
    auto * mem = llama_get_memory(ctx_tgt);
    cur->update_pos(n, llama_memory_seq_pos_min(mem, slot.id), llama_memory_seq_pos_max(mem, slot.id));
    cur->update_tgt(ctx_tgt, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    cur->update_dft(ctx_dft, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    common_speculative_get_state(spec.get(), slot.id, cur->data_spec);
    kept.push_back(std::move(cur));
}

int server_context_impl::polykv_exact_state() const {
    return polykv_pools() && polykv_memory.kind == LLAMA_POLYKV_CLASS_RECURRENT;
}

void server_context_impl::polykv_stop_truncated(server_slot & slot) {
    slot.truncated      = true;
    slot.stop           = STOP_TYPE_LIMIT;
    slot.has_next_token = false;
    slot.print_timings();
    send_final_response(slot);
    slot.release();
}

// take back the tokens of the batch that were not decoded, so that the next iteration builds it again
void server_context_impl::polykv_rollback(int32_t off) {
    for (auto & slot : slots) {
        int32_t n = 0;
        for (int32_t i = off; i < batch.size(); ++i) {
            n += batch.tokens[i].id_slot == slot.id;
        }
        if (n == 0) {
            continue;
        }
        slot.prompt.tokens.keep_first(slot.prompt.n_tokens() - n);
        slot.i_batch = -1;
        slot.spec_draft.clear();
        slot.spec_i_batch.clear();
        slot.spec_is_replay = false;
        if (slot.state == SLOT_STATE_DONE_PROMPT) {
            slot.state = SLOT_STATE_PROCESSING_PROMPT;
        }
        slot.mem.seq_rm(slot.id, slot.prompt.tokens.pos_next(), -1);
    }
    batch.clear();
}

// no cell is free. true: try again, an idle slot, the drafts or one request gave way
bool server_context_impl::polykv_make_room(int32_t n_batch, int32_t off) {
    if (!polykv_pools()) {
        return false;
    }
    if (try_clear_idle_slots()) {
        return true;
    }

    bool has_draft = false;
    for (const auto & slot : slots) {
        has_draft |= !slot.spec_i_batch.empty();
    }
    if (has_draft && n_batch/2 < batch.size()) {
        SRV_WRN("%s", "no free cell for drafted tokens, decoding without a draft\n");
        polykv_no_draft = true;
        polykv_rollback(off);
        return true;
    }
    if (n_batch > 1) {
        return false; // smaller batches are tried first
    }

    // a parent and its waiting children are one unit; a split cache is full for one slot only
    server_slot * victim = nullptr;
    int n_processing = 0;
    for (auto & slot : slots) {
        if (!slot.is_processing() || slot.state == SLOT_STATE_WAIT_OTHER) {
            continue;
        }
        n_processing++;
        if (!victim || slot.prompt.n_tokens() - slot.prompt.share.n > victim->prompt.n_tokens() - victim->prompt.share.n) {
            victim = &slot;
        }
    }
    if (!victim || n_processing < 2) {
        return false; // alone: the stock error
    }

    polykv_rollback(off);

    SLT_WRN(*victim, "the KV cache is full: stopping this request with %d private tokens, %d others go on\n", victim->prompt.n_tokens() - victim->prompt.share.n, n_processing - 1);

    const int id_task = victim->task->id;
    if (victim->stats.n_gen > 0) {
        polykv_stop_truncated(*victim);
    } else {
        send_error(*victim, "the KV cache is full: " + std::to_string(victim->task->n_tokens()) + " prompt tokens do not fit beside the running requests", ERROR_TYPE_EXCEED_CONTEXT_SIZE);
        victim->release();
    }
    victim->prompt_clear();
    for (auto & slot : slots) {
        if (slot.is_processing() && slot.task->id_parent == id_task && slot.state == SLOT_STATE_WAIT_OTHER) {
            send_error(slot, "the KV cache is full", ERROR_TYPE_EXCEED_CONTEXT_SIZE);
            slot.release();
        }
    }
    return true;
}

// --- operations ----------------------------------------------------------------------------------------------------------

void server_context_impl::polykv_reply(int id_task, polykv_error && error, json && data) {
    auto res = std::make_unique<server_task_result_polykv>();
    res->id    = id_task;
    res->error = std::move(error);
    res->data  = std::move(data);
    if (!res->error.status) {
        res->data["update"] = polykv_publish();
    }
    queue_results.send(std::move(res));
}

// those of the parent up to where it was shared, then the slot's own
polykv_checkpoints server_context_impl::polykv_get_checkpoints(const server_slot & slot, int n) const {
    polykv_checkpoints res;
    if (polykv_memory.kind == LLAMA_POLYKV_CLASS_ANY) {
        return res;
    }

    polykv_seq_record parent;
    polykv_get_hub().find(slot.prompt.share.seq, parent);
    for (const auto & cur : parent.checkpoints) {
        if (cur->n_tokens <= std::min(n, slot.prompt.share.n)) {
            res.push_back(cur);
        }
    }
    for (const auto & cur : polykv_slots[slot.id].checkpoints) {
        res.push_back(cur);
    }
    if (!slot.task || !slot.task->params.polykv.prefill_only) { // a snapshot: what the stock code kept for the session
        for (const auto & cur : slot.prompt.checkpoints) {
            if (cur.n_tokens <= n && (res.empty() || cur.n_tokens > res.back()->n_tokens)) {
                res.push_back(std::make_shared<const common_prompt_checkpoint>(cur));
            }
        }
    }
    return res;
}

// the cells of slot become those of the sequence; false: the reservation is gone
bool server_context_impl::polykv_fill(const server_slot & slot, const polykv_seq_id & dst, int n) {
    slot.mem.seq_rm(dst.seq, -1, -1);
    if (llama_n_rs_seq(ctx_tgt) > 0) {
        // a partly rejected draft leaves a rollback index that seq_cp does not copy
        std::vector<uint8_t> data(llama_state_seq_get_size_ext(ctx_tgt, slot.id, LLAMA_STATE_SEQ_FLAGS_NONE));
        llama_state_seq_get_data_ext(ctx_tgt, data.data(), data.size(), slot.id, LLAMA_STATE_SEQ_FLAGS_NONE);
        if (llama_state_seq_set_data_ext(ctx_tgt, data.data(), data.size(), dst.seq, LLAMA_STATE_SEQ_FLAGS_NONE) == 0) {
            return false;
        }
        if (ctx_dft) {
            llama_memory_seq_cp(llama_get_memory(ctx_dft), slot.id, dst.seq, -1, -1);
        }
    } else if (n == slot.prompt.n_tokens()) {
        slot.mem.seq_cp(slot.id, dst.seq, -1, -1);
    } else {
        slot.mem.seq_cp(slot.id, dst.seq, 0, n);
    }
    llama_polykv_trim_window(ctx_tgt, dst.seq, n);

    llama_tokens tokens;
    for (int i = 0; i < n; ++i) {
        tokens.push_back(slot.prompt.tokens[i]);
    }
    polykv_seq_record record;
    record.tokens  = std::make_shared<const llama_tokens>(std::move(tokens));
    record.lora    = slot.lora;
    record.n_cells = llama_polykv_n_cells(ctx_tgt, dst.seq, nullptr);
    record.checkpoints = polykv_get_checkpoints(slot, n);
    if (!polykv_get_hub().commit(dst, std::move(record))) {
        slot.mem.seq_rm(dst.seq, -1, -1);
        return false;
    }
    return true;
}

void server_context_impl::polykv_prefill_done(server_slot & slot) {
    const auto    params   = slot.task->params.polykv;
    const int     id_task  = slot.task->id;
    const int     n_tokens = slot.prompt.n_tokens();
    const int32_t n_shared = polykv_slots[slot.id].facts->n_shared;

    auto & info = polykv_slots[slot.id];
    info.filled = polykv_fill(slot, params.dst, n_tokens);
    const bool ok = info.filled;

    slot.i_batch = -1;
    slot.release();
    slot.prompt_clear();

    polykv_seq_record record;
    polykv_get_hub().find(params.dst, record);
    if (ok) {
        polykv_reply(id_task, {}, {{"seq", params.dst.str()}, {"n_tokens", n_tokens}, {"n_shared", n_shared}, {"cells", record.n_cells}});
    } else {
        polykv_reply(id_task, { 409, "cancelled", "the materialisation was cancelled" }, {});
    }
}

void server_context_impl::polykv_run_op(const server_task & task) {
    switch (task.op->kind) {
        case polykv_op::SNAPSHOT:    polykv_snapshot   (task.id, *task.op); break;
        case polykv_op::FREE_SEQ:    polykv_free_seq   (task.id, *task.op); break;
        case polykv_op::END_SESSION: polykv_end_session(task.id, *task.op); break;
    }
}

void server_context_impl::polykv_snapshot(int id_task, const polykv_op & op) {
    server_slot * slot = nullptr;
    for (auto & cur : slots) {
        if (polykv_slots[cur.id].session == op.session && cur.prompt.n_tokens() > 0 && (!slot || cur.is_processing() || cur.t_last_used > slot->t_last_used)) {
            slot = &cur;
        }
    }
    if (!slot) {
        polykv_reply(id_task, { 409, "session_not_resident", "no slot holds tokens of this session" }, {});
        return;
    }

    auto & share = slot->prompt.share;
    const int n_held = slot->prompt.n_tokens();
    const int n      = op.n_tokens < 0 ? n_held : op.n_tokens;

    if (n > n_held) {
        polykv_reply(id_task, { 409, "session_not_resident", string_format("the session holds %d tokens, %d were asked for", n_held, n) }, {});
        return;
    }
    bool has_media = false;
    for (int i = 0; i < n; ++i) {
        has_media |= slot->prompt.tokens[i] == LLAMA_TOKEN_NULL;
    }
    if (share.dirty || has_media || llama_memory_seq_pos_max(llama_get_memory(ctx_tgt), slot->id) + 1 != slot->prompt.tokens.pos_next()) {
        polykv_reply(id_task, { 409, "session_not_resident", has_media ? "the prefix holds media" : "the session's KV was shifted, restored or made under other adapters; it is not what a fresh prefill gives" }, {});
        return;
    }
    if (polykv_memory.kind != LLAMA_POLYKV_CLASS_ANY && n != n_held) {
        polykv_reply(id_task, { 501, "memory_class", string_format("this model can snapshot a whole session only (%d tokens)", n_held) }, {});
        return;
    }
    if (!polykv_fill(*slot, op.seq, n)) {
        polykv_reply(id_task, { 409, "cancelled", "the snapshot was cancelled" }, {});
        return;
    }
    if (n > share.n) {
        share = { n, false, op.seq }; // its own context can no longer be shifted
    }

    polykv_seq_record record;
    polykv_get_hub().find(op.seq, record);
    polykv_reply(id_task, {}, {{"seq", op.seq.str()}, {"n_tokens", n}, {"n_shared", n}, {"cells", record.n_cells}, {"tokens", *record.tokens}});
}

void server_context_impl::polykv_free_seq(int id_task, const polykv_op & op) {
    for (auto & slot : slots) {
        if (slot.is_processing() && slot.task->params.polykv.dst == op.seq) {
            send_error(slot, "the materialisation was cancelled", ERROR_TYPE_INVALID_REQUEST);
            slot.release();
        }
    }
    const bool freed = polykv_get_hub().release(op.seq);
    if (freed) {
        slots[0].mem.seq_rm(op.seq.seq, -1, -1);
    }
    polykv_reply(id_task, {}, {{"freed", freed}});
}

void server_context_impl::polykv_end_session(int id_task, const polykv_op & op) {
    polykv_get_hub().end_session(op.session);

    int n_cancelled = 0;
    const uint32_t n_used = llama_polykv_n_used(ctx_tgt);
    for (auto & slot : slots) {
        if (polykv_slots[slot.id].session != op.session) {
            continue;
        }
        if (slot.is_processing()) {
            send_error(slot, "the session of this request was ended", ERROR_TYPE_INVALID_REQUEST);
            slot.release();
            n_cancelled++;
        }
        polykv_slots[slot.id].session = 0;
        slot.prompt_clear();
    }
    polykv_reply(id_task, {}, {{"cancelled", n_cancelled}, {"cells_freed", n_used - llama_polykv_n_used(ctx_tgt)}});
}
