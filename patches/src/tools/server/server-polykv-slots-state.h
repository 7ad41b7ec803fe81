// Boot, published state and events: what the slots tell the world.
// Main thread only, between decodes. Part of server-polykv-slots-impl.h.

void server_context_impl::polykv_boot() {
    const auto & settings = polykv_get_settings();

    gpu_share_get_pacer().join(model_tgt, model_name);

    polykv_slots.assign(slots.size(), {});
    polykv_no_draft = false;
    polykv_t_count  = 0;
    polykv_memory   = llama_polykv_get_info(ctx_tgt, settings.n_reserved());
    polykv_memory_dft = ctx_dft ? llama_polykv_get_info(ctx_dft, settings.n_reserved()) : llama_polykv_info {};

    for (int i = params_base.n_parallel; i < (int) llama_n_seq_max(ctx_tgt); ++i) {
        llama_set_sampler(ctx_tgt, i, nullptr); // backend sampling gave every id one
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
        hello["kv"]["unified"]            = !polykv_split();
        hello["kv_identity"]              = polykv_kv_identity(params_base, polykv_memory.n_streams);
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

int32_t server_context_impl::polykv_n_batch() const {
    const int32_t n_batch = llama_n_batch(ctx_tgt);
    const bool    whole   = std::any_of(slots.begin(), slots.end(), [](const server_slot & slot) { return slot.is_processing() && !slot.can_split(); });
    return whole ? n_batch : std::min(n_batch, batch.size() + gpu_share_get_pacer().limit_prompt(n_batch));
}

polykv_slot_totals server_context_impl::polykv_get_totals(const server_slot & slot) const {
    auto res = polykv_slots[slot.id].totals;
    res.n_decoded += slot.stats.n_gen;
    res.us_decode += slot.stats.t_gen_us();
    if (!slot.task || !slot.task->is_child()) { // a child's are those of its parent
        res.n_prompt += slot.stats.n_prompt_processed;
        res.n_cached += slot.stats.n_prompt_cached;
    }
    if (slot.stats.t_gen_last > 0) {
        res.t_last_token_us = polykv_unix_us(slot.stats.t_gen_last);
    }
    return res;
}

// generates nothing: a materialisation, an embedding
static bool polykv_is_fill(const server_slot & slot) {
    return slot.task->params.polykv.prefill_only || !slot.task->need_sampling();
}

// from launch to the first token, or to the end of a materialisation; 0 before that
int64_t server_context_impl::polykv_us_prompt(const server_slot & slot) const {
    const auto & info = polykv_slots[slot.id];
    return slot.stats.n_gen > 0 || info.filled ? std::max<int64_t>(1, slot.stats.t_prompt_last - info.t_launch) : 0;
}

// a recurrent model has no cells but one row a sequence
uint32_t server_context_impl::polykv_n_cells(const llama_polykv_count & count) const {
    return polykv_memory.n_cells > 0 ? count.n_cells : count.n_rows;
}

void server_context_impl::polykv_count_own() {
    const int64_t t_start = ggml_time_us();
    const auto    seqs    = polykv_get_hub().list();

    std::vector<llama_seq_id> ids;
    for (const auto & seq : seqs) {
        ids.push_back(seq.id.seq);
    }
    for (const auto & slot : slots) {
        ids.push_back(slot.id);
    }

    std::vector<polykv_held> held(ids.size() + 1);
    const auto own = llama_polykv_count_own(ctx_tgt, ids);
    for (size_t i = 0; i < own.size(); ++i) {
        held[i] = { polykv_n_cells(own[i]), own[i].n_bytes(polykv_memory) };
    }
    if (ctx_dft) {
        const auto own_dft = llama_polykv_count_own(ctx_dft, ids);
        for (size_t i = 0; i < own_dft.size(); ++i) {
            held[i].n_bytes += own_dft[i].n_bytes(polykv_memory_dft);
        }
    }

    polykv_counted = {};
    for (size_t i = 0; i < seqs.size(); ++i) {
        polykv_counted.seqs.emplace_back(seqs[i].id, held[i]);
    }
    polykv_counted.slots.assign(held.begin() + seqs.size(), held.end() - 1);
    polykv_counted.other = held.back();

    const int64_t t_end = ggml_time_us();
    polykv_t_count = t_end + 200*(t_end - t_start); // while slots generate a two hundredth of the time at most goes into it
}

uint64_t server_context_impl::polykv_publish(bool count) {
    if (!polykv_events()) {
        return 0;
    }
    const bool idle = std::none_of(slots.begin(), slots.end(), [](const server_slot & slot) { return slot.is_processing(); });
    if (count || idle || ggml_time_us() >= polykv_t_count) {
        polykv_count_own();
    }

    const auto used = llama_polykv_count_used(ctx_tgt);

    polykv_state res;
    res.owners           = polykv_counted;
    res.n_cells          = polykv_memory.n_cells * polykv_memory.n_streams;
    res.n_cells_used     = polykv_n_cells(used);
    res.n_cells_swa      = polykv_memory.n_cells_swa * polykv_memory.n_streams;
    res.n_cells_swa_used = used.n_cells_swa;
    res.n_bytes_total    = polykv_memory.bytes_total + polykv_memory_dft.bytes_total;
    res.n_bytes_used     = used.n_bytes(polykv_memory);
    if (ctx_dft) {
        res.n_bytes_used += llama_polykv_count_used(ctx_dft).n_bytes(polykv_memory_dft);
    }
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
        dst.fill     = slot.task && polykv_is_fill(slot);
        dst.seq      = slot.prompt.share.seq;
        dst.n_shared = slot.prompt.share.n;
        dst.n_tokens = slot.prompt.n_tokens();
        dst.n_ctx    = slot.n_ctx;
        dst.own      = polykv_counted.slots[slot.id];
        for (const auto & cur : slot.prompt.checkpoints) {
            dst.checkpoint_bytes += cur.size();
        }

        dst.n_decoded = slot.stats.n_gen;
        dst.us_decode = slot.stats.t_gen_us();

        dst.totals   = polykv_get_totals(slot);
    }
    return polykv_get_hub().publish(std::move(res));
}

void server_context_impl::polykv_emit(const char * type, const server_slot & slot, const char * reason) const {
    const auto & params = slot.task->params.polykv;
    const auto & share  = slot.prompt.share;
    const auto & info   = polykv_slots[slot.id];
    const auto & facts  = info.facts;
    polykv_get_hub().emit(type, {
        {"type",      type},
        {"t_us",      polykv_now_us()},
        {"req",       params.req},
        {"index",     slot.task->index},
        {"task",      slot.task->id},
        {"slot",      slot.id},
        {"session",   params.session},
        {"fill",      polykv_is_fill(slot)},
        {"seq",       share.n > 0 && !share.seq.empty() ? json(share.seq.str()) : json(nullptr)},
        {"n_prompt",  slot.task->n_tokens()},
        {"n_cached",  slot.stats.n_prompt_cached},
        {"n_shared",  facts ? facts->n_shared : 0},
        {"miss",      facts && facts->miss ? json(facts->miss) : json(nullptr)},
        {"n_decoded", slot.stats.n_gen},
        {"us_queued", params.t_post > 0 ? info.t_launch - params.t_post : 0},
        {"us_prompt", polykv_us_prompt(slot)},
        {"us_decode", slot.stats.t_gen_us()},
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
    info.t_launch    = ggml_time_us();
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
