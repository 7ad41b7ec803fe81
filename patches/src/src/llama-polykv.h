#pragma once

// What the server needs to know about the memory behind a context, and the public API does not tell.
// Law: main thread only, between decodes. No server types here. A staging header, like llama-ext.h.

#include "llama.h"

#include <cstdint>
#include <vector>

enum llama_polykv_class {
    LLAMA_POLYKV_CLASS_NONE,      // nothing can be shared: no memory, or a kind we do not know
    LLAMA_POLYKV_CLASS_ANY,       // any prefix of a sequence can be shared
    LLAMA_POLYKV_CLASS_WINDOW,    // sliding window: the whole sequence only
    LLAMA_POLYKV_CLASS_RECURRENT, // recurrent or hybrid state: the whole sequence only
};

struct llama_polykv_info {
    llama_polykv_class kind;

    uint32_t n_streams;        // of a split cache one a sequence, else 1
    uint32_t n_cells;          // size of a stream of the (base) KV cache
    uint32_t n_cells_swa;      // size of a stream of the sliding-window KV cache
    uint64_t bytes_per_cell;   // of the (base) KV cache
    uint64_t bytes_per_cell_swa;
    uint64_t bytes_per_row;    // recurrent state of one sequence
    uint64_t bytes_total;      // of all of it, used or not
    uint64_t price_bytes;      // what n_reserved more sequence ids cost
};

LLAMA_API llama_polykv_info llama_polykv_get_info(const struct llama_context * ctx, uint32_t n_reserved);

struct llama_polykv_count {
    uint32_t n_cells     = 0; // of the (base) KV cache
    uint32_t n_cells_swa = 0;
    uint32_t n_rows      = 0; // of recurrent state

    uint64_t n_bytes(const llama_polykv_info & info) const {
        return n_cells*info.bytes_per_cell + n_cells_swa*info.bytes_per_cell_swa + n_rows*info.bytes_per_row;
    }
};

// what is in use, counted once however many sequences share it. O(1)
LLAMA_API llama_polykv_count llama_polykv_count_used(const struct llama_context * ctx);

// the same by owner: each cell and row is counted for the first of the sequences that has it, and at the end what none of them has.
// O(cells)
LLAMA_API std::vector<llama_polykv_count> llama_polykv_count_own(const struct llama_context * ctx, const std::vector<llama_seq_id> & seq_ids);

// cells (or rows) that a sequence has, shared ones too. O(cells)
LLAMA_API uint32_t llama_polykv_n_cells(const struct llama_context * ctx, llama_seq_id seq_id);

// drop the cells of seq_id that no token at a position >= n_past can see. shared window cells that are kept needlessly pin the ring
LLAMA_API void llama_polykv_trim_window(struct llama_context * ctx, llama_seq_id seq_id, llama_pos n_past);

// give the positions [0, n) of a sequence, all of them if n < 0, to another one that has none. on a unified cache they share the
// cells; on a split one the whole stream is copied, at once: until upstream copies it, at the next decode, nobody may touch the two
LLAMA_API void llama_polykv_seq_cp(struct llama_context * ctx, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos n);

// the same for the base cache alone; window cells and recurrent state stay behind, they come from a checkpoint
LLAMA_API void llama_polykv_seq_cp_base(struct llama_context * ctx, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos n);

// true if the memory holds what a token at position n_past of seq_id attends to, and nothing beyond. a wrong copy would abort the process later
LLAMA_API bool llama_polykv_verify(const struct llama_context * ctx, llama_seq_id seq_id, llama_pos n_past);
