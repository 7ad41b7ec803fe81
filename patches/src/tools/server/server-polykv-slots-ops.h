// Operations of the protocol: making, snapshotting and freeing sequences, ending sessions.
// Main thread only, between decodes. Part of server-polykv-slots-impl.h.

void server_context_impl::polykv_reply(int id_task, polykv_error && error, json && data) {
    auto res = std::make_unique<server_task_result_polykv>();
    res->id    = id_task;
    res->error = std::move(error);
    res->data  = std::move(data);
    if (!res->error.status) {
        res->data["update"] = polykv_publish(true);
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

void server_context_impl::polykv_seq_cp(llama_seq_id src, llama_seq_id dst, int n) const {
    llama_polykv_seq_cp(ctx_tgt, src, dst, n);
    if (ctx_dft) {
        llama_polykv_seq_cp(ctx_dft, src, dst, n);
    }
}

bool server_context_impl::polykv_whole_only() const {
    return polykv_memory.kind != LLAMA_POLYKV_CLASS_ANY || polykv_split();
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
            llama_polykv_seq_cp(ctx_dft, slot.id, dst.seq, -1);
        }
    } else {
        polykv_seq_cp(slot.id, dst.seq, n == slot.prompt.n_tokens() ? -1 : n);
    }
    llama_polykv_trim_window(ctx_tgt, dst.seq, n);

    llama_tokens tokens;
    for (int i = 0; i < n; ++i) {
        tokens.push_back(slot.prompt.tokens[i]);
    }
    polykv_seq_record record;
    record.tokens  = std::make_shared<const llama_tokens>(std::move(tokens));
    record.lora    = slot.lora;
    record.n_cells = llama_polykv_n_cells(ctx_tgt, dst.seq);
    record.checkpoints = polykv_get_checkpoints(slot, n);
    if (!polykv_get_hub().commit(dst, std::move(record))) {
        slot.mem.seq_rm(dst.seq, -1, -1);
        return false;
    }
    return true;
}

// the last word about a sequence that was made: on a unified cache its first tokens may be cells of another one
void server_context_impl::polykv_done(int id_task, const polykv_seq_id & seq, const polykv_share & share, bool with_tokens) {
    polykv_seq_record record;
    polykv_get_hub().find(seq, record);

    const int n_tokens = (int) record.tokens->size();
    const int n_shared = share.seq.empty() || polykv_split() ? 0 : std::min(share.n, n_tokens);

    json data = {
        {"seq",      seq.str()},
        {"n_tokens", n_tokens},
        {"base",     n_shared > 0 ? json(share.seq.str()) : json(nullptr)},
        {"n_shared", n_shared},
        {"cells",    record.n_cells},
    };
    if (with_tokens) {
        data["tokens"] = *record.tokens;
    }
    polykv_reply(id_task, {}, std::move(data));
}

void server_context_impl::polykv_prefill_done(server_slot & slot) {
    const auto dst     = slot.task->params.polykv.dst;
    const auto share   = slot.prompt.share;
    const int  id_task = slot.task->id;

    auto & info = polykv_slots[slot.id];
    info.filled = polykv_fill(slot, dst, slot.prompt.n_tokens());
    const bool ok = info.filled;

    slot.i_batch = -1;
    slot.release();
    slot.prompt_clear();

    if (ok) {
        polykv_done(id_task, dst, share, false);
    } else {
        polykv_reply(id_task, { 409, "cancelled", "the materialisation was cancelled" }, {});
    }
}

