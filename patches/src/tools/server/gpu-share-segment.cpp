#include "gpu-share-segment.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>

#ifndef _WIN32
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

std::string gpu_share_segment::name_of(const std::string & key) {
    return "/opencoti-gpu-" + key;
}

bool gpu_share_is_key(const std::string & key) {
    return !key.empty() && key.size() <= 64 && key.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == std::string::npos;
}

#ifdef _WIN32

gpu_share_segment::gpu_share_segment(const std::string &) {
    throw std::runtime_error("shared memory of this system is not supported");
}

gpu_share_segment::~gpu_share_segment() = default;

#else

static const char * REMEDY = "; remove it when no engine uses it, or choose another --gpu-share-key";

namespace {

struct file_descriptor {
    int fd;
    ~file_descriptor() { close(fd); }
};

std::string system_error(const std::string & what) {
    return what + ": " + std::strerror(errno);
}

// what must be true before anything is written
void check_file(const struct stat & info) {
    if (info.st_uid != geteuid()) {
        throw std::runtime_error("it belongs to user " + std::to_string(info.st_uid) + " and this process runs as user " + std::to_string(geteuid())
            + "; run them as one user, or choose another --gpu-share-key");
    }
    if (info.st_mode & (S_IWGRP | S_IWOTH)) {
        throw std::runtime_error(std::string("other users may write to it") + REMEDY);
    }
    const long    page_size = sysconf(_SC_PAGESIZE); // some systems round up
    const int64_t rounded   = ((int64_t) GPU_SHARE_SIZE + page_size - 1)/page_size*page_size;
    if (info.st_size != 0 && info.st_size != (off_t) GPU_SHARE_SIZE && info.st_size != (off_t) rounded) {
        throw std::runtime_error("it has " + std::to_string(info.st_size) + " bytes instead of " + std::to_string(GPU_SHARE_SIZE) + REMEDY);
    }
}

// everybody writes the same, and the magic last
void write_header(gpu_share_page & page) {
    uint32_t version = 0, slot_count = 0;
    page.header.version.compare_exchange_strong(version, GPU_SHARE_VERSION);
    page.header.slot_count.compare_exchange_strong(slot_count, GPU_SHARE_SLOTS);
    uint64_t magic = 0;
    page.header.magic.compare_exchange_strong(magic, GPU_SHARE_MAGIC);
}

} // namespace

gpu_share_segment::gpu_share_segment(const std::string & key) {
    const int fd = shm_open(name_of(key).c_str(), O_RDWR | O_CREAT, S_IRUSR | S_IWUSR);
    if (fd < 0) {
        const bool foreign = errno == EACCES || errno == EPERM;
        throw std::runtime_error(system_error("cannot open it") + (foreign ? "; it may belong to another user, choose another --gpu-share-key" : ""));
    }
    const file_descriptor guard { fd };

    struct stat info = {};
    if (fstat(fd, &info) != 0) {
        throw std::runtime_error(system_error("cannot look at it"));
    }
    check_file(info);
    if (info.st_size == 0 && ftruncate(fd, GPU_SHARE_SIZE) != 0) {
        if (fstat(fd, &info) != 0 || info.st_size == 0) { // where the size can be set only once, somebody else did
            throw std::runtime_error(system_error("cannot set its size"));
        }
    }
#ifdef __linux__
    if (const int err = posix_fallocate(fd, 0, GPU_SHARE_SIZE)) { // a full file system shows here, and not as SIGBUS at the first write
        errno = err;
        throw std::runtime_error(system_error("no memory for it"));
    }
#endif
    void * ptr = mmap(nullptr, GPU_SHARE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ptr == MAP_FAILED) {
        throw std::runtime_error(system_error("cannot map it"));
    }
    mapped = static_cast<gpu_share_page *>(ptr);
    if (mapped->header.magic.load() == 0) {
        write_header(*mapped);
    }
    const std::string wrong = gpu_share_check(*mapped);
    if (!wrong.empty()) {
        munmap(ptr, GPU_SHARE_SIZE);
        throw std::runtime_error(wrong + REMEDY);
    }
}

gpu_share_segment::~gpu_share_segment() {
    munmap(mapped, GPU_SHARE_SIZE);
}

#endif
