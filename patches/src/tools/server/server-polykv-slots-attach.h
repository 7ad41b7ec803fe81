// Which slot a task gets, and how its prompt starts from the cells of a pool.
// Main thread only, between decodes. Part of server-polykv-slots-impl.h.

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

// like try_clear_idle_slots(): sessions last, then the least recently used; a slot with only shared cells frees nothing, and
// none does on a split cache
bool server_context_impl::polykv_clear_idle_slot() {
    server_slot * res = nullptr;
    for (auto & slot : slots) {
        if (polykv_split() || slot.is_processing() || slot.prompt.n_tokens() <= slot.prompt.share.n) {
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
    } else {
        polykv_seq_cp(params.seq.seq, slot.id, n == n_pool ? -1 : n);
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

// false: there is no room for it, and nothing idle that could make some
bool server_context_impl::polykv_restore(server_slot & slot, const polykv_seq_id & seq, const common_prompt_checkpoint & checkpoint) {
    while (!polykv_load(slot, seq, checkpoint)) {
        slot.prompt_clear();
        if (!try_clear_idle_slots() && !polykv_give_up_seq()) {
            return false;
        }
    }
    return true;
}

// the base cache is shared, the rest comes from the checkpoint and is the slot's own; false: no room for it
bool server_context_impl::polykv_load(server_slot & slot, const polykv_seq_id & seq, const common_prompt_checkpoint & checkpoint) {
    const auto load = [&](llama_context * ctx, const std::vector<uint8_t> & data) {
        return data.empty() || llama_state_seq_set_data_ext(ctx, data.data(), data.size(), slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == data.size();
    };

    llama_polykv_seq_cp_base(ctx_tgt, seq.seq, slot.id, checkpoint.n_tokens);
    if (ctx_dft) {
        llama_polykv_seq_cp(ctx_dft, seq.seq, slot.id, checkpoint.n_tokens);
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
    if (!facts) { // a child: it has the cells of its parent; or an empty prompt, which never gets to them
        facts = std::make_shared<polykv_facts>(polykv_facts { slot.id, (int32_t) slot.stats.n_prompt_cached, slot.prompt.share.n, !params.seq.empty(), nullptr, -1.0, params.echo });
        if (facts->has_seq && facts->n_shared == 0) {
            facts->miss = slot.task->n_tokens() == 0 ? "too_short" : "memory_class";
        }
    }
    if (!is_final) {
        return facts;
    }
    auto res = std::make_shared<polykv_facts>(*facts);
    res->tps        = slot.stats.n_gen > 1 ? slot.stats.n_gen_tps() : -1.0;
    res->n_ctx_left = std::max(0, slot.n_ctx - slot.prompt.n_tokens());
    return res;
}
