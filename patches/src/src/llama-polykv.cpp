#include "llama-polykv.h"

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>

// the parts of a memory that we know how to look into, null where it has none
struct polykv_parts {
    llama_polykv_class       kind = LLAMA_POLYKV_CLASS_NONE;
    llama_kv_cache         * base = nullptr;
    llama_kv_cache         * swa  = nullptr;
    llama_memory_recurrent * recr = nullptr;
};

static polykv_parts polykv_get_parts(const llama_context * ctx) {
    polykv_parts res;

    llama_memory_i * mem = llama_get_memory(ctx);

    if (auto * m = dynamic_cast<llama_memory_hybrid *>(mem)) {
        res = { LLAMA_POLYKV_CLASS_RECURRENT, m->get_mem_attn(), nullptr, m->get_mem_recr() };
    } else if (auto * m = dynamic_cast<llama_memory_hybrid_iswa *>(mem)) {
        res = { LLAMA_POLYKV_CLASS_RECURRENT, m->get_mem_attn()->get_base(), m->get_mem_attn()->get_swa(), m->get_mem_recr() };
    } else if (auto * m = dynamic_cast<llama_memory_recurrent *>(mem)) {
        res = { LLAMA_POLYKV_CLASS_RECURRENT, nullptr, nullptr, m };
    } else if (auto * m = dynamic_cast<llama_kv_cache_iswa *>(mem)) {
        res = { LLAMA_POLYKV_CLASS_WINDOW, m->get_base(), m->get_swa(), nullptr };
    } else if (auto * m = dynamic_cast<llama_kv_cache *>(mem)) {
        res = { LLAMA_POLYKV_CLASS_ANY, m, nullptr, nullptr };
    }

    return res;
}

static uint64_t n_bytes(const llama_memory_i & mem) {
    uint64_t res = 0;
    for (const auto & [buft, size] : mem.memory_breakdown()) {
        res += size;
    }
    return res;
}

llama_polykv_info llama_polykv_get_info(const llama_context * ctx, uint32_t n_reserved) {
    const auto parts = polykv_get_parts(ctx);

    llama_polykv_info res = {};
    res.kind      = parts.kind;
    res.n_streams = parts.base ? parts.base->get_n_stream() : 1;

    for (const llama_memory_i * mem : { (llama_memory_i *) parts.base, (llama_memory_i *) parts.swa, (llama_memory_i *) parts.recr }) {
        res.bytes_total += mem ? n_bytes(*mem) : 0;
    }

    if (parts.base) {
        res.n_cells        = parts.base->get_size();
        res.bytes_per_cell = n_bytes(*parts.base) / std::max<uint64_t>(1, (uint64_t) res.n_cells * res.n_streams);
        if (res.n_streams > 1) {
            res.price_bytes += res.bytes_per_cell * res.n_cells * n_reserved;
        }
    }
    if (parts.swa) {
        res.n_cells_swa        = parts.swa->get_size();
        res.bytes_per_cell_swa = n_bytes(*parts.swa) / std::max<uint64_t>(1, (uint64_t) res.n_cells_swa * res.n_streams);

        uint32_t n_more = res.n_cells_swa * n_reserved;
        if (res.n_streams == 1) {
            // the ring of a unified cache holds n_swa cells a sequence, see llama_kv_cache_iswa()
            const uint32_t n_swa   = llama_get_model(ctx)->hparams.n_swa;
            const uint32_t n_fewer = llama_n_seq_max(ctx) - std::min(n_reserved, llama_n_seq_max(ctx));
            const uint32_t n_stock = GGML_PAD(std::min(res.n_cells, n_swa*n_fewer + llama_n_ubatch(ctx)), 256);
            n_more = res.n_cells_swa - std::min(res.n_cells_swa, n_stock);
        }
        res.price_bytes += res.bytes_per_cell_swa * n_more;
    }
    if (parts.recr) {
        res.bytes_per_row = n_bytes(*parts.recr) / std::max<uint32_t>(1, parts.recr->size);
        res.price_bytes  += res.bytes_per_row * n_reserved;
    }

    return res;
}

// a unified cache has one set of cells, a split one a set for each sequence
template <typename F>
static void for_each_stream(const llama_kv_cache & kv, const F & func) {
    for (uint32_t s = 0; s < (kv.get_n_stream() > 1 ? kv.get_n_seq_max() : 1); ++s) {
        func(kv.get_cells(s));
    }
}

static uint32_t n_used(const llama_kv_cache & kv) {
    uint32_t res = 0;
    for_each_stream(kv, [&](const llama_kv_cells & cells) {
        res += cells.get_used();
    });
    return res;
}