void server_context_impl::polykv_run_op(const server_task & task) {
    switch (task.op->kind) {
        case polykv_op::SNAPSHOT:    polykv_snapshot   (task.id, *task.op); break;
        case polykv_op::FREE_SEQ:    polykv_free_seq   (task.id, *task.op); break;
        case polykv_op::END_SESSION: polykv_end_session(task.id, *task.op); break;
        case polykv_op::READ_PART:   polykv_read_part  (task.id, *task.op); break;
        case polykv_op::WRITE_PART:  polykv_write_part (task.id, *task.op); break;
        case polykv_op::FINISH:      polykv_finish     (task.id, *task.op); break;
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
    const polykv_share before = share;
    if (n > share.n) {
        share = { n, false, op.seq }; // its own context can no longer be shifted
    }
    polykv_done(id_task, op.seq, before, true);
}

void server_context_impl::polykv_free_seq(int id_task, const polykv_op & op) {
    const bool freed = polykv_get_hub().release(op.seq); // first: who hears of an error releases it as well
    for (auto & slot : slots) {
        if (slot.is_processing() && slot.task->params.polykv.dst == op.seq) {
            send_error(slot, "the materialisation was cancelled", ERROR_TYPE_INVALID_REQUEST);
            slot.release();
        }
    }
    if (freed) {
        slots[0].mem.seq_rm(op.seq.seq, -1, -1);
    }
    polykv_reply(id_task, {}, {{"freed", freed}});
}

void server_context_impl::polykv_end_session(int id_task, const polykv_op & op) {
    polykv_get_hub().end_session(op.session);

    int n_cancelled = 0;
    const uint32_t n_used = polykv_n_cells(llama_polykv_count_used(ctx_tgt));
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
    polykv_reply(id_task, {}, {{"cancelled", n_cancelled}, {"cells_freed", n_used - polykv_n_cells(llama_polykv_count_used(ctx_tgt))}});
}

llama_seq_id server_context_impl::polykv_spare_seq() const {
    return params_base.n_parallel + polykv_get_settings().max_pools;
}

void server_context_impl::polykv_read_part(int id_task, const polykv_op & op) {
    polykv_seq_record record;
    if (!polykv_get_hub().find(op.seq, record) || !record.ready) {
        polykv_reply(id_task, { 410, "stale_seq", "the sequence was freed while it was being saved" }, {});
        return;
    }
    if (!lora_get_enabled_ids(record.lora).empty()) {
        polykv_reply(id_task, { 501, "lora", "a sequence made under adapters cannot be saved: a file does not record them" }, {});
        return;
    }

    const bool whole = polykv_whole_only();
    const llama_seq_id src = whole ? op.seq.seq : polykv_spare_seq();

    if (!whole) {
        slots[0].mem.seq_rm(src, -1, -1);
        slots[0].mem.seq_cp(op.seq.seq, src, op.part->from, op.part->to);
    }
    const auto get = [&](llama_context * ctx, std::vector<uint8_t> & data) {
        if (ctx) {
            data.resize(llama_state_seq_get_size_ext(ctx, src, LLAMA_STATE_SEQ_FLAGS_NONE));
            llama_state_seq_get_data_ext(ctx, data.data(), data.size(), src, LLAMA_STATE_SEQ_FLAGS_NONE);
        }
    };
    get(ctx_tgt, op.part->tgt);
    get(ctx_dft, op.part->dft);
    if (!whole) {
        slots[0].mem.seq_rm(src, -1, -1);
    }
    polykv_reply(id_task, {}, json::object());
}

void server_context_impl::polykv_write_part(int id_task, const polykv_op & op) {
    polykv_seq_record record;
    if (!polykv_get_hub().find(op.seq, record)) {
        polykv_reply(id_task, { 410, "stale_seq", "the sequence was freed while it was being restored" }, {});
        return;
    }

    const bool whole = polykv_whole_only();
    const llama_seq_id dst = whole ? op.seq.seq : polykv_spare_seq();

    const auto set = [&](llama_context * ctx, const std::vector<uint8_t> & data) {
        return !ctx || (!data.empty() && llama_state_seq_set_data_ext(ctx, data.data(), data.size(), dst, LLAMA_STATE_SEQ_FLAGS_NONE) == data.size());
    };
    bool ok = set(ctx_tgt, op.part->tgt) && set(ctx_dft, op.part->dft);
    if (!ok && try_clear_idle_slots()) { // once more with what idle slots held
        while (!(ok = set(ctx_tgt, op.part->tgt) && set(ctx_dft, op.part->dft)) && try_clear_idle_slots()) {}
    }
    if (!whole) {
        if (ok) {
            slots[0].mem.seq_cp(dst, op.seq.seq, op.part->from, op.part->to);
        }
        slots[0].mem.seq_rm(dst, -1, -1);
    }
    if (!ok) {
        polykv_reply(id_task, { 429, "no_cells", "the saved sequence does not fit into the cache now" }, {});
        return;
    }
    polykv_reply(id_task, {}, json::object());
}

void server_context_impl::polykv_finish(int id_task, const polykv_op & op) {
    const int n = (int) op.record.tokens->size();

    if (op.from > 0) {
        polykv_seq_record parent;
        const bool known = polykv_get_hub().find(op.parent, parent) && parent.ready;
        if (!known || (int) parent.tokens->size() < op.from || !std::equal(parent.tokens->begin(), parent.tokens->begin() + op.from, op.record.tokens->begin())) {
            polykv_reply(id_task, { 409, "file_refused", "parent_seq does not hold the tokens before the saved ones" }, {});
            return;
        }
        polykv_seq_cp(op.parent.seq, op.seq.seq, op.from);
    }
    if (!llama_polykv_verify(ctx_tgt, op.seq.seq, n)) {
        polykv_reply(id_task, { 409, "file_refused", "the restored positions are not those of the saved sequence" }, {});
        return;
    }

    polykv_seq_record record = op.record;
    record.lora    = params_base.lora_adapters;
    for (auto & adapter : record.lora) {
        adapter.scale = 0.0f;
    }
    record.n_cells = llama_polykv_n_cells(ctx_tgt, op.seq.seq);
    if (!polykv_get_hub().commit(op.seq, std::move(record))) {
        slots[0].mem.seq_rm(op.seq.seq, -1, -1);
        polykv_reply(id_task, { 410, "stale_seq", "the sequence was freed while it was being restored" }, {});
        return;
    }
    polykv_done(id_task, op.seq, { op.from, false, op.parent }, false);
}
