#include "server-polykv.h"

// Sequences in files. Layout, all integers little-endian: magic, u64 length of everything, then fields (see visit()), then a
// u64 hash over all bytes before it. A file is believed only when length, hash and fingerprint are right.

#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <unistd.h>

static constexpr char POLYKV_FILE_MAGIC[8] = { 'P', 'K', 'V', 'S', 'E', 'Q', '1', '\n' };

namespace {

// FNV-1a over words of 8 bytes, the tail padded with zeros
uint64_t hash_bytes(const std::vector<uint8_t> & data) {
    uint64_t res = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < data.size(); i += 8) {
        uint64_t word = 0;
        std::memcpy(&word, data.data() + i, std::min<size_t>(8, data.size() - i));
        res  = (res ^ word) * 0x100000001b3ull;
        res ^= res >> 29;
    }
    return res;
}

struct writer {
    std::vector<uint8_t> out;

    void raw(const void * data, size_t size) {
        const auto * bytes = static_cast<const uint8_t *>(data);
        out.insert(out.end(), bytes, bytes + size);
    }
    template <typename T> void num(T & val) { raw(&val, sizeof(val)); }
    template <typename T> void bytes(T & val) {
        uint64_t n = val.size() * sizeof(*val.data());
        num(n);
        raw(val.data(), n);
    }
};

struct reader {
    const std::vector<uint8_t> & in;
    size_t at;

    void raw(void * data, size_t size) {
        if (size > in.size() - at) {
            throw std::runtime_error("the file is shorter than it says");
        }
        std::memcpy(data, in.data() + at, size);
        at += size;
    }
    template <typename T> void num(T & val) { raw(&val, sizeof(val)); }
    template <typename T> void bytes(T & val) {
        uint64_t n = 0;
        num(n);
        if (n > in.size() - at || n % sizeof(*val.data()) != 0) {
            throw std::runtime_error("the file is shorter than it says");
        }
        val.resize(n / sizeof(*val.data()));
        raw(val.data(), n);
    }
};

// one description of the fields for both directions
template <typename V> void visit(V & v, polykv_file & file) {
    v.bytes(file.fingerprint);
    v.bytes(file.tokens);
    v.num(file.from);

    uint32_t n = file.parts.size();
    v.num(n);
    file.parts.resize(n);
    for (auto & part : file.parts) {
        if (!part) {
            part = std::make_shared<polykv_part>();
        }
        v.num(part->from);
        v.num(part->to);
        v.bytes(part->tgt);
        v.bytes(part->dft);
    }

    n = file.checkpoints.size();
    v.num(n);
    file.checkpoints.resize(n);
    for (auto & cur : file.checkpoints) {
        auto copy = cur ? *cur : common_prompt_checkpoint {};
        v.num(copy.n_tokens);
        v.num(copy.pos_min);
        v.num(copy.pos_max);
        v.bytes(copy.data_tgt);
        v.bytes(copy.data_dft);
        v.bytes(copy.data_spec);
        cur = std::make_shared<const common_prompt_checkpoint>(std::move(copy));
    }
}

struct closing_fd {
    int fd;
    ~closing_fd() {
        if (fd >= 0) {
            close(fd);
        }
    }
};

std::runtime_error errno_error(const std::string & what) {
    return std::runtime_error(what + ": " + std::strerror(errno));
}

void write_all(int fd, const std::vector<uint8_t> & data) {
    for (size_t at = 0; at < data.size(); ) {
        const ssize_t n = write(fd, data.data() + at, data.size() - at);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            throw errno_error("writing failed");
        }
        at += n;
    }
}

} // namespace

void polykv_write_file(const std::string & path, const polykv_file & file) {
    writer w;
    uint64_t size = 0;
    w.raw(POLYKV_FILE_MAGIC, sizeof(POLYKV_FILE_MAGIC));
    w.num(size);
    polykv_file copy = file;
    visit(w, copy);
    size = w.out.size() + sizeof(uint64_t);
    std::memcpy(w.out.data() + sizeof(POLYKV_FILE_MAGIC), &size, sizeof(size));
    uint64_t hash = hash_bytes(w.out);
    w.num(hash);

    const std::string tmp = path + ".part";
    const closing_fd out { open(tmp.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600) };
    if (out.fd < 0) {
        throw errno_error("cannot create " + tmp);
    }
    try {
        write_all(out.fd, w.out);
        if (fsync(out.fd) != 0 || std::rename(tmp.c_str(), path.c_str()) != 0) {
            throw errno_error("cannot finish " + path);
        }
    } catch (...) {
        std::remove(tmp.c_str());
        throw;
    }
}

polykv_file polykv_read_file(const std::string & path, const std::string & fingerprint) {
    const closing_fd in { open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC) };
    if (in.fd < 0) {
        throw errno_error("cannot open " + path);
    }
    const off_t end = lseek(in.fd, 0, SEEK_END);
    if (end < (off_t) (sizeof(POLYKV_FILE_MAGIC) + 2*sizeof(uint64_t))) {
        throw std::runtime_error("the file is too short");
    }
    std::vector<uint8_t> data(end);
    for (size_t at = 0; at < data.size(); ) {
        const ssize_t n = pread(in.fd, data.data() + at, data.size() - at, at);
        if (n <= 0) {
            throw errno_error("reading failed");
        }
        at += n;
    }

    uint64_t size = 0, hash = 0;
    std::memcpy(&size, data.data() + sizeof(POLYKV_FILE_MAGIC), sizeof(size));
    std::memcpy(&hash, data.data() + data.size() - sizeof(hash), sizeof(hash));
    if (std::memcmp(data.data(), POLYKV_FILE_MAGIC, sizeof(POLYKV_FILE_MAGIC)) != 0) {
        throw std::runtime_error("not a saved sequence");
    }
    if (size != data.size()) {
        throw std::runtime_error("the file has another length than it says");
    }
    data.resize(data.size() - sizeof(hash));
    if (hash_bytes(data) != hash) {
        throw std::runtime_error("the file is damaged: its hash is wrong");
    }

    polykv_file file;
    reader r { data, sizeof(POLYKV_FILE_MAGIC) + sizeof(size) };
    visit(r, file);
    if (file.fingerprint != fingerprint) {
        throw std::runtime_error("the file is of another model, build or cache type");
    }
    return file;
}