llama_polykv_count llama_polykv_count_used(const llama_context * ctx) {
    const auto parts = polykv_get_parts(ctx);

    llama_polykv_count res;
    res.n_cells     = parts.base ? n_used(*parts.base) : 0;
    res.n_cells_swa = parts.swa  ? n_used(*parts.swa)  : 0;
    res.n_rows      = parts.recr ? parts.recr->used    : 0;
    return res;
}

// index of the first sequence for which has() is true, else their number
template <typename F>
static size_t find_owner(const std::vector<llama_seq_id> & seq_ids, const F & has) {
    return std::find_if(seq_ids.begin(), seq_ids.end(), has) - seq_ids.begin();
}

std::vector<llama_polykv_count> llama_polykv_count_own(const llama_context * ctx, const std::vector<llama_seq_id> & seq_ids) {
    const auto parts = polykv_get_parts(ctx);

    std::vector<llama_polykv_count> res(seq_ids.size() + 1);

    const auto add = [&](const llama_kv_cache & kv, uint32_t llama_polykv_count::* n) {
        for_each_stream(kv, [&](const llama_kv_cells & cells) {
            for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
                if (!cells.is_empty(i)) {
                    res[find_owner(seq_ids, [&](llama_seq_id id) { return cells.seq_has(i, id); })].*n += 1;
                }
            }
        });
    };
    if (parts.base) {
        add(*parts.base, &llama_polykv_count::n_cells);
    }
    if (parts.swa) {
        add(*parts.swa, &llama_polykv_count::n_cells_swa);
    }
    if (parts.recr) {
        for (const auto & cell : parts.recr->cells) {
            if (!cell.is_empty()) {
                res[find_owner(seq_ids, [&](llama_seq_id id) { return cell.has_seq_id(id); })].n_rows += 1;
            }
        }
    }
    return res;
}

uint32_t llama_polykv_n_cells(const llama_context * ctx, llama_seq_id seq_id) {
    const auto count = llama_polykv_count_own(ctx, { seq_id })[0];

    return polykv_get_parts(ctx).base ? count.n_cells : count.n_rows;
}

void llama_polykv_trim_window(llama_context * ctx, llama_seq_id seq_id, llama_pos n_past) {
    const auto parts = polykv_get_parts(ctx);

    const llama_pos n_swa = (llama_pos) llama_get_model(ctx)->hparams.n_swa;

    // chunked and symmetric windows mask otherwise: they keep their cells
    if (parts.swa && llama_get_model(ctx)->hparams.swa_type == LLAMA_SWA_TYPE_STANDARD && n_past > n_swa) {
        parts.swa->seq_rm(seq_id, 0, n_past - n_swa + 1);
    }
}

// a memory that cannot cut the copy refuses: the caller finds out by its positions
static void seq_cp(llama_context * ctx, llama_memory_i & mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos n) {
    const auto * base = polykv_get_parts(ctx).base;

    if (!base || base->get_n_stream() == 1) {
        mem.seq_cp(seq_id_src, seq_id_dst, n < 0 ? -1 : 0, n);
        return;
    }

    mem.seq_cp(seq_id_src, seq_id_dst, -1, -1);
    if (n >= 0) {
        mem.seq_rm(seq_id_dst, n, -1);
    }
    ctx->memory_update(false);
}

void llama_polykv_seq_cp(llama_context * ctx, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos n) {
    if (auto * mem = llama_get_memory(ctx)) {
        seq_cp(ctx, *mem, seq_id_src, seq_id_dst, n);
    }
}

void llama_polykv_seq_cp_base(llama_context * ctx, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos n) {
    if (auto * base = polykv_get_parts(ctx).base) {
        seq_cp(ctx, *base, seq_id_src, seq_id_dst, n);
    }
}

bool llama_polykv_verify(const llama_context * ctx, llama_seq_id seq_id, llama_pos n_past) {
    const auto parts = polykv_get_parts(ctx);

    if (parts.base && (parts.base->seq_pos_min(seq_id) != 0 || parts.base->seq_pos_max(seq_id) != n_past - 1)) {
        return false;
    }
    if (parts.recr && parts.recr->seq_pos_max(seq_id) != n_past - 1) {
        return false;
    }
    if (parts.swa) {
        const auto & hparams = llama_get_model(ctx)->hparams;
        const llama_pos n_swa = (llama_pos) hparams.n_swa;

        llama_pos first = 0; // the first position that is still visible
        switch (hparams.swa_type) {
            case LLAMA_SWA_TYPE_STANDARD: first = std::max(0, n_past - n_swa + 1); break;
            case LLAMA_SWA_TYPE_CHUNKED:  first = (n_past / n_swa) * n_swa;        break;
            default: break;
        }
        const llama_pos pos_min = parts.swa->seq_pos_min(seq_id);
        if (parts.swa->seq_pos_max(seq_id) != n_past - 1 || pos_min < 0 || pos_min > first) {
            return false;
        }
    }
    return parts.kind != LLAMA_POLYKV_CLASS_NONE;
}
