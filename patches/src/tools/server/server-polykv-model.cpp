#include "server-polykv.h"

#include "build-info.h"
#include "gguf.h"
#include "llama-polykv.h"
#include "polykv.h"

#include <filesystem>

using json = common_json;

namespace {

// FNV-1a, 64 bit
struct hasher {
    uint64_t state = 0xcbf29ce484222325ull;

    void add(const void * data, size_t size) {
        for (size_t i = 0; i < size; ++i) {
            state = (state ^ static_cast<const uint8_t *>(data)[i]) * 0x100000001b3ull;
        }
    }
    void add(const std::string & text) { add(text.c_str(), text.size() + 1); }
    void add(uint64_t val)             { add(&val, sizeof(val)); }
};

} // namespace

// the tensor table is read from the file: names, types, offsets. a split model hashes its first file and the totals
static void add_tensor_table(hasher & hash, const std::string & path) {
    gguf_context * gguf = gguf_init_from_file(path.c_str(), { /*.no_alloc =*/ true, /*.ctx =*/ nullptr });
    if (!gguf) {
        return;
    }
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        hash.add(gguf_get_tensor_name(gguf, i));
        hash.add((uint64_t) gguf_get_tensor_type(gguf, i));
        hash.add((uint64_t) gguf_get_tensor_offset(gguf, i));
    }
    gguf_free(gguf);
}

// identity of a model: metadata, vocabulary, tensor table and size of its file
static std::string polykv_fingerprint(const llama_model * model, const std::string & path) {
    hasher hash;

    for (int32_t i = 0; i < llama_model_meta_count(model); ++i) {
        char buf[1024];
        llama_model_meta_key_by_index(model, i, buf, sizeof(buf));
        hash.add(buf);
        llama_model_meta_val_str_by_index(model, i, buf, sizeof(buf));
        hash.add(buf);
    }

    const llama_vocab * vocab = llama_model_get_vocab(model);
    for (int32_t i = 0; i < llama_vocab_n_tokens(vocab); ++i) {
        hash.add(llama_vocab_get_text(vocab, i));
    }

    hash.add(llama_model_size(model));
    hash.add(llama_model_n_params(model));
    add_tensor_table(hash, path);

    std::error_code ec;
    const auto size = std::filesystem::file_size(path, ec);
    hash.add(ec ? 0 : (uint64_t) size);

    return string_format("%016llx", (unsigned long long) hash.state);
}

std::string polykv_kv_identity(const common_params & params, uint32_t n_streams) {
    std::string res = string_format("%s %s s%u fa%d rope%d/%g/%g yarn%g/%g/%g/%g/%d %s",
        ggml_type_name(params.cache_type_k), ggml_type_name(params.cache_type_v), n_streams, (int) params.flash_attn_type,
        (int) params.rope_scaling_type, params.rope_freq_base, params.rope_freq_scale,
        params.yarn_ext_factor, params.yarn_attn_factor, params.yarn_beta_fast, params.yarn_beta_slow, params.yarn_orig_ctx, llama_build_info());
    for (const auto & cv : params.control_vectors) {
        res += string_format(" cv%s/%g", cv.fname.c_str(), cv.strength);
    }
    return res;
}

json polykv_hello(const llama_model * model, const std::string & path, const std::string & name, const llama_polykv_info & mem) {
    const auto & settings = polykv_get_settings();

    std::string sharing = "none";
    std::string why     = !settings.off_reason.empty() ? settings.off_reason : "--polykv-max-pools is 0";
    if (settings.on()) {
        switch (mem.kind) {
            case LLAMA_POLYKV_CLASS_NONE:      why = "this model has no memory that can be shared";                          break;
            case LLAMA_POLYKV_CLASS_ANY:       sharing = "any";        why = settings.split ? "plain attention over a split cache: a prefix is copied, with the whole stream" : "plain attention over a unified cache"; break;
            case LLAMA_POLYKV_CLASS_WINDOW:    sharing = "checkpoint"; why = "sliding-window attention: a whole pool, or up to one of its checkpoints"; break;
            case LLAMA_POLYKV_CLASS_RECURRENT: sharing = "checkpoint"; why = "recurrent or hybrid state: a whole pool, or up to one of its checkpoints"; break;
        }
    }

    char arch[128] = "";
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));

    return json {
        {"model", {
            {"fingerprint", polykv_fingerprint(model, path)},
            {"name",        name},
            {"arch",        std::string(arch)},
            {"size_bytes",  llama_model_size(model)},
            {"n_params",    llama_model_n_params(model)},
            {"n_vocab",     llama_vocab_n_tokens(llama_model_get_vocab(model))},
            {"n_ctx_train", llama_model_n_ctx_train(model)},
            {"n_swa",       llama_model_n_swa(model)},
            {"recurrent",   llama_model_is_recurrent(model)},
            {"hybrid",      llama_model_is_hybrid(model)},
        }},
        {"max_pools",         settings.max_pools},
        {"pools_price_bytes", mem.price_bytes},
        {"kv", {
            {"streams",                 mem.n_streams},
            {"cells",                   mem.n_cells * mem.n_streams},
            {"cells_swa",               mem.n_cells_swa * mem.n_streams},
            {"bytes_per_token",         mem.bytes_per_cell},
            {"bytes_per_token_swa",     mem.bytes_per_cell_swa},
            {"bytes_recurrent_per_seq", mem.bytes_per_row},
        }},
        {"prefix_sharing",     sharing},
        {"prefix_sharing_why", why},
    };
}
