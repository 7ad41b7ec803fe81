// Checkpoints of a materialisation, and what happens at the end of a context or of the cache.
// Main thread only, between decodes. Part of server-polykv-slots-impl.h.

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

// the last token of the prompt is in the sub-batch that was just decoded: before that its children must not copy it, because a
// batch that is taken back later would leave them with tokens that never existed
bool server_context_impl::polykv_is_decoded(const server_slot & slot, int32_t off) const {
    return !polykv_pools() || (slot.i_batch >= off && slot.i_batch < off + batch.view.size());
}

// one that nobody needs now, as the caller says; on a split cache it has a stream of its own and makes no room
bool server_context_impl::polykv_give_up_seq() {
    polykv_seq_id seq;
    if (polykv_split() || !polykv_get_hub().give_up(seq)) {
        return false;
    }
    SRV_INF("the KV cache is full: giving up sequence %s\n", seq.str().c_str());
    slots[0].mem.seq_rm(seq.seq, -1, -1);
    return true;
}

// no cell is free. true: try again, an idle slot, an expendable sequence, the drafts or one request gave way
bool server_context_impl::polykv_make_room(int32_t n_batch, int32_t off) {
    if (!polykv_pools() || polykv_split()) {
        return false; // the stream of a split cache is as large as the context of its slot: it is never full
    }
    if (try_clear_idle_slots() || polykv_give_up_seq()) {
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

    // a parent and its waiting children are one unit
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
    if (!victim || (n_processing < 2 && !victim->task->params.polykv.prefill_only)) {
        return false; // alone: the stock error; of a materialisation the proxy must know that other sequences can make room for it
    }

    polykv_rollback(off);

    SLT_WRN(*victim, "the KV cache is full: stopping this request with %d private tokens, %d others go on\n", victim->prompt.n_tokens() - victim->prompt.share.n, n_processing - 1);

    const int id_task = victim->task->id;
    if (victim->stats.n_gen > 0) {
        polykv_stop_truncated(*victim);
    } else {
        send_error(*victim, "the KV cache is full: " + std::to_string(victim->task->n_tokens()) + " prompt tokens do not fit beside what is in use", ERROR_TYPE_EXCEED_CONTEXT_SIZE);
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
